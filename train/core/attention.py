"""Attention of packed dialogues without a mask: one causal attention for each dialogue.

A mask over a packed row costs the square of the row, and rules out a GPU's fastest kernel. Here a GPU uses the fused
kernel for each dialogue, and a CPU multiplies blocks of queries, which is faster there than PyTorch's kernel, above all
in the backward pass. For the blocks of DFlash a GPU uses flex_attention, which has no backward pass on a CPU.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.flex_attention import repeat_kv
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drafters.model.layers import no_head, probe_states
from drafters.model.rows import EVERYTHING, Scope
from drafters.model.runner import attention_kernels

NAME, CAUSAL = "dialogues", "blocked-causal"
LEAST = 256  # queries of flex_attention: fewer than two of its sparse blocks of 128 need a kernel of their own
BLOCK = 128  # queries; of 64, 128 and 256 the fastest on CPUs
States = tuple[Tensor, Tensor]  # keys and values, [R, kv_heads, L, d] each


@dataclass(frozen=True)
class Dialogues:
    """Given instead of a mask: the ``lengths`` of the dialogues that fill a row."""

    lengths: list[int]

    def beside(self, attention: Any) -> list[States]:
        """Further keys and values of a layer's ``attention``: each query sees only the one at its own index, beside all
        earlier ones."""
        return []

    def within(self, window: int | None) -> int | None:
        """Largest number of the row's keys per query with a sliding ``window``, its own index's included."""
        return window


@dataclass(frozen=True)
class Chains(Dialogues):
    """Given instead of a mask and a cache: a chain is drafted from every index, all chains in parallel.

    In step n the query at index i has position i + n. It sees the keys of step 0 up to i and, of each later step, only
    the key at i: the earlier inputs of its own chain, and itself. No product with another chain's keys is taken. A
    sliding window is longer than a chain, so that it only hides keys of step 0.

    Attributes:
        step: n.
        states: keys and values of the steps so far by layer, shared by all steps.
    """

    step: int
    states: dict[int, list[States]]

    def beside(self, attention: Any) -> list[States]:
        states = self.states[attention.layer_idx][1 : self.step + 1]
        expand = getattr(attention, "expand_kv", None)  # of latent attention, whose cache has no keys and values
        return states if expand is None else [expand(*each) for each in states]

    def within(self, window: int | None) -> int | None:
        return None if window is None else window - self.step

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> States:
        """The interface of a cache. A second call, in the backward pass with checkpointing, changes nothing."""
        steps = self.states.setdefault(layer, [])
        steps[self.step : self.step + 1] = [(keys, values)]
        return steps[0]


@dataclass(frozen=True)
class Blocks(Dialogues):
    """Given instead of a mask: blocks that are drafted behind positions of packed dialogues, all in parallel.

    The keys are those of the row's tokens, then those of the blocks. A query sees the tokens of its dialogue before its
    block's anchor, and its block; an attention whose ``scope`` has a window sees fewer.

    Attributes:
        anchors: position of each block's anchor by dialogue, ascending; at least one in all.
        size: rows of a block.
        causal: a row of a block sees only the rows before it and itself.
    """

    anchors: list[list[int]]
    size: int
    causal: bool = False
    _masks: dict[Scope, Any] = field(default_factory=dict, repr=False)  # flex_attention's

    def hides(self, scope: Scope) -> bool:
        """Whether a row of a block sees no later row of it."""
        return self.causal or scope.causal

    def unseen(self, anchors: Tensor, start: int, scope: Scope) -> Tensor:
        """Bool ``[m, size or 1, n]``: tokens from ``start`` to the last anchor that blocks do not see."""
        tokens = torch.arange(start, int(anchors[-1]), device=anchors.device)
        unseen = tokens >= anchors[:, None, None]
        if scope.window is None:
            return unseen
        if scope.anchored:
            return unseen | (anchors[:, None, None] - tokens > scope.window)
        places = anchors[:, None] + torch.arange(self.size, device=anchors.device)
        return unseen | (places[..., None] - tokens >= scope.window)

    def seen(self, scope: Scope) -> Tensor:
        """Keys that the Q rows of the blocks see, int64 ``[4, Q]``: the first token and the end of the tokens, then the
        first row of the own block and the end of the rows."""
        starts = list(itertools.accumulate(self.lengths, initial=0))
        every = [(start, start + at) for start, anchors in zip(starts, self.anchors, strict=False) for at in anchors]
        first, behind = torch.tensor(every)[..., None].expand(-1, -1, self.size).unbind(1)  # [m, size] each
        place = torch.arange(self.size)
        if scope.window is not None:
            first = torch.maximum(first, behind - (scope.window if scope.anchored else scope.window - 1 - place))
        own = (starts[-1] + self.size * torch.arange(len(every)))[:, None].expand_as(first)
        end = own + (place + 1 if self.hides(scope) else self.size)
        return torch.stack([first, behind, own, end]).flatten(1)

    def mask(self, device: torch.device, scope: Scope = EVERYTHING) -> Any:
        """flex_attention's BlockMask of at least ``LEAST`` queries and keys.

        Lengths, anchors, scope and block size are in a tensor, so that one kernel serves all of them. Rows of padding
        see the first token.
        """
        if scope not in self._masks:
            seen = self.seen(scope)
            rows, tokens = seen.shape[1], sum(self.lengths)
            seen = F.pad(seen, (0, max(0, LEAST - rows)))
            seen[1, rows:] = 1
            seen = seen.to(device)
            torch._dynamo.mark_static(seen, 0)

            def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
                of_tokens = (key >= seen[0, query]) & (key < seen[1, query])
                return of_tokens | (key >= seen[2, query]) & (key < seen[3, query])

            make = of_all_lengths(create_block_mask)
            self._masks[scope] = make(sees, None, None, seen.shape[1], tokens + seen.shape[1], device=device)
        return self._masks[scope]


@functools.cache
def of_all_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled for sizes that change from call to call: a recompilation takes many steps' time."""
    return torch.compile(function, dynamic=True)


def take_dialogues(module: nn.Module) -> None:
    """Let the layers of ``module`` call ``dialogue_attention``."""
    for part in module.modules():
        if hasattr(part, "config") and hasattr(part.config, "_attn_implementation"):
            part.config._attn_implementation = NAME


def use_dialogue_attention(module: nn.Module, config: PretrainedConfig) -> None:
    """Let a head's layer take ``Dialogues`` as its mask; with a tensor or None it does what it did before.

    Args:
        config: the target's.

    Raises:
        ValueError: the attention of the target's family does not take them.
    """
    take_dialogues(module)
    check_dialogues(module, config)


def check_dialogues(module: nn.Module, config: PretrainedConfig) -> None:
    """Raise ValueError if a head's attention does not take packed dialogues; ``config``: the target's."""
    compare_dialogues(module, probe_states(module, config.hidden_size), partial(no_head, config))


@torch.no_grad()
def compare_dialogues(module: Any, inputs: list[Tensor], refused: Callable[[object], ValueError]) -> None:
    """Raise ``refused(reason)`` unless two dialogues in a row give what each gives in a row of its own.

    ``inputs``: those of ``module`` before positions and mask, ``[1, 2 n, ...]`` for two dialogues of n tokens.
    """
    half, training = inputs[0].shape[1] // 2, module.training
    positions = torch.arange(half)[None]
    module.eval()
    try:
        together = module(*inputs, positions.repeat(1, 2), Dialogues([half, half]))
        alone = [module(*parts, positions) for parts in zip(*(each.split(half, dim=1) for each in inputs), strict=True)]
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise refused(f"its attention takes no packed dialogues ({error})") from error
    module.train(training)
    expected = torch.cat(alone, dim=1)
    if not (together - expected).abs().max() <= max(1e-3, 8 * torch.finfo(together.dtype).eps) * expected.abs().max():
        raise refused("run on packed dialogues it gives something else")


def dialogue_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dialogues: Dialogues | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function: query ``[R, heads, L, d]``, key and value ``[R, kv_heads, L, d]`` ->
    ``[R, L, heads, d]``. ``Dialogues`` are given as the mask to a layer, or as ``dialogues`` to a model. An attention
    whose ``window`` is not None attends to that many tokens."""
    attention_mask, window = dialogues or attention_mask, getattr(module, "window", None)
    if not isinstance(attention_mask, Dialogues):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    on_cpu = query.device.type == "cpu"
    attend: Callable[..., Tensor]
    if isinstance(attention_mask, Blocks):
        attend = block_attention if on_cpu else flex_block_attention
        return attend(module, query, key, value, attention_mask, **options), None
    attend = blocked_attention if on_cpu else fused_attention
    inputs = [query, key, value]
    if window is not None:
        attend = partial(blocked_attention, window=attention_mask.within(window))
    if beside := attention_mask.beside(module):
        attend = attend if window is not None else blocked_attention  # no kernel has these keys
        inputs += [torch.stack(states, dim=3) for states in zip(*beside, strict=True)]
    parts = zip(*(states.split(attention_mask.lengths, dim=2) for states in inputs), strict=True)
    return torch.cat([attend(module, *part, **options) for part in parts], dim=1), None


def fused_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Causal attention ``[1, heads, T, d]`` -> ``[1, T, heads, d]`` by PyTorch's kernels, without a mask."""
    with attention_kernels(query.device):  # dialogues are of all lengths
        return sdpa_attention_forward(module, query, key, value, None, **options)[0]


def blocked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beside_key: Tensor | None = None,
    beside_value: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    block: int = BLOCK,
    dtype: torch.dtype | None = None,
    window: int | None = None,
    **_: Any,
) -> Tensor:
    """Causal attention ``[R, heads, T, d]`` -> ``[R, T, heads, d]`` by matrix products: a block of queries over the
    keys up to the block's end.

    Each query also sees the n further keys and values of its own index, ``[R, kv_heads, T, n, d]``; with ``window`` of
    the others only the last ``window``. It computes in float32 also for 16-bit inputs, which is more exact, or in
    ``dtype``.
    """
    rows, heads, length, width = query.shape
    wide = dtype or torch.promote_types(query.dtype, torch.float32)
    groups = heads // key.shape[1]
    q = query.flatten(0, 1).to(wide) * (width**-0.5 if scaling is None else scaling)

    def of_all_heads(states: Tensor) -> Tensor:
        return states.to(wide).repeat_interleave(groups, dim=1).flatten(0, 1)

    k, v = of_all_heads(key), of_all_heads(value)
    near = None if beside_key is None else (of_all_heads(beside_key) @ q[..., None]).squeeze(-1)  # scores
    near_v = v if beside_value is None else of_all_heads(beside_value)
    later = torch.full((block, block), float("-inf"), dtype=wide, device=q.device).triu(1)
    blocks = []
    for first in range(0, length, block):
        last, start = min(first + block, length), 0 if window is None else max(first + 1 - window, 0)
        hidden = F.pad(later[: last - first, : last - first], (first - start, 0))
        if window is not None:
            index = torch.arange(start, last, device=q.device)
            hidden = hidden.masked_fill(index <= index[first - start :, None] - window, float("-inf"))
        hidden = hidden.expand(len(q), -1, -1)
        scores = torch.baddbmm(hidden, q[:, first:last], k[:, start:last].transpose(1, 2))
        weights = (scores if near is None else torch.cat([scores, near[:, first:last]], dim=-1)).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = torch.bmm(weights[..., : last - start], v[:, start:last])
        if near is not None:
            mixed = mixed + (weights[:, :, None, last - start :] @ near_v[:, first:last]).squeeze(2)
        blocks.append(mixed)
    return torch.cat(blocks, dim=1).view(rows, heads, length, v.shape[-1]).transpose(1, 2).to(query.dtype)


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Tensor:
    """Attention of m blocks of B rows, ``[1, heads, m B, d]`` -> ``[1, m B, heads, d]``, keys and values
    ``[1, kv_heads, L + m B, d]``, by matrix products in float32.

    Neighbouring blocks of a dialogue, together about ``BLOCK`` queries, are one product with the tokens before the last
    one's anchor, and one product of each block with itself.
    """
    heads, width, size = query.shape[1], query.shape[3], blocks.size
    wide = torch.promote_types(query.dtype, torch.float32)
    scope: Scope = getattr(module, "scope", EVERYTHING)
    later = torch.zeros(size, size, dtype=wide, device=query.device)
    if blocks.hides(scope):
        later = later.fill_(float("-inf")).triu(1)
    at_once = max(1, BLOCK // size)
    starts = [range(0, len(anchors), at_once) for anchors in blocks.anchors]
    groups = [anchors[at : at + at_once] for anchors, every in zip(blocks.anchors, starts, strict=True) for at in every]
    counts = [len(group) * size for group in groups]

    # ``split`` and not slices: the gradient of each slice would be as large as the whole.
    q = (query[0].to(wide) * (width**-0.5 if scaling is None else scaling)).split(counts, dim=1)
    tokens, groups_of_heads = sum(blocks.lengths), heads // key.shape[1]
    wider = [each[0].to(wide).repeat_interleave(groups_of_heads, dim=0) for each in (key, value)]
    context, inside = zip(*(each.split([tokens, sum(counts)], dim=1) for each in wider), strict=True)
    dialogues = zip(*(each.split(blocks.lengths, dim=1) for each in context), strict=True)
    behind = [states for states, every in zip(dialogues, starts, strict=False) for _ in every]  # of each group
    of_blocks = zip(*(each.split(counts, dim=1) for each in inside), strict=True)
    outputs = []
    for anchors, queries, (far_k, far_v), (own_k, own_v) in zip(groups, q, behind, of_blocks, strict=True):
        last, count, single = anchors[-1], len(anchors) * size, (heads * len(anchors), size, width)
        start = 0 if scope.window is None else max(anchors[0] - scope.window, 0)
        unseen = blocks.unseen(torch.tensor(anchors, device=q[0].device), start, scope)
        hidden = torch.zeros_like(unseen, dtype=wide).masked_fill_(unseen, float("-inf"))
        hidden = hidden.expand(-1, size, -1).reshape(count, -1)
        far = torch.baddbmm(hidden.expand(heads, -1, -1), queries, far_k[:, start:last].transpose(1, 2))
        keys = own_k.reshape(single).transpose(1, 2)
        near = torch.baddbmm(later.expand(single[0], -1, -1), queries.reshape(single), keys)
        weights = torch.cat([far, near.view(heads, count, size)], dim=-1).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        of_far, of_near = weights.split([last - start, size], dim=-1)
        mixed = (of_near.reshape(single[0], size, size) @ own_v.reshape(single)).view(heads, count, width)
        outputs.append(mixed + of_far @ far_v[:, start:last])
    return torch.cat(outputs, dim=1).transpose(0, 1)[None].to(query.dtype)


def flex_block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Tensor:
    """The same by flex_attention, compiled, without scores in memory.

    Raises:
        ValueError: dropout, which flex_attention lacks.
    """
    if dropout:
        raise ValueError(f"attention dropout is {dropout:g}, which flex_attention lacks; set it to 0")
    heads, rows, width = query.shape[1:]
    if heads & (heads - 1):  # as transformers' flex_attention_forward
        key, value = (repeat_kv(states, heads // key.shape[1]) for states in (key, value))
    padding = (0, 0, 0, max(0, LEAST - rows))
    padded = [F.pad(states, padding) if rows < LEAST else states for states in (query, key, value)]
    for states in padded:
        torch._dynamo.mark_static(states, [0, 1, 3])
    # A scale that is given would be one more input of the kernel.
    scale = None if scaling is None or math.isclose(scaling, width**-0.5) else scaling
    mask = blocks.mask(query.device, getattr(module, "scope", EVERYTHING))
    attended = of_all_lengths(flex_attention)(*padded, block_mask=mask, scale=scale, enable_gqa=True)
    return attended[:, :, :rows].transpose(1, 2)


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """A transformers attention function for rows without padding, on a CPU, in the inputs' dtype: at 512 tokens bf16
    takes two thirds of the time of float32."""
    return blocked_attention(module, query, key, value, block=256, dtype=query.dtype, **options), None


AttentionInterface.register(NAME, dialogue_attention)
AttentionInterface.register(CAUSAL, causal_attention)
