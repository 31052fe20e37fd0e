"""`python -m eval.parity`: faults planted in a fake engine are named, and what is served right passes."""

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import overfitted
import pytest
import torch
from conformance import plain_greedy
from programs import status
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import eval.parity
from drafters import generate
from drafters.loop.generate import Step, Trace
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle3 import Eagle3Drafter
from eval.configs import ParityConfig
from eval.figures.parity import FAULT, PASS, compared, decoded, ranked
from eval.figures.readings import AS_LOADED, Rate, acceptance, agreement, apart, explaining, pooled, reading
from eval.measure.mistakes import MISTAKES
from eval.measure.runner import Outcome

ROOT = Path(__file__).parents[1]
BY_NAME = {mistake.name: mistake for mistake in MISTAKES}
# One or more of each kind that the head has.
PLANTED = (
    "layer ids one too high",
    "layer ids one too low",
    "layer ids in reverse order",
    "feedback on the wrong side of the final norm",
    "residual on the wrong side of hidden_norm",
    "fc_norm left out",
    "hidden_norm left out",
    "input_layernorm left out",
    "embedding and feature swapped",
    "embedding of token i, not i + 1",
    "draft positions one too low",
    "draft positions one too high",
    "rope_theta 10000",
    "d2t ignored",
    "d2t taken for ids",
)
CONFIG = ParityConfig.model_validate(
    {"target": {"path": "t"}, "checkpoint": "c", "engine": "vllm", "batch": 16, "depth": overfitted.DEPTH}
    | {"max_new_tokens": overfitted.NEW}
)


def half(number: int) -> list[list[int]]:
    """Half of the prompts that the head learnt."""
    count = overfitted.TEXTS // 2
    found: list[list[int]] = overfitted.texts()[number * count : (number + 1) * count, : overfitted.BEGUN].tolist()
    return found


@cache
def planted(name: str) -> Eagle3Drafter:
    """The head, with a mistake."""
    drafter: Any = overfitted.eagle3()
    found: Any = drafter if name == AS_LOADED else BY_NAME[name].plant(drafter)
    assert found is not None, name
    return found


@cache
def ours(name: str) -> list[Outcome]:
    """What our loop does with a reading on the first half."""
    return decoded(planted(name), half(0), CONFIG, name)


@cache
def theirs(name: str, part: int) -> list[Outcome]:
    """What a fake engine with this fault and another rounding does, on one half."""
    found = planted(name)
    head = copy.deepcopy(found.module)
    for weights in head.parameters():
        weights.data = weights.data.bfloat16().float()
    return decoded(type(found)(found.target, head, found.settings), half(part), CONFIG, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    """Catches a mistake that is tried wrongly, and statistics that do not see it; on the prompts of our own loop."""
    drafter = overfitted.eagle3()
    with mock.patch("eval.figures.parity.decoded", lambda drafter, prompts, config, name: ours(name)):
        found = compared(drafter, ours(AS_LOADED), theirs(name, 0), half(0), CONFIG)
    assert found["verdict"] == FAULT
    assert found["named"][0] == name and len(found["named"]) <= 2, found["named"]
    assert len(found["readings"]) > len(PLANTED)


@pytest.mark.slow
def test_faults_are_named_on_other_prompts() -> None:
    """Catches names that are found by equal drafts only: acceptance alone leaves ties, and the fault is among them."""
    right, ties = 0, []
    for name in PLANTED:
        beside = [reading(one, "", ours(one), theirs(name, 1), CONFIG.depth, paired=False) for one in PLANTED]
        named = [one.name for one in explaining(beside)]
        right += name in named
        ties.append(len(named))
        assert not reading(AS_LOADED, "", ours(AS_LOADED), theirs(name, 1), CONFIG.depth, paired=False).within, name
    assert right >= 0.75 * len(PLANTED)  # the rule of two standard errors misses some
    assert sum(ties) / len(ties) < 4, ties


@pytest.mark.slow
def test_what_is_served_right_passes() -> None:
    """Catches errors that are too small: rounding, or other prompts, would fail the check."""
    found = compared(overfitted.eagle3(), ours(AS_LOADED), theirs(AS_LOADED, 0), half(0), CONFIG)
    assert found["verdict"] == PASS and not found["named"] and len(found["readings"]) == 1
    other = reading(AS_LOADED, "", ours(AS_LOADED), theirs(AS_LOADED, 1), CONFIG.depth, paired=False)
    assert max(map(abs, other.apart)) < 4.0


@pytest.mark.slow
def test_without_an_engine_the_right_reading_is_found() -> None:
    """Catches a checkpoint whose norm_output was misread, and that the ranking does not correct."""
    wrong = planted("feedback on the wrong side of the final norm")
    found = ranked(wrong, decoded(wrong, half(0), CONFIG, ""), half(0), CONFIG)
    assert found["verdict"] == FAULT and found["named"][0] == "feedback on the wrong side of the final norm"
    with mock.patch("eval.figures.parity.decoded", lambda drafter, prompts, config, name: ours(name)):
        right = ranked(overfitted.eagle3(), ours(AS_LOADED), half(0), CONFIG)
    assert right["verdict"] == PASS and right["named"][0] == AS_LOADED


def chain(
    drafter: Eagle3Drafter, known: list[int], moved: int, own: bool, theta: float | None, ids: Tensor
) -> list[int]:
    """The greedy draft after ``known`` by whole forwards of the module, with the faults that are not in its weights."""
    head: Any = copy.deepcopy(drafter.module)
    if theta is not None:
        head.config.rope_parameters = {"rope_theta": theta, "rope_type": "default"}
        head.rotary_emb = LlamaRotaryEmbedding(head.config)
    taps = drafter.target.features(torch.tensor([known[:-1]]), taps=drafter.taps).taps
    features = head.fused(torch.cat([taps[tap] for tap in drafter.taps], dim=-1))
    tokens, positions, begun = list(known), list(range(len(known) - 1)), len(known)
    for step in range(overfitted.DEPTH):
        read = tokens[:-1] if own else tokens[1:]
        predicted = head(features, drafter.target.embed(torch.tensor([read])), torch.tensor([positions]))[:, -1:]
        tokens.append(int(ids[head.lm_head(head.scored(predicted))[0, 0].argmax()]))
        features = torch.cat([features, predicted], dim=1)
        positions.append(begun - 1 + step + moved)
    return tokens[begun:]


@pytest.mark.slow
@pytest.mark.parametrize("name", (AS_LOADED, *PLANTED, "norm left out"))
def test_a_mistake_is_the_one_that_its_name_says(name: str) -> None:
    """Catches a fault planted elsewhere, which the fake engine would have too, and a mistake that changes tokens."""
    drafter, seen = planted(name), []
    propose, head = drafter.propose, drafter.module
    moved = {"draft positions one too low": -1, "draft positions one too high": 1}.get(name, 0)
    theta = 10_000.0 if name == "rope_theta 10000" else None
    ids: Any = head.d2t + (0 if name == "d2t taken for ids" else torch.arange(overfitted.KEPT))

    def compare(state: DecodeState) -> DraftTree:
        draft = propose(state)
        if draft.size == overfitted.DEPTH:
            expected = chain(drafter, state.tokens[0], moved, name == "embedding of token i, not i + 1", theta, ids)
            assert draft.tokens[0].tolist() == expected
            seen.append(draft)
        return draft

    prompt = half(1)[0]
    with mock.patch.object(drafter, "propose", compare):
        made = generate(drafter.target, drafter, [prompt], max_new_tokens=14, eos_token_id=[])
    assert len(seen) > 1
    assert made.tokens[0].tolist() == plain_greedy(drafter.target, prompt, 14)


def outcome(tokens: list[int], *steps: tuple[int, int, int]) -> Outcome:
    """Of (depth, accepted, committed) after one token of the prefill."""
    return Outcome(tokens, 0.0, 0.0, Trace([Step(0, depth, depth, *rest) for depth, *rest in steps]))


def test_acceptance_by_position() -> None:
    """Worked by hand. Catches short drafts that count as rejected, and conditional rates over all drafts."""
    prompts = [outcome([1] * 8, (2, 2, 3), (2, 0, 1), (1, 1, 2)), outcome([1] * 3, (2, 1, 2), (0, 0, 1))]
    found = acceptance(prompts, 3)
    assert found.tau is not None and found.tau.value == pytest.approx(9 / 5)
    assert [rate and round(rate.value, 4) for rate in found.cumulative] == [0.75, 0.3333, None]
    assert [rate and round(rate.value, 4) for rate in found.conditional] == [0.75, 0.5, None]


def test_the_error_is_that_of_prompts() -> None:
    """Catches errors as if steps of a prompt were independent: they are too small, and checks fail by chance."""
    generator = torch.Generator().manual_seed(0)
    values, errors = [], []
    for _ in range(300):
        rates, tries = torch.rand(40, generator=generator), torch.randint(5, 30, (40,), generator=generator)
        found = pooled(torch.binomial(tries.float(), rates, generator=generator).tolist(), tries.tolist())
        assert found is not None
        values.append(found.value)
        errors.append(found.error)
    spread = torch.tensor(values).std().item()
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.15)
    nothing = pooled([0, 0], [30, 20])
    assert nothing == Rate(0.0, 1 / 50) and pooled([0], [0]) is None
    assert apart(nothing, Rate(0.1, 0.0)) == pytest.approx(-5) and apart(None, nothing) == 0


def test_equal_steps_follow_equal_texts() -> None:
    """Worked by hand. Catches steps that are compared after other texts, or paired by number."""
    one = outcome([5, 6, 7, 8, 9, 4], (2, 1, 2), (2, 0, 1), (2, 0, 1), (2, 0, 1))  # begin after 1, 3, 4, 5 tokens
    other = outcome([5, 6, 7, 8, 9, 3], (2, 0, 1), (2, 0, 1), (2, 0, 1), (2, 1, 2))  # after 1, 2, 3, 4
    found = agreement([one], [other])
    assert found is not None and found.value == pytest.approx(1 / 3)  # of 1, 3 and 4, only 3 is equal
    apart_at_once = outcome([4, 6, 7, 8, 9, 4], (2, 1, 2), (2, 0, 1), (2, 0, 1), (2, 0, 1))
    assert agreement([one], [apart_at_once]) is None


@pytest.mark.slow
def test_the_program_names_a_fault_of_a_served_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that gets other prompts or limits, a head that is not exported, and a page without the name."""
    head, fault = ROOT / "checkpoints" / "stdlib-eagle", "embedding of token i, not i + 1"
    monkeypatch.setenv("HEAD", str(head))
    monkeypatch.setenv("PLANTED", fault)
    given = ["--checkpoint", head, "--target", ROOT / "checkpoints" / "stdlib-target", "--engine", "vllm"]
    given += [f"python={sys.executable}", "module=tests.planted_engine", "target.dtype=float32", "target.device=cpu"]
    given += ["count=16", "max_new_tokens=20", "depth=2", "batch=16", "threads=1", f"out={tmp_path}"]
    assert status(eval.parity.main, *given) == 1
    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["verdict"] == FAULT and found["named"] == [fault]
    assert found["environment"]["engine_facts"]["engine"] == "Planted"
    assert found["engine"]["tau"]["value"] > 1.2
    page = (tmp_path / "parity.md").read_text()
    assert f"- {fault}: check {BY_NAME[fault].check}" in page


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--engine", "sglang"], "sglang does not run: not installed: there is no .venv-sglang/bin/python (see docs"),
        (["--engine", "ours", "python=python3"], "python and module are of another engine, and engine is ours"),
        (["--engine", "vllm", "--prompts", "none.jsonl"], "no prompt file at none.jsonl"),
        (["--engine", "vllm", "python=none/python"], "vllm does not run: not installed: there is no none/python"),
        (["--engine", "ours", "max_new_tokens=4096"], "begun_tokens and max_new_tokens need 4,112 positions"),
        (["--engine", "ours", "--checkpoint", "KANGAROO"], "is of the method 'kangaroo'; give an EAGLE, EAGLE-3"),
    ],
)
def test_mistakes_of_the_user(
    given: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an engine that is missing, and found out after the prompts; a stack trace for a wrong word."""
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "checkpoints"
    given = [word.replace("KANGAROO", str(shipped / "stdlib-kangaroo")) for word in given]
    head = [] if "--checkpoint" in given else ["--checkpoint", shipped / "stdlib-eagle"]
    quick = ["target.device=cpu", "count=2"] + ([] if "max_new_tokens=4096" in given else ["max_new_tokens=4"])
    assert status(eval.parity.main, *head, "--target", shipped / "stdlib-target", *quick, *given) == 1
    assert told in capsys.readouterr().err
