"""The estimates of --dry-run and the FLOPs of training, computed by hand or by another route than the code's."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import memory_run
import pytest
import tiny
import tiny_run
from test_train_figures import task_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from train.preflight.dry_run import dry_run
from train.preflight.estimate import meta_task, parameters, target_parameters
from train.preflight.memory import memory_parts, pass_memory
from train.preflight.workload import Workload
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
    """Catches an average of the weights in bf16, frozen ends that count twice or in float32, and states of fewer taps.

    The micro-batch holds three numbers of 8 bytes and a flag for each token, and two states of two bytes a value.
    """
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


def test_parameters_that_a_token_uses(tiny_model: Any) -> None:
    """Catches a mixture of experts that counts all of them for each token, norms, or embeddings that are looked up."""
    hidden, inner, vocab, layers = tiny.HIDDEN_SIZE, 80, tiny.VOCAB_SIZE, 4
    attention = 2 * hidden * 4 * 16 + 2 * hidden * 2 * 16
    dense, experts = tiny_model("llama"), tiny_model("mixtral")
    total, active = target_parameters(dense.config)
    assert total == sum(weights.numel() for weights in dense.parameters())
    assert active == layers * (attention + 3 * hidden * inner) + vocab * hidden
    total, active = target_parameters(experts.config)
    assert total == sum(weights.numel() for weights in experts.parameters())
    router = 4 * hidden
    assert active == layers * (attention + router + 2 * 3 * hidden * inner) + vocab * hidden


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "kangaroo", "medusa", "dflash"])
def test_the_flops_of_a_dry_run(settings: dict[str, Any], kind: str) -> None:
    """Catches a training time of block drafters that counts each position once, though several blocks predict it, and
    their attention as none.

    Reference: torch's counter over the whole store. It counts attention to later tokens, too, and blocks at the ends
    of answers have slots without a loss.
    """
    task, batch = task_of(kind, settings | {"peak_tflops": 1.0}, *range(14))
    report = dry_run(task.config, tiny_run.arguments(mfu=0.5)).text()
    (rate,) = re.findall(r"time .* at ([\d,]+) tokens/s \(assuming an MFU of 50% of 1 TFLOP/s", report)
    with FlopCounterMode(display=False) as counted:
        task.losses(task.pairs(task.module, task.choose(batch, 0), 0))["loss"].backward()
    flops = 0.5e12 / int(rate.replace(",", ""))
    assert 0.8 < flops * batch.tokens / counted.get_total_flops() < 1.25


def test_the_time_of_a_dry_run(settings: dict[str, Any]) -> None:
    """Catches hours that ignore epochs, or the limit that comes first, and tokens of an epoch for those of the run."""
    tokens = sum(tiny_run.LENGTHS["train"])
    given = settings | {"steps": None, "epochs": 4000}
    for more, hours in (({}, 4000 * tokens / 50 / 3600), ({"minutes": 90.0}, 1.5)):
        report = dry_run(tiny_run.read("eagle", given | more), tiny_run.arguments(tokens_per_second=50.0)).text()
        (found,) = re.findall(r"time +([\d.]+) hours of training at 50 tokens/s \(as given", report)
        assert float(found) == pytest.approx(hours, rel=0.05)


def test_steps_by_hand(settings: dict[str, Any]) -> None:
    """Catches steps of an epoch for those of the run, the later of two limits, and steps that look full."""
    given = settings | {"steps": None, "epochs": 3, "batch_tokens": 100, "minutes": 7.5}
    config, work = tiny_run.read("eagle", given), Workload(900, 300, 50, 10, "the feature store", [50, 850])
    assert work.describe() == "900 tokens an epoch, 300 of them trained (the feature store)"
    said = "10 an epoch of at most 100 tokens, filled to 90.0%, 30 in all or 7.5 minutes"
    assert work.describe_steps(config) == said
    assert work.total_steps(tiny_run.read("eagle", given | {"steps": 12})) == 12


def test_a_dry_run_without_features_by_hand(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches an estimate of time, disk or FLOPs that differs from its formula, and FLOPs that are not those of its
    rate.

    10^12 tokens of a target of two layers, and 10^6 for the disk. A token's features are 512 values and the state of
    one layer, of two bytes in bf16, or one and a scale of two in int8, and 9 bytes of ids and mask. A forward of the
    target multiplies with its layers and its LM head, and attends to half of 1,000 tokens.
    """
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(memory_run.SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    values = settings | {"features": str(tmp_path / "none"), "exit_layer": 1, "steps": 10, "batch_tokens": 10**8}
    given = tiny_run.arguments(
        tokens=10**12, target_config=str(shape), device="H200", mfu=0.5, max_length=1000, ranks=2
    )
    text = dry_run(tiny_run.read("kangaroo", values), given).text()
    (rate, flops) = re.findall(r"time .* at ([\d,]+) tokens/s .*; ([\d.]+) GFLOP a token", text)[0]
    peak = 2 * 0.5 * 989e12  # FLOP/s of both devices
    assert int(rate.replace(",", "")) * float(flops) * 1e9 == pytest.approx(peak, rel=0.3)
    layer = 4 * 512 * 512 + 3 * 512 * 1408
    forward = 2 * (2 * layer + 8192 * 512) + 2 * 2 * 512 * 1000
    (hours,) = re.findall(r"time: features +([\d,.]+) hours of one pass", text)
    assert float(hours.replace(",", "")) == pytest.approx(10**12 * forward / peak / 3600, rel=0.02)
    given.tokens = 10**6
    text = dry_run(tiny_run.read("kangaroo", values), given).text()
    (sizes,) = re.findall(r"disk: features +([\d.]+) GB in bf16, ([\d.]+) GB in int8", text)
    assert [float(size) for size in sizes] == pytest.approx([2 * 2 * 0.512 + 0.009, 2 * 0.514 + 0.009], abs=0.01)
