"""Each figure that training reports, computed by hand or by another route than the code's."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from block_reference import block_states
from test_train_eagle3 import chain
from torch import nn

from data_prep.store.reader import FeatureStore
from drafters.model.ends import FrozenEnds, LMHead
from drafters.model.stock import LogitChange
from train.core.lm_heads import LMHeads
from train.core.losses import Pairs
from train.core.runtime import ALONE
from train.core.task import make_task
from train.core.weights import draft_with
from train.data.packing import Position, collate
from train.run.files import read_metrics
from train.run.limits import Limits, Progress
from train.watch.heldout import own_answers

BLOCK: dict[str, Any] = {"tap_layers": [tiny_run.TAP], "block_size": 5, "mask_token_id": 2, "layers": 1}
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"tap_layers": [tiny_run.TAP], "ttt_steps": 3},
    "dflash": BLOCK,
    "kangaroo": {"exit_layer": tiny_run.TAP},
    "medusa": {"heads": 3},
}


def task_of(kind: str, settings: dict[str, Any], *dialogues: int, **changes: Any) -> tuple[Any, Any]:
    """A task of the tiny target, and the batch of some training dialogues with their trained positions."""
    task, batch = tiny_run.task_of(kind, settings | METHODS[kind] | changes, *dialogues)
    return task, task.choose(batch)


# ------------------------------------------------------------------------------------------- held-out figures


def test_acceptance_by_hand(settings: dict[str, Any]) -> None:
    """Catches a target's distribution that is renormalised over the draft vocabulary, which makes acceptance too high,
    tokens numbered by the draft vocabulary, and a correction of other rows.

    Four tokens, of which 1 and 3 are drafted. In the first row p = (.4, .3, .2, .1), q = (.5, .5): min is .3 + .1, and
    p's first token is 0. In the second p = (.1, .2, .3, .4), and the correction makes q = (.1, .9): .1 + .4, and both
    rank token 3 first.
    """
    own = nn.Linear(4, 2, bias=False)
    own.weight.data.zero_()
    heads = LMHeads(tiny_run.read("eagle", settings), LMHead(torch.eye(4)))
    heads.drafter_heads, heads.ids, heads.limit = [own], torch.tensor([1, 3], dtype=torch.int32), 1
    heads.correction = nn.Linear(1, 2, bias=False)
    heads.correction.weight.data = torch.tensor([[0.0], [1.0]])
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()
    latents = torch.tensor([[[1.0], [9.0]]]).log()
    overlap, agree = heads.compare(Pairs(torch.zeros(1, 2, 4), p, latents=latents))
    torch.testing.assert_close(overlap, torch.tensor([[0.4, 0.5]]))
    assert agree.tolist() == [[False, True]]


@torch.no_grad()
def test_figures_of_eagle3s_steps(settings: dict[str, Any]) -> None:
    """Catches figures of another step or another token, an acceptance over the draft vocabulary only, and a logged loss
    of a step that is scaled by its decay."""
    task, batch = task_of("eagle3", settings, 1, 3, draft_vocab=60, step_decay=0.5)
    pairs = task.pairs(task.module, batch)
    found, ids = task.heldout(task.module, batch, pairs), task.heads.ids.long()
    losses = task.losses(pairs)
    for step in range(3):
        overlap = agree = loss = 0.0
        for row in batch.rows.tolist():
            span = next(one for one in batch.spans if one.start <= row < one.start + one.length)
            q = chain(task, batch, span.start, row - step, step).softmax(-1)
            logits = task.ends.lm_head(batch.features[0, row + 1])
            p = logits.softmax(-1)
            overlap += float(torch.minimum(p[ids], q).sum())
            agree += float(ids[q.argmax()] == p.argmax())
            loss -= float((logits[ids].softmax(-1) * q.log()).sum())
        count = len(batch.rows)
        assert float(found[f"step_{step}_expected_acceptance"].total) == pytest.approx(overlap, rel=1e-4)
        assert float(found[f"step_{step}_top1"].total) == agree
        assert int(found[f"step_{step}_top1"].count) == int(found[f"step_{step}_expected_acceptance"].count) == count
        assert float(losses[f"step_{step}_loss"]) == pytest.approx(loss, rel=1e-4)
    each = [float(losses[f"step_{step}_loss"]) for step in range(3)]
    assert float(losses["loss"]) == pytest.approx(each[0] + 0.5 * each[1] + 0.25 * each[2])


@pytest.mark.parametrize("layout", ["fill-in", "anchor-first"])
@torch.no_grad()
def test_figures_of_slots(settings: dict[str, Any], layout: str) -> None:
    """Catches a slot's figures under another's number, or of another token; reference: one block after the other."""
    task, batch = task_of("dflash", settings, 1, 3, layout=layout, draft_vocab=60)
    found, ids = task.heldout(task.module, batch, task.pairs(task.module, batch)), task.heads.ids.long()
    own, slots, size = dict(task.module.named_parameters()), task.slots, task.block_rows
    totals = torch.zeros(slots, 3)  # overlap, agreement, count
    for span, anchors in zip(batch.spans, batch.anchors, strict=True):
        mask, states = span.of(batch.loss_mask).tolist(), span.of(batch.taps[tiny_run.TAP])
        for anchor in anchors:
            block = torch.tensor([int(span.of(batch.input_ids)[anchor])] + [2] * (size - 1))
            rows = block_states(own, task.module.config, states[:anchor], task.ends.embed(block))
            for slot, row in enumerate(rows[size - slots :]):
                if anchor + slot + 1 >= span.length or not mask[anchor + slot + 1]:
                    break
                q = (task.module.lm_head.weight @ row).softmax(-1)
                p = task.ends.lm_head(span.of(batch.features)[anchor + slot]).softmax(-1)
                shared = float(torch.minimum(p[ids], q).sum())
                totals[slot] += torch.tensor([shared, float(ids[q.argmax()] == p.argmax()), 1.0])
    for slot, (shared, agree, count) in enumerate(totals.tolist(), start=1):
        acceptance, top1 = found[f"slot_{slot}_expected_acceptance"], found[f"slot_{slot}_top1"]
        assert (float(acceptance.total), int(acceptance.count)) == (pytest.approx(shared, rel=1e-4), count)
        assert (int(top1.total), int(top1.count)) == (agree, count)
    assert float(found["expected_acceptance"].total) == pytest.approx(float(totals[:, 0].sum()), rel=1e-4)
    assert int(found["top1_agreement"].total) == int(totals[:, 1].sum())
    assert int(found["top1_agreement"].count) == int(totals[:, 2].sum()) == len(batch.rows)


def test_own_answers_by_hand(settings: dict[str, Any], store: FeatureStore, ends: FrozenEnds) -> None:
    """Catches a share of the prompts' tokens, or of another token's choice."""
    task, batch = task_of("kangaroo", settings, 1, 3)
    place = int(batch.loss_mask[0].nonzero()[0])  # the first token of an answer
    batch.input_ids[0, place] = ends.lm_head(batch.features[0, place - 1]).argmax()
    right = total = start = 0
    for item in (store[1], store[3]):
        for t in range(1, len(item.input_ids)):
            total += int(item.loss_mask[t])
            chosen = int(ends.lm_head(item.features[t - 1]).argmax())
            right += int(item.loss_mask[t]) * (chosen == int(batch.input_ids[0, start + t]))
        start += len(item.input_ids)
    found = own_answers(task, batch)
    assert (int(found.total), int(found.count)) == (right, total) and right > 0


SCALED = LogitChange(0.25, None)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("eagle3", {"lm_head_start": "target"}),
        ("eagle3", {"lm_head_start": "target", "draft_vocab": 60}),
        ("dflash", {"draft_vocab": 60}),
        ("kangaroo", {"own_lm_head": True}),
        ("medusa", {"own_lm_heads": True}),
    ],
)
def test_an_lm_head_begins_with_the_targets_logits(
    settings: dict[str, Any], ends: FrozenEnds, kind: str, more: dict[str, Any]
) -> None:
    """Catches an LM head of the drafter's own that begins without the target's scale of logits, or with other rows."""
    config: Any = tiny_run.read(kind, settings | METHODS[kind] | more)
    task: Any = make_task(config, replace(ends, lm_head=LMHead(ends.lm_head.weight, SCALED)))
    ids = torch.randperm(tiny.VOCAB_SIZE)[: config.draft_vocab or tiny.VOCAB_SIZE].int()
    if config.draft_vocab:
        draft_with(task, ids)
    states = torch.randn(3, tiny.HIDDEN_SIZE)
    expected = (0.25 * states @ ends.lm_head.weight.T)[:, ids.long().sort().values]
    for head in task.heads.drafter_heads:
        torch.testing.assert_close(head(states), expected)
    assert task.heads.drafter_heads


# ------------------------------------------------------------------------------------------- training's own lines


def test_the_first_step_by_hand(settings: dict[str, Any], features: Path) -> None:
    """Catches a loss or a gradient norm that is summed over tokens, averaged over micro-batches of unequal answers, or
    of clipped gradients, and tokens that count the trained ones only."""
    changes = {"noise": "none", "gradient_accumulation": 2, "gradient_clipping": 1e-3, "steps": 1, "verify": False}
    run = tiny_run.train_here("eagle", settings | changes)
    row = next(row for row in read_metrics(Path(settings["out"])) if "loss" in row)
    task, _ = task_of("eagle", settings, 0, noise="none")  # of the same seed: the weights of step 0
    dialogues = next(run.data.plan(Position()))[0]
    batch = task.choose(collate(run.inputs.train, dialogues))
    loss = task.losses(task.pairs(task.module, batch))["loss"] / len(batch.rows)
    loss.backward()
    norm = torch.cat([weights.grad.flatten() for weights in task.module.parameters()]).norm()
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    store = FeatureStore.open(features / "train")
    assert row["tokens"] == sum(len(store[index].input_ids) for index in dialogues) > len(batch.rows)


def test_rates_and_times_by_hand(settings: dict[str, Any]) -> None:
    """Catches a cosine that ends early, a warm-up that counts twice, and time left of the later limit.

    After 2 of 10 steps of warm-up 4 more are half of the rest; 6 steps took 30 s, so that 4 take 20 s more, while 90 s
    of two minutes are left.
    """
    values = settings | {"steps": 10, "warmup_steps": 2, "minutes": 2.0, "learning_rate": 0.5}
    progress = Progress(step=6, seconds=30.0)
    for schedule, share in (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)):
        config = tiny_run.read("eagle", values | {"schedule": schedule})
        limits = Limits(config, progress, 10, ALONE, torch.device("cpu"))
        assert limits.learning_rate(limits.done()) == pytest.approx(0.5 * share)
        assert limits.time_left() == "00:20" and limits.text() == " of 10, 0.5 of 2 minutes"
        progress.seconds = 105.0  # then the clock is nearer to its end: an eighth of the time is left
        late = {"cosine": 0.5 + 0.5 * math.cos(7 / 8 * math.pi), "linear": 1 / 8, "constant": 1.0}[schedule]
        assert limits.learning_rate(limits.done()) == pytest.approx(0.5 * late) and limits.time_left() == "00:15"
        progress.seconds = 30.0
