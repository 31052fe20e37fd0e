"""The estimates of --dry-run and the FLOPs of training, computed by hand or by another route than the code's."""

import re
from dataclasses import replace
from typing import Any

import memory_run
import pytest
import tiny_run
from test_train_figures import task_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from train.preflight.dry_run import dry_run
from train.preflight.estimate import meta_task, parameters
from train.preflight.memory import memory_parts, pass_memory
from train.run.files import run_folder_bytes
from train.watch.flops import BlockCost, row_flops, training_cost


def test_the_flops_of_blocks_by_hand() -> None:
    """Catches blocks that attend to their whole dialogue, or to the mean of all dialogues: a block of a dialogue of T
    tokens attends to half of it, and longer dialogues have more of them."""
    seen = (4 * 4 + 8 * 8) / 2 / 12
    assert BlockCost(token=10, pair=2, row=5).of([4, 8], 3) == pytest.approx(10 * 12 + 3 * (5 + 2 * seen))
    assert BlockCost(token=10, pair=2, row=5).of([], 0) == 0


def test_the_flops_of_heads_by_hand(settings: dict[str, Any]) -> None:
    """Catches a step's keys of its own chain, a product of the backward pass, or rows of a block that are left out.

    Of width 48, four heads of 16, two of keys and values, an MLP of 80: three products of two FLOPs a weight, and 12
    FLOPs for each query, key and element of a head.
    """
    inner, pair = 64 * 48 + 3 * 48 * 80, 12 * 4 * 16
    task, _ = task_of("eagle3", settings, 0)
    found = training_cost(task)  # queries, keys and values read the feature and the embedding
    step = 6 * (48 * 48 + 96 * (64 + 2 * 32) + inner)
    assert (found.token, found.pair) == (3 * step + pair * (0 + 1 + 2), 3 * pair)
    task, _ = task_of("dflash", settings, 0)
    found, both = training_cost(task), 48 * 2 * 32
    assert found.token == 6 * (48 * 48 + both)  # of the context: fc, keys and values
    assert found.pair == round(5 / 4 * pair)  # five rows of a block predict four tokens
    assert found.row == row_flops(task) + round(5 / 4 * 6 * (both + 48 * 64 + inner))


LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("kangaroo", {}),
    ("eagle3", {"draft_vocab": 60}),
    ("medusa", {"own_lm_heads": True}),
    ("medusa", {"labels": "tokens"}),
    ("dflash", {}),
    ("dflash", {"target_weight": 1.0, "draft_vocab": 60}),
]


@pytest.mark.parametrize(("kind", "more"), LOSSES)
def test_the_flops_of_losses(settings: dict[str, Any], kind: str, more: dict[str, Any]) -> None:
    """Catches LM heads' products that are counted and not done, or done and not counted: the target's logits where the
    labels are tokens, the gradient of a trained LM head, all of a vocabulary of which a part is drafted."""
    task, batch = task_of(kind, settings, 1, 3, **more)
    pairs = task.pairs(task.module, batch, seed=0)
    leaf = pairs.predictions.detach().requires_grad_()
    with FlopCounterMode(display=False) as counted:
        task.losses(replace(pairs, predictions=leaf))["loss"].backward()
    assert counted.get_total_flops() == row_flops(task) * len(batch.rows)


def test_memory_by_hand(settings: dict[str, Any]) -> None:
    """Catches an average in bf16, frozen ends that count twice or in float32, and states of fewer taps."""
    given = settings | {"exit_layer": 1, "precision": "bf16"}
    target = LlamaConfig(**memory_run.SHAPE)
    plain, averaged = (tiny_run.read("kangaroo", given | {"weight_average": decay}) for decay in (None, 0.99))
    for tied, times in ((False, 2), (True, 1)):
        target.tie_word_embeddings = tied
        task = meta_task(averaged, target)
        parts = memory_parts(averaged, task, 1)
        assert parts["weight average"] == 4 * parameters(task.module)
        assert parts["embedding and LM head"] == 2 * times * 8192 * 512
    assert "weight average" not in memory_parts(plain, task, 1)
    count = parameters(task.module)
    assert run_folder_bytes(plain, task.module) == 3 * 12 * count + 2 * 2 * count
    assert run_folder_bytes(averaged, task.module) == 3 * 16 * count + 2 * 2 * count
    assert pass_memory(plain, task, [10, 20])["batch"] == 30 * (3 * 8 + 1 + 2 * 2 * 512)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "kangaroo", "medusa", "dflash"])
def test_the_flops_of_a_dry_run(settings: dict[str, Any], kind: str) -> None:
    """Catches a training time of block drafters that counts each position once, though several blocks predict it, and
    their attention as none."""
    task, batch = task_of(kind, settings | {"peak_tflops": 1.0}, *range(14))
    report = dry_run(task.config, tiny_run.arguments(mfu=0.5)).text()
    (rate,) = re.findall(r"time .* at ([\d,]+) tokens/s \(assuming an MFU of 50% of 1 TFLOP/s", report)
    with FlopCounterMode(display=False) as counted:
        task.losses(task.pairs(task.module, task.choose(batch, 0), 0))["loss"].backward()
    flops = 0.5e12 / int(rate.replace(",", ""))
    assert 0.8 < flops * batch.tokens / counted.get_total_flops() < 1.25
