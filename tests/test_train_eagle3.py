"""train/eagle3.py: what is its own; the loop is tested with EAGLE."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from drafters import TargetModel, load_drafter
from drafters.layouts.convert import convert
from drafters.layouts.export import export
from train.core.task import make_task
from train.core.weights import draft_with
from train.data.packing import collate
from train.run.files import check_run_folder, read_metrics
from train.run.inputs import open_inputs

TAPS = (tiny_run.TAP,)
BF16: dict[str, Any] = {"own_lm_head": False, "precision": "bf16"}
NEWER: dict[str, Any] = {"fc_norm": True, "norm_output": True, "layer": "qwen3"}
NORMS: dict[str, Any] = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
LEARNING = {"steps": 30, "warmup_steps": 5, "tau_every": 30, "tau_new_tokens": 8}
LEARNS = [NEWER | {"draft_vocab": 60, "sliding_window": 8}, pytest.param(BF16, marks=pytest.mark.long)]


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", tap_layers=list(TAPS), ttt_steps=3)


@pytest.mark.parametrize("more", LEARNS)
def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel, more: dict[str, Any]) -> None:
    """Catches a loss that does not reach the head, an LM head left as it was, an export that drafts otherwise."""
    run, seen, drafter = tiny_run.learned("eagle3", settings | LEARNING | more, target, 0.9)
    assert {f"heldout_step_{n}_top1" for n in range(3)} | {"heldout_0-alpha", "heldout_tau"} <= seen
    assert drafter.module.shape.sliding_window == more.get("sliding_window")
    assert drafter.taps == TAPS and drafter.lm_head.width == more.get("draft_vocab", tiny.VOCAB_SIZE)
    if "draft_vocab" in more:
        assert torch.equal(drafter.lm_head.ids.int(), run.task.draft_ids)
        assert 0 < float(run.task.heads.ids.max()) < tiny.VOCAB_SIZE
    assert drafter.settings.tree == "auto" and drafter.shaper.depth == 3  # not 8: it was trained on 3 steps
    for deeper in ({"tree": "chain", "depth": 4}, {"tree": "static"}):
        with pytest.warns(UserWarning, match="trained on 3 steps"):
            load_drafter(settings["out"], target, **deeper)


def test_taps_that_the_target_decides_are_those_of_the_run(settings: dict[str, Any]) -> None:
    """Catches a run without ``tap_layers`` that cannot be resumed; or that is, with others, or another LM head."""
    tiny_run.train_here("eagle3", settings | {"steps": 1})
    unsaid = check_run_folder(tiny_run.read("eagle3", settings | {"tap_layers": None, "steps": 1}), resume=True)
    assert unsaid.taps == TAPS
    with pytest.raises(ValueError, match=r"head.taps was \[2\], is \[3\]"):
        check_run_folder(tiny_run.read("eagle3", settings | {"tap_layers": [3], "steps": 1}), resume=True)
    with pytest.raises(ValueError, match="draft_vocab was None, is 60"):  # the size of its LM head
        check_run_folder(tiny_run.read("eagle3", settings | {"draft_vocab": 60, "steps": 1}), resume=True)


LOSSES = [
    {"draft_vocab": 60},
    NEWER,
    {"draft_vocab": 60, "mask_uncovered": True},
    {"sliding_window": 4},
    {"layers": 2},
]


@pytest.mark.parametrize("more", LOSSES)
def test_the_loss_is_the_one_of_the_paper(settings: dict[str, Any], more: dict[str, Any]) -> None:
    """Catches steps about other tokens, keys of another layer, a detached feedback, a target's distribution over the
    whole vocabulary, a wrong share of a step, a gradient of the shared LM head that counts one step."""
    config = tiny_run.read("eagle3", settings | {"precision": "float32"} | more)
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    if config.draft_vocab:
        generator = torch.Generator().manual_seed(1)
        draft_with(task, torch.randperm(tiny.VOCAB_SIZE, generator=generator)[:60].int())
    batch = collate(inputs.train, [1, 3], config.taps)
    batch = replace(batch, rows=task.rows(batch))
    assert len(batch.rows) > 5
    found = task.losses(task.pairs(task.module, batch, seed=0))
    found["loss"].backward()
    gradients = {name: weights.grad.clone() for name, weights in task.module.named_parameters()}
    task.module.zero_grad()
    expected = torch.zeros(())
    for span in batch.spans:
        ids, states = batch.input_ids[0], batch.features[0]
        for row in batch.rows.tolist():
            if not span.start <= row < span.start + span.length:
                continue
            for step in range(3):
                start = row - step
                q = chain(task, batch, span.start, start, step)
                truth = inputs.ends.lm_head(states[row + 1])  # of token row + 2
                kept = task.heads.ids.long() if config.draft_vocab else torch.arange(len(truth))
                if config.mask_uncovered and int(truth.argmax()) not in kept.tolist():
                    continue
                expected = expected + 0.8**step * F.cross_entropy(q[None], truth[kept].softmax(-1)[None])
        assert len(ids)
    torch.testing.assert_close(found["loss"], expected, rtol=1e-4, atol=1e-4)
    expected.backward()
    for name, weights in task.module.named_parameters():
        torch.testing.assert_close(gradients[name], weights.grad, rtol=1e-3, atol=1e-5)


def chain(task: Any, batch: Any, first: int, start: int, steps: int) -> Tensor:
    """The head's logits of a step of the chain from index ``start`` of the dialogue that begins at ``first``."""
    head = task.module
    states = torch.cat([batch.taps[tap][0, first : start + 1] for tap in task.config.taps], dim=-1)
    features = head.fused(states)[None]
    for _ in range(steps + 1):
        count = features.shape[1]
        tokens = task.ends.embed(batch.input_ids[:, first + 1 : first + 1 + count])
        predicted = head(features, tokens, torch.arange(count)[None])[:, -1:]
        features = torch.cat([features, predicted], dim=1)
    return head.lm_head(head.scored(predicted))[0, 0]


def test_later_steps_begin_late(settings: dict[str, Any]) -> None:
    """Catches steps behind the first that are trained from the beginning or never, held-out figures of fewer steps, and
    a cost that counts steps that were not run."""
    run = tiny_run.train_here("eagle3", settings | {"steps": 4, "warmup_steps": 0, "log_every": 1, "ttt_from": 0.5})
    rows = [row for row in read_metrics(Path(settings["out"])) if "loss" in row]
    assert ["step_2_loss" in row for row in rows] == [False, False, True, True]
    assert {"heldout_step_2_top1"} <= {key for row in read_metrics(Path(settings["out"])) for key in row}
    whole, first = run.meter.costs
    assert first.token < whole.token / 2.9 and run.task.passes_of(seed=None) == 3


def test_a_head_to_begin_with(settings: dict[str, Any], target: TargetModel) -> None:
    """Catches a warm start that draws another list of draft tokens for the LM head's rows, or other norms."""
    first = settings | {"draft_vocab": 60, "steps": 2}
    tiny_run.train_here("eagle3", first)
    before = load_drafter(settings["out"], target).module.state_dict()
    again = first | {"out": settings["out"] + "-2", "init_from": settings["out"], "learning_rate": 1e-9}
    tiny_run.train_here("eagle3", again)
    after = load_drafter(again["out"], target).module.state_dict()
    for name, weights in before.items():
        torch.testing.assert_close(after[name], weights, msg=name)
    with pytest.raises(ValueError, match="fc_norm"):
        tiny_run.train_here("eagle3", again | {"out": settings["out"] + "-3", "fc_norm": True})


def test_the_default_states(settings: dict[str, Any], features: Path) -> None:
    """Catches defaults that the store lacks without the command that adds them, and taps that are not recorded."""
    with pytest.raises(ValueError, match=r"layer 1|hidden_states\[1\]"):
        tiny_run.train_here("eagle3", settings | {"tap_layers": [1]})
    config = tiny_run.read("eagle3", settings | {"tap_layers": None}).settled(lambda: 32)
    assert config.taps == (2, 16, 29)


def test_an_imported_head_to_begin_with(settings: dict[str, Any], target: TargetModel, tmp_path: Path) -> None:
    """Catches a head of another program that is refused for keys that its import leaves out as defaults, and flags and
    states that its weights' shapes do not show: it would be trained as another head."""
    trained, imported = settings | NORMS | {"steps": 1}, tmp_path / "imported"
    tiny_run.train_here("eagle3", trained)
    export(settings["out"], "speculators", tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), target.name, imported)
    further = trained | {"init_from": str(imported), "out": str(tmp_path / "further"), "learning_rate": 1e-9}
    for flag in ("norm_before_residual", "norm_output"):
        with pytest.raises(ValueError, match=f"imported has {flag}: true, and .* set head.{flag}=true, or"):
            tiny_run.train_here("eagle3", further | {flag: False, "out": str(tmp_path / flag)})
    tiny_run.train_here("eagle3", further)
    before, after = (load_drafter(run["out"], target).module.state_dict() for run in (trained, further))
    assert before.keys() == after.keys()
    assert all(torch.equal(weights, after[name]) for name, weights in before.items())
    file = imported / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"drafter": config["drafter"] | {"taps": [0]}}))
    with pytest.raises(ValueError, match=r"taps: \[0\], and .* taps: \[2\]; set head.taps=\[0\], or"):
        tiny_run.train_here("eagle3", further | {"out": str(tmp_path / "other")})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "two norms"),
        ({"own_lm_head": False, "draft_vocab": 9}, "own_lm_head is false"),
        ({"loss_vocab": 9}, "set that instead"),
        ({"zero_stage": 3}, "zero_stage is 3"),
        ({"tap_layers": [2, 3, 2]}, r"taps: tap 2 is named 2 times; name each state once \(found \[2, 3, 2\]\)"),
        ({"step_decay": 1e-300}, r"step_decay: Input should be greater than or equal to 0.01 \(found 1e-300\)"),
        ({"top_k_weight": 1e300}, r"top_k_weight: give 0, or a number from 0.000001 to 1,000,000: .*\(found 1e\+300\)"),
        ({"lk_eta": 1e300}, "lk_eta: Input should be less"),
        ({"tap_layers": [3, 2]}, r"taps are not in ascending order; give \[2, 3\]"),
        ({"ttt_from": 1.0}, "ttt_from: Input should be less than 1"),
        ({"sliding_window": 3}, r"sliding_window is 3, and a chain of ttt_steps=3 .* set sliding_window=4"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], change: dict[str, Any], told: str) -> None:
    """Catches options that would be ignored for hours, a state that is read twice, and states in an order in which no
    engine hands them over."""
    with pytest.raises(ValueError, match=told):
        tiny_run.read("eagle3", settings | change)


def test_draft_tokens_that_miss_the_answers(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a vocabulary so small that little can be drafted, without a word."""
    tiny_run.train_here("eagle3", settings | {"draft_vocab": 5, "steps": 1})
    assert "warning: draft_vocab=5 covers" in capsys.readouterr().out


@pytest.mark.parametrize(("begins", "precision"), [(False, "bf16"), (True, "float32")])
def test_resumed_equals_uninterrupted(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], begins: bool, precision: str
) -> None:
    """Catches a resumed head whose draft tokens are others than before, or whose LM head begins as the target's again:
    neither is among the weights of a state."""
    values = settings | {"draft_vocab": 60, "lm_head_start": "target", "precision": precision, "schedule": "constant"}
    if begins:  # a head of other tokens than the most frequent ones
        tiny_run.train_here("eagle3", values | {"steps": 1, "out": str(tmp_path / "first")})
        weights = load_file(tmp_path / "first/model.safetensors")
        weights["d2t"] = torch.full_like(weights["d2t"], tiny.VOCAB_SIZE - 60)  # the last 60 tokens
        save_file(weights, tmp_path / "first/model.safetensors")
        values |= {"init_from": str(tmp_path / "first")}
    capsys.readouterr()
    tiny_run.train_here("eagle3", values | {"steps": 6, "out": str(tmp_path / "whole")})
    told = [line for line in capsys.readouterr().out.splitlines() if "draft_vocab=60 covers" in line]
    tiny_run.train_here("eagle3", values | {"steps": 3, "out": str(tmp_path / "parts")})
    tiny_run.train_here("eagle3", values | {"steps": 6, "out": str(tmp_path / "parts")}, resume=True)
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(told) == 1
    if begins:
        assert torch.equal(theirs["d2t"], weights["d2t"])
