"""`python -m eval.parity --engine ours` on block heads: the layout that was trained accepts most."""

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import overfitted_block
import pytest
from conformance import plain_greedy
from overfitted import BEGUN, NEW, texts
from programs import status
from safetensors.torch import load_file
from test_block_released import specforge
from test_eagle3_layouts import rewrite

import drafters.convert
import eval.parity
from drafters import generate
from drafters.hub.checkpoint import make_config, save_checkpoint
from drafters.layouts.export import export
from eval.configs import ParityConfig
from eval.figures.diagnosis import FAULT, PASS, compared, decoded, ranked
from eval.figures.readings import AS_LOADED
from eval.measure.block_mistakes import BLOCK_MISTAKES
from eval.measure.mistakes import remade
from eval.measure.runs import Outcome

CONFIG = ParityConfig.model_validate(
    {"target": {"path": "t"}, "checkpoint": "c", "engine": "ours", "batch": 16, "depth": overfitted_block.DEPTH}
    | {"max_new_tokens": NEW}
)
FIRST_NORM = "context keys with the first layer's k_norm"
OTHER = {"dflash": "anchor-first", "dspark": "fill-in", "dflash2": "anchor-first"}  # not the one that was trained
BY_NAME = {mistake.name: mistake for mistake in BLOCK_MISTAKES}
LATE = "Markov bias of the token before"
SELECTOR, CONVOLUTIONS = "selector ignored", "convolutions left out"


def prompts() -> list[list[int]]:
    """A few that the head learnt."""
    return texts()[: overfitted_block.COUNT, :BEGUN].tolist()  # type: ignore[no-any-return]


@cache
def right(method: str) -> list[Outcome]:
    return decoded(overfitted_block.drafter(method), prompts(), CONFIG, AS_LOADED)


def depending(method: str) -> Any:
    """The drafter, whose drafts depend much on the tokens before: the states tell these texts, too."""
    head = copy.deepcopy(overfitted_block.drafter(method).module)
    reads = head.markov_head.markov_w2.weight if method == "dspark" else head.candidate_selector.successor_codebook
    reads.data *= 8
    return remade(overfitted_block.drafter(method), head)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
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
    method = "dspark" if "Markov" in mistake.name else "dflash"
    method = "dflash2" if mistake.name in (SELECTOR, CONVOLUTIONS) else method
    drafter, expected = overfitted_block.drafter(method), right(method)
    if "windows" in mistake.name or mistake.name == SELECTOR:
        keys = {"sliding_window": drafter.module.shape.rows} if "windows" in mistake.name else {}
        drafter = remade(drafter, **keys) if keys else depending(method)
        expected = decoded(drafter, prompts(), CONFIG, AS_LOADED)
    before = {name: value.clone() for name, value in drafter.module.state_dict().items()}
    wrong, prompt = mistake.plant(drafter), prompts()[0]
    assert wrong is not None and wrong is not drafter
    tokens = generate(drafter.target, wrong, [prompt], max_new_tokens=NEW, eos_token_id=[]).tokens[0].tolist()
    assert tokens[-NEW:] == plain_greedy(drafter.target, prompt, NEW)[-NEW:]
    assert all(value.equal(before[name]) for name, value in drafter.module.state_dict().items())
    made = decoded(wrong, prompts(), CONFIG, mistake.name)
    assert [one.trace and one.trace.steps for one in made] != [one.trace and one.trace.steps for one in expected]


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, "wrong mask token") for method in OTHER]
    + [("dspark", "Markov head ignored"), ("dspark", LATE), ("dflash2", SELECTOR), ("dflash2", CONVOLUTIONS)]
    + [("dflash", "windows left out"), ("dflash", "windows at the other edge")],
)
def test_a_planted_fault_is_named(method: str, name: str) -> None:
    """Catches a mistake that the check does not try on this head, or does not tell from the others."""
    drafter = overfitted_block.drafter(method) if method == "dflash" else depending(method)
    drafter = remade(drafter, sliding_window=6) if "windows" in name else drafter
    theirs = decoded(BY_NAME[name].plant(drafter), prompts(), CONFIG, name)
    found = compared(drafter, decoded(drafter, prompts(), CONFIG, AS_LOADED), theirs, prompts(), CONFIG)
    assert found["verdict"] == FAULT and found["named"][0] == name, found["named"]
    assert BY_NAME[name].plant(overfitted_block.drafter("dflash")) is None or name == "wrong mask token"


def saved(folder: Path, head: Any = None, method: str = "dflash", **options: Any) -> list[Any]:
    """Save a head and its target; returns the program's first options."""
    drafter = overfitted_block.drafter(method)
    drafter.target.model.save_pretrained(folder / "target")
    given = make_config(method, overfitted_block.options(method) | options, drafter.target)
    given["target"]["name"] = str(folder / "target")
    save_checkpoint(folder / "head", head or drafter.module, given)
    line = ["--checkpoint", folder / "head", "--target", folder / "target", f"out={folder / 'out'}", "threads=1"]
    line += ["target.dtype=float32", "target.device=cpu", "count=8", "begun_tokens=8", f"max_new_tokens={NEW}"]
    return line


def test_the_program_says_which_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a program that does not take block heads, hides the key to correct, or serves what vLLM cannot."""
    line = [*saved(tmp_path, layout="anchor-first"), f"depth={overfitted_block.DEPTH}"]
    assert status(eval.parity.main, *line, "--engine", "vllm", f"python={sys.executable}") == 1
    assert "its DFlash predicts no token at the anchor" in capsys.readouterr().err
    with mock.patch("eval.figures.diagnosis.prompts_of", lambda config, drafter: prompts()):  # those that it learnt
        assert status(eval.parity.main, *line, "--engine", "ours") == 1
    assert "the other layout: import it again with the other --layout" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert found["named"][0] == "the other layout"


def test_the_probe_settles_an_ambiguous_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches advice that leads nowhere: from the error of a folder with two layouts to the right one, as typed."""
    line = saved(tmp_path, method="dspark")
    source, ours = tmp_path / "released", tmp_path / "ours"
    export(str(tmp_path / "head"), "vllm", source)
    config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    specforge(config, weights)
    rewrite(source, config, weights)
    given = [source, "--target", tmp_path / "target", "--out", ours]
    assert status(drafters.convert.main, *given) == 1
    told = capsys.readouterr().err
    assert f"drafters.convert {source} --target T --out OUT --layout anchor-first (and --layout fill-in)" in told
    assert "python -m eval.parity --checkpoint OUT --target T --engine ours says which accepts more" in told
    line += [f"depth={overfitted_block.DEPTH}", "--engine", "ours"]
    assert status(eval.parity.main, "--checkpoint", source, *line[2:]) == 1
    assert f"imported first: python -m drafters.convert {source} --target MODEL --out" in capsys.readouterr().err
    assert status(drafters.convert.main, *given, "--layout", "fill-in") == 0  # the wrong one
    with mock.patch("eval.figures.diagnosis.prompts_of", lambda config, drafter: prompts()):
        assert status(eval.parity.main, "--checkpoint", ours, *line[2:]) == 1
    found = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert found["named"] == ["the other layout"], found["readings"]
    assert "the other layout: import it again with the other --layout" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_vllm_names_its_fault_of_several_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a block served with another depth than all of it, its head not exported, and a fault of vLLM that is
    neither told before nor named after."""
    head = copy.deepcopy(overfitted_block.drafter("dflash").module)
    for norm in (head.layers[1].self_attn.q_norm, head.layers[1].self_attn.k_norm):
        norm.weight.data.neg_()  # products of queries and keys stay what they are
    line = [*saved(tmp_path, head), "--engine", "vllm", f"python={sys.executable}", "module=tests.planted_engine"]
    monkeypatch.setenv("HEAD", str(tmp_path / "head"))
    monkeypatch.setenv("PLANTED", FIRST_NORM)
    with mock.patch("eval.figures.diagnosis.prompts_of", lambda config, drafter: prompts()):
        assert status(eval.parity.main, *line) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "vllm: the head has 2 layers, and vLLM on a CPU takes the first layer's k_norm" in told
    found = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert found["verdict"] == FAULT and found["named"] == [FIRST_NORM], found["readings"]
    assert found["readings"][0]["tau"]["value"] > found["engine"]["tau"]["value"] + 1
    assert len(found["engine"]["cumulative"]) == overfitted_block.BLOCK - 1
    assert found["environment"]["engine_facts"]["with"].startswith("the first layer's k_norm")
    page = (tmp_path / "out" / "parity.md").read_text()
    assert "Drafts are chains of 3 tokens" in page and f"- {FIRST_NORM}: check the norm of the context keys" in page


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("dspark", "depth=3", "engine is vllm, whose runner for CPUs does not serve DSpark heads"),
        ("dflash2", "depth=3", "engine is vllm, whose runner for CPUs does not serve DFlash2 heads"),
        ("dflash", "depth=2", "vLLM's blocks have 3 rows, and the head was trained with 4, which attend to each other"),
    ],
)
def test_what_vllm_does_not_serve_as_trained(
    method: str, given: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a method that vLLM's start refuses minutes later, and shorter blocks, which lower acceptance."""
    line = [*saved(tmp_path, method=method), "--engine", "vllm", f"python={sys.executable}", given]
    assert status(eval.parity.main, *line) == 1
    assert told in capsys.readouterr().err
