"""`python -m eval.parity --engine ours` on DFlash and DSpark heads: the layout that was trained accepts most."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import overfitted_block
import pytest
from conformance import plain_greedy
from overfitted import BEGUN, NEW, texts
from programs import status

import eval.parity
from drafters import generate
from drafters.hub.checkpoint import make_config, save_checkpoint
from eval.configs import ParityConfig
from eval.figures.parity import FAULT, PASS, decoded, ranked
from eval.figures.readings import AS_LOADED
from eval.measure.block_mistakes import BLOCK_MISTAKES
from eval.measure.runner import Outcome

CONFIG = ParityConfig.model_validate(
    {"target": {"path": "t"}, "checkpoint": "c", "engine": "ours", "batch": 16, "depth": overfitted_block.DEPTH}
    | {"max_new_tokens": NEW}
)
OTHER = {"dflash": "anchor-first", "dspark": "fill-in"}  # not the one that was trained


def prompts() -> list[list[int]]:
    """A few that the head learnt."""
    return texts()[: overfitted_block.COUNT, :BEGUN].tolist()  # type: ignore[no-any-return]


@cache
def right(method: str) -> list[Outcome]:
    return decoded(overfitted_block.drafter(method), prompts(), CONFIG, AS_LOADED)


@pytest.mark.parametrize("method", OTHER)
def test_the_probe_finds_the_layout(method: str) -> None:
    """Catches a probe that does not try the other layout, tries it wrongly, or prefers it to the right one."""
    found = ranked(overfitted_block.drafter(method), right(method), prompts(), CONFIG)
    taus = {one["name"]: one["tau"]["value"] for one in found["readings"]}
    assert found["verdict"] == PASS and AS_LOADED in found["named"], taus
    assert taus[AS_LOADED] > 2 and taus["the other layout"] < taus[AS_LOADED] - 0.5, taus
    wrong = overfitted_block.misread(method, layout=OTHER[method])
    found = ranked(wrong, decoded(wrong, prompts(), CONFIG, ""), prompts(), CONFIG)
    assert found["verdict"] == FAULT and found["named"] == ["the other layout"], found["readings"]
    assert next(one["check"] for one in found["readings"] if one["name"] == "the other layout").endswith("--layout)")


def test_the_probe_finds_states_one_layer_apart() -> None:
    """Catches ids in the wrong numbering that no reading corrects, or that the layout is blamed for."""
    wrong = overfitted_block.misread("dflash", taps=[tap - 1 for tap in overfitted_block.drafter("dflash").taps])
    found = ranked(wrong, decoded(wrong, prompts(), CONFIG, ""), prompts(), CONFIG)
    assert found["verdict"] == FAULT and found["named"] == ["layer ids one too high"]


@pytest.mark.parametrize("mistake", BLOCK_MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_changes_drafts_and_no_token(mistake: Any) -> None:
    """Catches a mistake that changes nothing, the shared drafter, or the output."""
    drafter = overfitted_block.drafter("dflash")
    before = {name: value.clone() for name, value in drafter.module.state_dict().items()}
    wrong, prompt = mistake.plant(drafter), prompts()[0]
    assert wrong is not None and wrong is not drafter
    tokens = generate(drafter.target, wrong, [prompt], max_new_tokens=NEW, eos_token_id=[]).tokens[0].tolist()
    assert tokens[-NEW:] == plain_greedy(drafter.target, prompt, NEW)[-NEW:]
    assert all(value.equal(before[name]) for name, value in drafter.module.state_dict().items())
    made = decoded(wrong, prompts(), CONFIG, mistake.name)
    assert [one.trace and one.trace.steps for one in made] != [one.trace and one.trace.steps for one in right("dflash")]


def test_the_program_says_which_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a program that does not take block heads, or hides the key to correct."""
    drafter = overfitted_block.drafter("dflash")
    target = tmp_path / "target"
    drafter.target.model.save_pretrained(target)
    given = overfitted_block.options("dflash") | {"layout": "anchor-first"}
    with mock.patch.object(drafter.target, "name", str(target)):
        save_checkpoint(tmp_path / "head", drafter.module, make_config("dflash", given, drafter.target))
    line = [
        "--checkpoint",
        tmp_path / "head",
        "--target",
        target,
        "target.dtype=float32",
        "target.device=cpu",
        "count=8",
    ]
    line += [f"out={tmp_path / 'out'}", f"depth={overfitted_block.DEPTH}", "begun_tokens=8", f"max_new_tokens={NEW}"]
    assert status(eval.parity.main, *map(str, line), "--engine", "vllm") == 1
    assert "has no worker for heads of the method 'dflash'; give --engine ours" in capsys.readouterr().err
    with mock.patch("eval.figures.parity.prompts_of", lambda config, drafter: prompts()):  # those that it learnt
        assert status(eval.parity.main, *map(str, line), "--engine", "ours") == 1
    assert "check sample_from_anchor: true is anchor-first" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert found["named"][0] == "the other layout"
