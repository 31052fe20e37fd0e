"""train/core/attention.py: dialogue by dialogue equals a mask over the packed row."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.eagle.module import EagleHead
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from train.core import attention
from train.core.attention import (
    Dialogues,
    blocked_attention,
    dialogue_attention,
    fused_attention,
    use_dialogue_attention,
)
from train.data.online import dialogue_mask

LENGTHS = [[5, 300, 1], [128, 129], [256]]  # shorter than a block, at its borders, several blocks
HEADS, KV_HEADS, SIZE = 4, 2, 16


def segments_of(lengths: list[int]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def states(width: int) -> list[Tensor]:
    shapes = [(1, heads, width, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def layer() -> Any:
    """What transformers' attention functions read of the module that calls them."""
    return SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=True)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("attend", "window"),
    [(blocked_attention, None), (fused_attention, None), (blocked_attention, 1), (blocked_attention, 140)],
)
def test_equals_a_mask(
    lengths: list[int], attend: Callable[..., Tensor], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dialogue that sees another or its own future, a wrong scale or head, a gradient that is lost between blocks, a
    window that is off by one or begins with its block."""
    monkeypatch.setattr(attention, "blocked_attention", attend)  # the one that a CPU gets
    query, key, value = states(sum(lengths))
    weight = torch.randn(1, sum(lengths), HEADS, SIZE)
    module = layer()
    module.window = window
    found, _ = dialogue_attention(module, query, key, value, Dialogues(lengths), scaling=0.3)
    gradients = torch.autograd.grad((found * weight).sum(), (query, key, value))
    wide = [each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value)]
    mask = dialogue_mask(segments_of(lengths))[:, None]
    if window is not None:
        mask = mask & torch.ones_like(mask).triu(1 - window)
    expected = F.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    reference = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for one, other in zip(gradients, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral"])
@pytest.mark.parametrize("kind", [EagleHead, KangarooAdapter])
def test_heads_take_dialogues_and_masks(kind: Any, family: str) -> None:
    """A head whose layer does not reach the function; one that no longer takes a mask, or none, as in drafting."""
    torch.manual_seed(0)
    config = tiny.tiny_config(family)
    module = kind(config) if kind is EagleHead else kind(config, KangarooShape(exit_layer=1))
    positions = torch.tensor([[*range(20), *range(7)]])
    inputs = [torch.randn(1, 27, tiny.HIDDEN_SIZE) for _ in range(2 if kind is EagleHead else 1)]
    mask = dialogue_mask(segments_of([20, 7]))[:, None]
    masked, causal = module(*inputs, positions, mask), module(*inputs, positions)
    use_dialogue_attention(module, config)
    found = module(*inputs, positions, Dialogues([20, 7]))
    torch.testing.assert_close(found, masked, rtol=1e-4, atol=5e-5)  # CPUs differ
    assert not torch.allclose(found[0, 20:], causal[0, 20:], atol=1e-2)
    assert torch.equal(module(*inputs, positions, mask), masked)
    assert torch.equal(module(*inputs, positions), causal)


def test_bf16_is_as_exact_as_the_kernel() -> None:
    """Scores or weights rounded to 8 bits."""
    query, key, value = (each.detach() for each in states(256))
    exact = blocked_attention(layer(), query, key, value)
    errors = [
        (attend(layer(), *(each.bfloat16() for each in (query, key, value))).float() - exact).abs().mean()
        for attend in (blocked_attention, fused_attention)
    ]
    assert errors[0] < 1.1 * errors[1]
