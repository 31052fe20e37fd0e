"""train/core/losses.py and the tasks' losses against naive references."""

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from data_prep.store.reader import FeatureStore
from drafters.heads.eagle.module import EagleHead
from drafters.model.ends import FrozenEnds, LMHead
from drafters.model.stock import LogitChange
from train.core import losses
from train.core.attention import use_dialogue_attention
from train.core.losses import Pairs, TopK, regression_sum
from train.data.packing import Batch, Span, collate
from train.eagle import EagleConfig, EagleTask, feature_noise
from train.kangaroo import KangarooConfig, KangarooTask
from train.watch.alpha import chain_alpha


def divergence_sum(ours: torch.Tensor, theirs: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
    """The loss of one prediction ``[n, H]`` a token."""
    (total,) = losses.divergence_sum(Pairs(ours[None], theirs), *options, **more)
    return total


DIALOGUES = [3, 0, 1, 2, 6]  # of the training store: lengths 23, 9, 17, 5, 7 pack into three rows


def eagle_task(folder: Path, ends: FrozenEnds, **changes: object) -> EagleTask:
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", **changes)
    return EagleTask(EagleConfig(**values), ends)


def kangaroo_task(folder: Path, ends: FrozenEnds) -> KangarooTask:
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", exit_layer=2)
    return KangarooTask(KangarooConfig(**values), ends)


def packed(lengths: list[int], masks: list[list[int]]) -> Batch:
    """One row of dialogues and one token of padding."""
    total = sum(lengths) + 1
    mask = torch.tensor([[bool(value) for one in masks for value in one] + [False]])
    segments = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)] + [-1]])
    empty = torch.zeros(1, total, 2)
    return Batch(segments.clone(), mask, empty, {}, segments.clone(), segments, [])


def test_rows_of_a_hand_worked_batch(folder: Path, ends: FrozenEnds) -> None:
    """A mask shifted by the wrong number, or across the border of two packed dialogues."""
    # dialogue A: tokens 0-4, answer = tokens 2, 3, 4; dialogue B: tokens 5-8, answer = tokens 6, 7
    batch = packed([5, 4], [[0, 0, 1, 1, 1], [0, 1, 1, 0]])
    # index i predicts token i+2: A: 0, 1, 2; B: token 6 is the second of its dialogue, no index predicts it; 5 -> 7
    assert eagle_task(folder, ends).rows(batch).tolist() == [0, 1, 2, 5]
    # where token i is an answer's and feature_{i+1} exists: A: 2, 3 (4 is the last); B: 6, 7
    assert eagle_task(folder, ends, mask_alignment="paper-code").rows(batch).tolist() == [2, 3, 6, 7]
    # index i predicts token i+1
    assert kangaroo_task(folder, ends).rows(batch).tolist() == [1, 2, 3, 5, 6]


def test_regression_of_a_hand_worked_case() -> None:
    """A squared error without its linear part, a sum over the hidden size, or a mean over rows."""
    predicted, target = torch.tensor([[0.5, 2.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 4.0]])
    # row 0: (0.5 * 0.25 + (2 - 0.5)) / 2; row 1: (0 + (3 - 0.5)) / 2
    assert float(regression_sum(Pairs(predicted[None], target))) == pytest.approx(0.8125 + 1.25)
    weighted = Pairs(predicted[None], target, torch.tensor([[2.0, 0.5]]))
    assert float(regression_sum(weighted)) == pytest.approx(2 * 0.8125 + 0.5 * 1.25)


def test_cross_entropy_of_a_hand_worked_case() -> None:
    """Hard labels instead of the target's distribution, p and q swapped, or a mean over rows."""
    lm_head = nn.Linear(2, 2, bias=False).requires_grad_(False)
    lm_head.weight.data = torch.eye(2)
    predicted = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    target = torch.tensor([[math.log(4), 0.0], [0.0, 0.0]])
    # row 0: q = (1/2, 1/2), so log 2; row 1: p = (1/2, 1/2), q = (3/4, 1/4)
    expected = math.log(2) - 0.5 * math.log(0.75) - 0.5 * math.log(0.25)
    assert divergence_sum(predicted, target, lm_head).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("chunk_rows", [1, 7, 512])
@pytest.mark.parametrize("change", [None, LogitChange(0.25, None), LogitChange(1.0, 0.8), LogitChange(3.0, 2.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_chunked_cross_entropy_equals_full_logits(chunk_rows: int, change: LogitChange | None, biased: bool) -> None:
    """A chunk that is left out, a gradient with the wrong sign or scale; logits with a bias, a scale or a cap."""
    lm_head = LMHead(torch.randn(97, 16) / 4, change, torch.randn(97) if biased else None)
    ours = torch.randn(20, 16, requires_grad=True)
    naive = ours.detach().clone().requires_grad_()
    target = torch.randn(20, 16)
    loss = divergence_sum(ours, target, lm_head, chunk_rows=chunk_rows) * 0.37
    reference = -(lm_head(target).softmax(-1) * lm_head(naive).log_softmax(-1)).sum() * 0.37
    loss.backward()
    reference.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-5, atol=1e-5)


DIVERGENCES: dict[str, losses.Divergence] = {
    name: partial(losses.lk_lambda, eta=3.0) if name == "lk_lambda" else getattr(losses, name)
    for name in ("cross_entropy", "total_variation", "lk_alpha", "lk_lambda")
}


def plain_divergence(name: str, p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The formulas as the papers print them, for autograd."""
    q = log_q.exp()
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    weight = torch.exp(-3.0 * alpha.detach())
    return {
        "cross_entropy": -(p * log_q).sum(-1),
        "total_variation": 0.5 * (p - q).abs().sum(-1),
        "lk_alpha": -alpha.log(),
        "lk_lambda": weight * kl + (1 - weight) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("top_k", [None, TopK(5, 0.7), TopK(500, 2.0)])
def test_divergences_equal_autograd(name: str, top_k: TopK | None) -> None:
    """A gradient with a term left out, lambda differentiated, top-k tokens of the drafter or renormalised over
    themselves, or the gradient of a wrong row."""
    lm_head = nn.Linear(16, 97, bias=False).requires_grad_(False).double()
    lm_head.weight.mul_(4)  # distributions that differ
    ours = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    naive, target = ours.detach().clone().requires_grad_(), torch.randn(20, 16, dtype=torch.float64)
    weights = None if top_k and top_k.count == 500 else torch.rand(20, dtype=torch.float64).round(decimals=1)
    pairs = Pairs(ours[None], target, None if weights is None else weights[None])
    loss = losses.divergence_sum(pairs, lm_head, DIVERGENCES[name], top_k, 7)[0] * 0.37
    p, log_q = lm_head(target).softmax(-1), lm_head(naive).log_softmax(-1)
    reference = plain_divergence(name, p, log_q)
    if top_k is not None:
        among = torch.zeros_like(p).scatter_(-1, p.argsort(-1, descending=True)[:, : top_k.count], 1.0)
        reference = reference - top_k.weight * (among * p * log_q).sum(-1)
    reference = (reference if weights is None else reference * weights).sum()
    loss.backward()
    (0.37 * reference).backward()
    torch.testing.assert_close(loss, 0.37 * reference)
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_distributions_without_overlap_and_of_equal_ones(name: str) -> None:
    """A logarithm of 0 that ends the run, or a perfect drafter that is pushed away."""
    lm_head = nn.Linear(2, 2, bias=False).requires_grad_(False)
    lm_head.weight.data = torch.eye(2)
    ours = torch.tensor([[0.0, 800.0], [3.0, 1.0]], requires_grad=True)
    target = torch.tensor([[800.0, 0.0], [3.0, 1.0]])
    loss = divergence_sum(ours, target, lm_head, DIVERGENCES[name])
    loss.backward()
    assert loss.isfinite() and ours.grad.isfinite().all()
    assert ours.grad[1].abs().max() < 1e-6


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_task_takes_the_loss_that_its_config_names(
    name: str, folder: Path, store: FeatureStore, ends: FrozenEnds
) -> None:
    """A key without effect, lambda's eta or HASS's k lost on the way, or another loss over loss_vocab."""
    changes = {"noise": "none", "lk_eta": 3.0, "top_k": 5, "top_k_weight": 0.7}
    task = eagle_task(folder, ends, classification_loss=name, **changes)
    task.heads.ids = torch.arange(40, dtype=torch.int32)
    predicted, target = torch.randn(2, 9, tiny.HIDDEN_SIZE)
    expected = divergence_sum(predicted, target, task.heads.sliced, DIVERGENCES[name], TopK(5, 0.7))
    assert task.heads.sliced.out_features == 40
    found = task.losses(Pairs(predicted[None], target))["classification_loss"]
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("own", [False, True])
def test_the_bias_of_some_tokens(own: bool, folder: Path, ends: FrozenEnds) -> None:
    """Catches Phi's bias lost over loss_vocab, of the wrong tokens, or given to an LM head of the drafter's own."""
    bias = torch.randn(tiny.VOCAB_SIZE)
    task = eagle_task(folder, replace(ends, lm_head=LMHead(ends.lm_head.weight, None, bias)), noise="none")
    task.heads.ids = torch.arange(3, 80, 2, dtype=torch.int32)
    task.heads.drafter_heads = [nn.Linear(tiny.HIDDEN_SIZE, tiny.VOCAB_SIZE, bias=False)] if own else []
    predicted = torch.randn(1, 9, tiny.HIDDEN_SIZE, requires_grad=True)
    target, plain = torch.randn(9, tiny.HIDDEN_SIZE), predicted.detach().clone().requires_grad_()
    found = task.heads.classification(Pairs(predicted, target))
    whole = F.linear(target, ends.lm_head.weight, bias)[:, 3:80:2]
    ours = task.heads.drafter_heads[0](plain[0]) if own else F.linear(plain[0], ends.lm_head.weight, bias)
    expected = -(whole.softmax(-1) * ours[:, 3:80:2].log_softmax(-1)).sum()
    torch.testing.assert_close(found[0], expected)
    for loss in (found.sum(), expected):
        loss.backward()
    torch.testing.assert_close(predicted.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_bf16_cross_entropy_equals_full_logits() -> None:
    """Softmax in bf16, or sums that round: the same bf16 logits, in float64 from there on, are the reference."""
    lm_head = nn.Linear(32, 509, bias=False).requires_grad_(False).bfloat16()
    ours = torch.randn(40, 32).bfloat16().requires_grad_()
    target = torch.randn(40, 32).bfloat16()
    loss = divergence_sum(ours, target, lm_head, chunk_rows=16)
    loss.backward()
    logits = lm_head(ours.detach()).double().requires_grad_()
    reference = -(lm_head(target).double().softmax(-1) * logits.log_softmax(-1)).sum()
    reference.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    expected = logits.grad @ lm_head.weight.double()  # ours rounds (q - p) and the result to bf16, 8 bits each
    torch.testing.assert_close(ours.grad.double(), expected, rtol=0.02, atol=0.002 * expected.abs().max().item())


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that was made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("top_k", [None, TopK(3, 1.0)])
def test_full_logits_never_exist(name: str, top_k: TopK | None) -> None:
    """A chunked loss that keeps every chunk for the backward pass, or makes one tensor of all rows."""
    lm_head = nn.Linear(8, 1000, bias=False).requires_grad_(False)
    ours, target = torch.randn(300, 8, requires_grad=True), torch.randn(300, 8)
    with Largest() as largest:
        divergence_sum(ours, target, lm_head, DIVERGENCES[name], top_k, 20).backward()
    assert largest.numbers == 20 * 1000


def test_noise() -> None:
    """Noise of another width, the same for every dialogue or epoch, in the padding, or dependent on the packing."""
    features = torch.zeros(2, 300, 8)
    spans = [Span(0, 0, 256, 5), Span(0, 256, 20, 7), Span(1, 0, 20, 9)]
    noise = feature_noise(features, spans, "paper", seed=1)
    assert 0.09 < noise.abs().max() <= 0.1
    assert noise[0, :256].mean().abs() < 0.01
    assert noise[0, 276:].abs().max() == noise[1, 20:].abs().max() == 0
    moved = feature_noise(features, [Span(1, 40, 20, 7)], "paper", seed=1)
    assert torch.equal(moved[1, 40:60], noise[0, 256:276])
    assert not torch.equal(noise[1, :20], noise[0, 256:276])
    assert not torch.equal(noise, feature_noise(features, spans, "paper", seed=2))
    code = feature_noise(features, spans, "code", seed=1)
    assert 0.19 < code[0, :256].abs().max() <= 0.2  # 0.1 * 512 / 256
    assert 2.4 < code[1, :20].abs().max() <= 2.56  # 0.1 * 512 / 20


def naive_eagle(task: EagleTask, store: FeatureStore, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Regression and classification sums of one dialogue alone, position by position, with full logits."""
    item, ends = store[index], task.ends
    regression, classification, count = torch.zeros(()), torch.zeros(()), 0
    length = len(item.input_ids)
    embeddings = ends.embed(item.input_ids[1:])[None]
    predicted = task.module(item.features[None, :-1], embeddings, torch.arange(length - 1)[None])[0]
    for i in range(length - 2):
        if item.loss_mask[i + 2]:
            error = (predicted[i] - item.features[i + 1]).abs()
            regression = regression + torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
            p = ends.lm_head(item.features[i + 1]).softmax(-1)
            classification = classification - (p * ends.lm_head(predicted[i]).log_softmax(-1)).sum()
            count += 1
    return regression, classification, count


def test_packed_eagle_loss_equals_one_dialogue_at_a_time(folder: Path, store: FeatureStore, ends: FrozenEnds) -> None:
    """Attention or positions that run on into the next packed dialogue; features or tokens off by one."""
    task = eagle_task(folder, ends, noise="none")
    batch = collate(store, DIALOGUES)
    assert batch.attention() is not None
    rows = task.rows(batch)
    sums = tiny_run.losses_of(task, batch, 1)
    sums["loss"].backward()
    gradient = task.module.fc.weight.grad.clone()
    parts = [naive_eagle(task, store, index) for index in DIALOGUES]
    task.module.zero_grad()
    reference = sum(regression + 0.1 * classification for regression, classification, _ in parts)
    reference.backward()
    assert len(rows) == sum(count for *_, count in parts)
    torch.testing.assert_close(sums["regression_loss"], sum(part[0] for part in parts), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums["classification_loss"], sum(part[1] for part in parts), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient, task.module.fc.weight.grad, rtol=1e-4, atol=1e-4)


def test_noise_changes_the_input_not_the_target(folder: Path, store: FeatureStore, ends: FrozenEnds) -> None:
    """Noise that also lands on the regression target, or on held-out text."""
    task = eagle_task(folder, ends)
    batch = collate(store, DIALOGUES)
    rows, before = task.rows(batch), batch.features.clone()
    noisy = tiny_run.losses_of(task, batch, 3)["loss"]
    assert torch.equal(batch.features, before)
    clean = tiny_run.losses_of(task, batch)["loss"]
    assert noisy != clean
    noise = feature_noise(batch.features, batch.spans, "paper", 3)
    assert eagle_task(folder, ends, noise="none").with_noise(batch, 3) is batch
    embeddings = ends.embed(torch.roll(batch.input_ids, -1, 1))
    predicted = task.module(batch.features + noise, embeddings, batch.position_ids, batch.attention())
    target = torch.roll(before, -1, 1).flatten(0, 1)[rows]
    expected = F.smooth_l1_loss(predicted.flatten(0, 1)[rows], target, reduction="sum") / target.shape[1]
    got = tiny_run.losses_of(task, batch, 3)["regression_loss"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_kangaroo_loss_equals_one_dialogue_at_a_time(folder: Path, store: FeatureStore, ends: FrozenEnds) -> None:
    """The released code's mask, off by one with position 0 dropped; another position's distribution as target."""
    task = kangaroo_task(folder, ends)
    batch = collate(store, DIALOGUES, (2,))
    rows = task.rows(batch)
    loss = tiny_run.losses_of(task, batch, 1)["loss"]
    batch = tiny_run.with_rows(task, batch)
    figures = task.heldout(task.module, batch, task.pairs(task.module, batch))
    expected, overlap, agree, count = 0.0, 0.0, 0, 0
    for index in DIALOGUES:
        item = store[index]
        hidden = task.module(item.taps[2][None], torch.arange(len(item.input_ids))[None])[0]
        for i in range(len(item.input_ids) - 1):
            if item.loss_mask[i + 1]:
                p, q = ends.lm_head(item.features[i]).softmax(-1), ends.lm_head(hidden[i]).softmax(-1)
                expected -= float((p * q.log()).sum().detach())
                overlap += float(torch.minimum(p, q).sum())
                agree += int(p.argmax() == q.argmax())
                count += 1
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert len(rows) == count
    assert float(figures["expected_acceptance"].total) == pytest.approx(overlap, rel=1e-5)
    assert int(figures["top1_agreement"].total) == agree


def test_chain_alpha_equals_chains_rolled_one_by_one() -> None:
    """A chain that sees later true features, forgets its own steps, or is counted after a rejected guess."""
    config = tiny.tiny_config("llama", vocab_size=3)
    head = EagleHead(config).eval().requires_grad_(False)
    ends = FrozenEnds(nn.Embedding(3, 48), nn.Linear(48, 3, bias=False), config, "")
    ends.embed.requires_grad_(False)
    ends.lm_head.requires_grad_(False)
    lengths = [40, 23, 15, 31]
    features, starts = torch.randn(1, sum(lengths), 48), itertools.accumulate(lengths, initial=0)
    spans = [
        Span(0, start, length, number) for number, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]
    segments = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    # A text that mostly follows the target's argmax, so that some chains get far and others leave the text.
    input_ids = torch.roll(ends.lm_head(features).argmax(-1), 1, dims=1)
    input_ids[:, ::9] = 0
    loss_mask = torch.rand(1, sum(lengths)) < 0.8
    batch = Batch(input_ids, loss_mask, features, {}, position_ids, segments, spans)
    use_dialogue_attention(head, config)
    found = [(int(ratio.total), int(ratio.count)) for ratio in chain_alpha(head, ends, batch, 5)]
    assert found == naive_chain_alpha(head, ends, batch)
    assert found[0][0] > found[2][0] > 0


def naive_chain_alpha(head: EagleHead, ends: FrozenEnds, batch: Batch) -> list[tuple[int, int]]:
    accepted, counted = [0] * 5, [0] * 5
    for row, start, length, _ in batch.spans:
        cut = slice(start, start + length)
        features, tokens, mask = batch.features[row, cut], batch.input_ids[row, cut], batch.loss_mask[row, cut]
        for i in range(length):
            inputs = features[: i + 1]
            for n in range(5):
                if i + n + 2 >= length:
                    break
                embeddings = ends.embed(tokens[1 : i + n + 2])
                predicted = head(inputs[None], embeddings[None], torch.arange(i + n + 1)[None])[0, -1]
                guess, best = ends.lm_head(predicted).argmax(), ends.lm_head(features[i + n + 1]).argmax()
                if not mask[i + n + 2]:
                    break
                counted[n] += 1
                accepted[n] += int(guess == best)
                if guess != best or guess != tokens[i + n + 2]:
                    break
                inputs = torch.cat([inputs, predicted[None]])
    return list(zip(accepted, counted, strict=True))
