"""``generate``: continue prompts with a target and a drafter.

All methods, plain decoding included, share this loop and so its cache, stop rules, token counts and clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.loop.call import check_call, check_seed, check_types, eos_ids, padding_id, prompts_of, whole
from drafters.loop.processors import ByText, Control
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.step import start, step
from drafters.loop.trace import Trace
from drafters.model.runner import Clock
from drafters.model.target import TargetModel

if TYPE_CHECKING:
    from drafters.base import Drafter


@dataclass
class GenerateResult:
    """Result of ``generate``.

    Attributes:
        tokens: ``[B, n]`` new token ids on the CPU; rows that ended early are padded with EOS, or with 0 without EOS.
        lengths: number of new tokens of each row.
        trace: steps and times.
    """

    tokens: Tensor
    lengths: list[int]
    trace: Trace = field(default_factory=Trace)


@torch.inference_mode()
def generate(
    target: TargetModel,
    drafter: "Drafter",
    input_ids: Tensor | list[list[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    prompt_lengths: list[int] | None = None,
    attention_mask: Tensor | list[list[int]] | None = None,
    seed: int = 0,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    control: Control | None = None,
    trace: Trace | None = None,
) -> GenerateResult:
    """Continue prompts with a target accelerated by a drafter.

    Args:
        input_ids: ``[B, T]`` token ids, or a list of id lists.
        max_new_tokens: most new tokens of a row; a row ends earlier at its first EOS.
        temperature, top_k, top_p: 0 is greedy; 0 and 1 switch top_k and top_p off.
        eos_token_id: tokens that end a row; None takes those of the target's generation config, ``[]`` is none.
        prompt_lengths, attention_mask: tokens of each row before its padding; ``[B, T]``, 0 at padding.
        seed: of the generator of all random numbers.
        on_tokens: called with (row, new ids) after each commit, for streaming.
        control: logits processors and stopping criteria. If it alters scores, temperature, top_k and top_p only shape
            the drafts.
        trace: an empty trace to fill, so that ``on_tokens`` can read the steps; times are set at the end.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a prompt too long for the target, too many rows for the
            drafter, or parameters out of range or of a wrong type.
    """
    check_types(target, drafter, on_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    prompts = prompts_of(input_ids, prompt_lengths, attention_mask, padding_id(target))
    max_new_tokens, seed = whole(max_new_tokens, "max_new_tokens"), check_seed(seed)
    check_call(target, drafter, prompts, max_new_tokens)
    # Set up the generator of random numbers, and a cache for prompt, new tokens and one draft.
    generator = torch.Generator(device=target.device).manual_seed(seed)
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + drafter.max_draft + 1
    eos = eos_ids(target, eos_token_id)
    state = DecodeState.of(target, prompts, capacity, max_new_tokens, sampling, generator, eos)
    state.control = control
    trace = Trace() if trace is None else trace
    rule = ByText(state) if control is not None and control.alters else drafter.rule(sampling)
    clock = Clock(target.device)
    # Decode: the prefill, then steps until all rows have ended.
    start(state, drafter)
    clock.lap()
    _notify(state, on_tokens, state.prompt_lengths)
    while not all(state.finished):
        before = [len(row) for row in state.tokens]
        trace.steps.extend(step(state, drafter, rule, clock.lap))
        _notify(state, on_tokens, before)
    trace.read(clock)
    return _result(state, trace)


def _notify(state: DecodeState, on_tokens: Callable[[int, list[int]], None] | None, before: list[int]) -> None:
    if on_tokens is None:
        return
    for row, length in enumerate(before):
        if len(state.tokens[row]) > length:
            on_tokens(row, state.tokens[row][length:])


def _result(state: DecodeState, trace: Trace) -> GenerateResult:
    new = [row[start:] for row, start in zip(state.tokens, state.prompt_lengths, strict=True)]
    fill = min(state.eos, default=0)
    width = max(len(row) for row in new)
    filled = torch.tensor([row + [fill] * (width - len(row)) for row in new])
    return GenerateResult(filled, [len(row) for row in new], trace)
