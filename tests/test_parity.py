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
from conformance import each_draft, plain_greedy
from programs import status
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import drafters.convert
import eval.parity
from drafters import generate
from drafters.layouts.export import export
from drafters.loop.generate import Step, Trace
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import Eagle3Drafter
from eval.configs import ParityConfig
from eval.figures.diagnosis import FAULT, PASS, compared, decoded, ranked
from eval.figures.readings import (
    AS_LOADED,
    SHORTER,
    Rate,
    acceptance,
    agreement,
    apart,
    gain,
    most_accepted,
    pooled,
    prompts_needed,
    reading,
)
from eval.measure.mistakes import MISTAKES, remade
from eval.measure.runs import Outcome
from eval.report.diagnosis_page import verdict_lines

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
    head = copy.deepcopy(overfitted.eagle3().module)
    for weights in head.parameters():
        weights.data = weights.data.bfloat16().float()
    rounded = remade(overfitted.eagle3(), head)
    return decoded(rounded if name == AS_LOADED else BY_NAME[name].plant(rounded), half(part), CONFIG, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    """Catches a mistake that is tried wrongly, and statistics that do not see it; on the prompts of our own loop."""
    drafter = overfitted.eagle3()
    with mock.patch("eval.figures.diagnosis.decoded", lambda drafter, prompts, config, name: ours(name)):
        found = compared(drafter, ours(AS_LOADED), theirs(name, 0), half(0), CONFIG)
    assert found["verdict"] == FAULT
    assert found["named"][0] == name and len(found["named"]) <= 2, found["named"]
    assert len(found["readings"]) > len(PLANTED)


@pytest.mark.slow
def test_what_is_served_right_passes() -> None:
    """Catches errors that are too small: rounding, or other prompts, would fail the check."""
    found = compared(overfitted.eagle3(), ours(AS_LOADED), theirs(AS_LOADED, 0), half(0), CONFIG)
    assert found["verdict"] == PASS and not found["named"] and len(found["readings"]) == 1
    other = reading(AS_LOADED, "", ours(AS_LOADED), theirs(AS_LOADED, 1), CONFIG.depth, paired=False)
    assert max(map(abs, other.apart)) < 4.0


def tau_of(name: str) -> float:
    """tau of a reading on the first half, from its steps."""
    steps = [step for one in ours(name) if one.trace is not None for step in one.trace.steps]
    return sum(step.committed for step in steps) / sum(step.forwards for step in steps)


@pytest.mark.slow
def test_without_an_engine_the_right_reading_is_found() -> None:
    """Catches a checkpoint whose norm_output was misread, and that the ranking does not correct."""
    wrong = planted("feedback on the wrong side of the final norm")
    found = ranked(wrong, decoded(wrong, half(0), CONFIG, ""), half(0), CONFIG)
    assert found["verdict"] == FAULT and found["named"][0] == "feedback on the wrong side of the final norm"
    with mock.patch("eval.figures.diagnosis.decoded", lambda drafter, prompts, config, name: ours(name)):
        right = ranked(overfitted.eagle3(), ours(AS_LOADED), half(0), CONFIG)
    assert right["verdict"] == PASS and right["named"][0] == AS_LOADED
    lost = right["gains"]["fc_norm left out"]
    assert lost["value"] == pytest.approx(tau_of("fc_norm left out") - tau_of(AS_LOADED))
    assert lost["prompts_needed"] == prompts_needed(Rate(lost["value"], lost["error"]), len(half(0)))


def stopping(drafter: Any) -> Any:
    """The drafter, which drafts nothing after half of the new tokens."""
    propose, end = drafter.propose, overfitted.BEGUN + overfitted.NEW // 2
    drafter.propose = lambda state: propose(state) if state.length < end else state.nothing
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_shorter_drafts_are_a_fault(stops: bool) -> None:
    """Catches an engine that drafts one token, or none after some text: each position accepts what it should."""
    wrong = stopping(remade(overfitted.eagle3())) if stops else remade(overfitted.eagle3(), depth=1)
    short = decoded(wrong, half(0), CONFIG, "")
    found = compared(overfitted.eagle3(), ours(AS_LOADED), short, half(0), CONFIG)
    (loaded,) = found["readings"]
    assert loaded["within"] and max(map(abs, loaded["apart"])) < 2  # acceptance does not show it
    assert (found["verdict"], found["named"]) == (FAULT, [SHORTER]) and loaded["drafted"]["value"] == overfitted.DEPTH
    drafted = found["engine"]["drafted"]["value"]
    assert drafted < 2
    told = verdict_lines(found | {"environment": {"config": {"engine": "vllm"}}})
    assert told[0] == f"fault: vllm drafts {drafted:.2f} tokens a step, and our loop 3.00"
    assert told[1].startswith("shorter drafts: check num_speculative_tokens of the engine, and max_position_embeddings")


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
    head = drafter.module
    moved = {"draft positions one too low": -1, "draft positions one too high": 1}.get(name, 0)
    theta = 10_000.0 if name == "rope_theta 10000" else None
    ids: Any = head.d2t + (0 if name == "d2t taken for ids" else torch.arange(overfitted.KEPT))

    def compare(state: DecodeState, draft: DraftTree) -> None:
        if draft.size == overfitted.DEPTH:
            expected = chain(drafter, state.tokens[0], moved, name == "embedding of token i, not i + 1", theta, ids)
            assert draft.tokens[0].tolist() == expected
            seen.append(draft)

    prompt = half(1)[0]
    with each_draft(drafter, compare):
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
    assert found.drafted is not None and found.drafted.value == pytest.approx(2)  # two steps have room for 3 tokens
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
    assert apart(Rate(0.75, 0.03), Rate(0.5, 0.04)) == pytest.approx(0.25 / 0.05)  # errors add as squares


def test_readings_are_told_apart_by_the_differences_of_each_prompt() -> None:
    """Worked by hand. Catches errors of two independent samples: a head whose taps are one layer off then passes. Also
    catches a number of prompts that is not the square of the missing precision."""

    def of(forwards: list[int]) -> list[Outcome]:
        """Prompts with four tokens each, after that of the prefill, in so many forwards."""
        steps = {2: [(2, 1, 2)] * 2, 3: [(2, 1, 2), (2, 0, 1), (2, 0, 1)], 4: [(2, 0, 1)] * 4}
        return [outcome([1] * 5, *steps[count]) for count in forwards]

    loaded, better, worse = of([4, 4, 2, 2] * 4), of([4, 3, 2, 2] * 4), of([4] * 16)
    tau, higher = 64 / 48, 64 / 44
    parts = [(4 - higher * b) / 44 - (4 - tau * a) / 48 for a, b in ((4, 4), (4, 3), (2, 2), (2, 2))]
    error = (4 * sum(part**2 for part in parts) * 16 / 15) ** 0.5
    assert gain(loaded, better) == pytest.approx((higher - tau, error)) and higher - tau > 2.4 * error
    assert gain(loaded, loaded) == pytest.approx((0.0, tau / 48))  # one forward more or less
    assert most_accepted({AS_LOADED: loaded, "worse": worse, "better": better}) == ["better"]
    assert most_accepted({AS_LOADED: loaded, "as good": of([2, 2, 4, 4] * 4)}) == [AS_LOADED, "as good"]
    assert abs(apart(acceptance(loaded, 2).tau, acceptance(better, 2).tau)) < 0.8
    assert prompts_needed(Rate(0.1, 0.2), 8) == 8 * 16 and prompts_needed(Rate(-0.4, 0.1), 8) == 2
    assert prompts_needed(Rate(0.0, 0.1), 8) is None


def test_equal_steps_follow_equal_texts() -> None:
    """Worked by hand. Catches steps that are compared after other texts, or paired by number."""
    one = outcome([5, 6, 7, 8, 9, 4], (2, 1, 2), (2, 0, 1), (2, 0, 1), (2, 0, 1))  # begin after 1, 3, 4, 5 tokens
    other = outcome([5, 6, 7, 8, 9, 3], (2, 0, 1), (2, 0, 1), (2, 0, 1), (2, 1, 2))  # after 1, 2, 3, 4
    found = agreement([one], [other])
    assert found is not None and found.value == pytest.approx(1 / 3)  # of 1, 3 and 4, only 3 is equal
    apart_at_once = outcome([4, 6, 7, 8, 9, 4], (2, 1, 2), (2, 0, 1), (2, 0, 1), (2, 0, 1))
    assert agreement([one], [apart_at_once]) is None
    cut, whole = outcome([5, 6, 7], (2, 2, 2)), outcome([5, 6, 7], (2, 1, 2))  # by the limit, and by a rejection
    assert agreement([cut], [whole]) == Rate(0.0, 1.0)


@pytest.mark.slow
def test_the_program_names_a_fault_of_a_served_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that gets other prompts or limits, a head that is not exported, and a page without the name."""
    head, fault = ROOT / "checkpoints" / "stdlib-eagle", "embedding of token i, not i + 1"
    monkeypatch.setenv("HEAD", str(head))
    monkeypatch.setenv("PLANTED", fault)
    given = ["--checkpoint", head, "--target", ROOT / "checkpoints" / "stdlib-target", "--engine", "vllm"]
    given += [f"python={sys.executable}", "module=tests.planted_engine", "target.dtype=float32", "target.device=cpu"]
    given += ["count=10", "max_new_tokens=20", "depth=2", "batch=16", "threads=1", f"out={tmp_path}"]
    assert status(eval.parity.main, *given) == 1
    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["verdict"] == FAULT and found["named"] == [fault]
    assert found["environment"]["engine_facts"]["engine"] == "Planted"
    assert found["engine"]["tau"]["value"] > 1.2
    page = (tmp_path / "parity.md").read_text()
    assert f"- {fault}: check {BY_NAME[fault].check}" in page


def program(folder: Path, head: Path, *more: Any) -> tuple[int, dict[str, Any]]:
    """Exit status and parity.json of the check of a head of ``overfitted``, on prompts that it learnt."""
    line = ["--checkpoint", head, "--target", folder / "target", f"out={folder / 'out'}", "threads=1", "batch=16"]
    line += ["target.dtype=float32", "target.device=cpu", f"max_new_tokens={overfitted.NEW}", "depth=3", *more]
    with mock.patch("eval.figures.diagnosis.prompts_of", lambda config, drafter: half(0)):
        found = status(eval.parity.main, *line)
    written = folder / "out" / "parity.json"
    return found, json.loads(written.read_text()) if written.exists() else {}


@pytest.mark.slow
def test_the_probe_settles_an_ambiguous_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches advice that leads nowhere: from the error of a folder with two readings to the right one, as typed."""
    overfitted.save_eagle3(tmp_path)
    source, ours = tmp_path / "released", tmp_path / "ours"
    export(str(tmp_path / "head"), "sglang", source)
    config = json.loads((source / "config.json").read_text())
    del config["made_from"]
    (source / "config.json").write_text(json.dumps(config))
    line = [source, "--target", tmp_path / "target", "--out", ours]
    assert status(drafters.convert.main, *line) == 1
    told = capsys.readouterr().err
    assert f"python -m drafters.convert {source} --target T --out OUT --taps 1,2,3 (and --taps 0,1,2)" in told
    assert "python -m eval.parity --checkpoint OUT --target T --engine ours says which accepts more" in told
    assert program(tmp_path, source, "--engine", "ours")[0] == 1
    assert f"imported first: python -m drafters.convert {source} --target MODEL --out" in capsys.readouterr().err
    assert status(drafters.convert.main, *line, "--taps", "0,1,2") == 0  # the wrong one
    code, found = program(tmp_path, ours, "--engine", "ours")
    assert (code, found["named"]) == (1, ["layer ids one too high"])
    assert "layer ids one too high: raise each number of taps by one" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--engine", "sglang"], "sglang does not run: not installed: there is no .venv-sglang/bin/python (see docs"),
        (["--engine", "ours", "python=python3"], "python and module are of another engine, and engine is ours"),
        (["--engine", "vllm", "--prompts", "none.jsonl"], "no prompt file at none.jsonl"),
        (["--engine", "vllm", "python=none/python"], "vllm does not run: not installed: there is no none/python"),
        (["--engine", "ours", "max_new_tokens=4096"], "begun_tokens and max_new_tokens need 4,112 positions"),
        (["--engine", "ours", "--checkpoint", "KANGAROO"], "'kangaroo'; give an EAGLE head, or one that reads several"),
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
