"""transformers' own ``generate``, plain and accelerated, counted in the same way as our loop.

A streamer notes the time of the first new tokens, so that prefill is separate as in our loop.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from drafters import TargetModel
from drafters.loop.state import until
from eval.entries import StockEntry
from eval.measure.runs import Limits, Method, Outcome, joined


def stock_method(
    target: TargetModel,
    temperature: float,
    limits: Limits,
    entry: StockEntry | None = None,
    assistant: TargetModel | None = None,
) -> Method:
    """Decode with transformers' own ``generate``: greedily, or sampling with the same temperature, top-k and top-p.

    Uses only the settings in ``limits``: a model's own generation config may have more, for example a repetition
    penalty, which changes the output and costs time. Sampled tokens come from PyTorch's global generator: other tokens
    than in our loop, from the same distribution. Batches are padded on the left.

    Args:
        entry: the acceleration, or None.
        assistant: the loaded ``entry.assistant_model``.
    """
    assisted = {"assistant_model": assistant.model} if assistant is not None else {}
    drafting = _drafting(entry.num_assistant_tokens if entry is not None else None)

    def decode(prompts: list[list[int]], seed: int, most: int = limits.max_new_tokens) -> Outcome:
        settings = _settings(temperature, replace(limits, max_new_tokens=most), entry)
        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=target.device)
        lengths = torch.tensor([[len(ids)] for ids in prompts], device=target.device)
        mask = torch.arange(width, device=target.device) >= width - lengths
        streamer = _Timestamps()
        torch.manual_seed(seed)
        with _only(target, settings), _only(assistant, drafting):
            start = time.perf_counter()
            output = target.model.generate(
                input_ids,
                attention_mask=mask.long(),
                generation_config=settings,
                streamer=streamer,
                **assisted,
            )
            rows = output[:, width:].tolist()  # synchronises
            end = time.perf_counter()
        tokens, counts = joined([list(until(row, limits.eos)) for row in rows])  # padding follows EOS
        times = streamer.first - start, end - streamer.first
        return Outcome(tokens, *times, first_tokens=streamer.first_tokens, lengths=counts)

    return decode


def _settings(temperature: float, limits: Limits, entry: StockEntry | None) -> GenerationConfig:
    warped = {"temperature": temperature, "top_k": limits.top_k, "top_p": limits.top_p} if temperature > 0 else {}
    lookup = entry.model_dump(include={"prompt_lookup_num_tokens"}) if entry else {}
    return GenerationConfig(
        max_new_tokens=limits.max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=sorted(limits.eos) or None,
        pad_token_id=min(limits.eos, default=0),
        **warped,
        **lookup,
    )


def _drafting(tokens: int | None) -> GenerationConfig:
    """Return the assistant's generation config, which sets the length of drafts.

    An explicit length holds for every draft. Otherwise transformers' defaults hold: a draft ends at a confidence below
    0.4, a threshold that may adapt.
    """
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return GenerationConfig(**{} if tokens is None else {"num_assistant_tokens": tokens, **fixed})


@contextlib.contextmanager
def _only(model: TargetModel | None, settings: GenerationConfig) -> Iterator[None]:
    """Replace the model's own generation config, from which ``generate`` fills missing settings."""
    if model is None:
        yield
        return
    inner: Any = model.model
    original, inner.generation_config = inner.generation_config, settings
    try:
        yield
    finally:
        inner.generation_config = original


class _Timestamps:
    """A streamer that keeps the time and number of the first new tokens.

    ``generate`` calls it with the prompt, then with the tokens of each step: one, or several if it drafts.
    """

    def __init__(self) -> None:
        self._calls = 0
        self.first = 0.0
        self.first_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first, self.first_tokens = time.perf_counter(), value.numel()

    def end(self) -> None:
        pass
