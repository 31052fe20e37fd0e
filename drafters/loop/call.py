"""Checks of the arguments of ``generate`` and ``generate_many``, before any work is done."""

import itertools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drafters.common.wording import shortened, with_article
from drafters.model.target import TargetModel

if TYPE_CHECKING:
    from drafters.base import Drafter


def prompts_of(
    input_ids: Tensor | list[list[int]],
    prompt_lengths: list[int] | None,
    attention_mask: Tensor | list[list[int]] | None = None,
    pad: int | None = None,
) -> list[list[int]]:
    """Return the prompts in ``input_ids`` ``[B, T]`` without their padding.

    Args:
        prompt_lengths: tokens of each prompt before its padding.
        attention_mask: ``[B, T]``, 0 at padding.
        pad: id of the padding token. Without lengths and mask, prompts that seem to begin with padding are an error.

    Raises:
        ValueError: ids, lengths or mask of a wrong type or shape, or prompts that seem padded.
    """
    if isinstance(input_ids, Mapping):
        raise ValueError("input_ids is a whole tokenizer output; try generate(target, drafter, **inputs)")
    rows = _lists(input_ids, "input_ids")
    if attention_mask is not None and prompt_lengths is not None:
        raise ValueError("prompt_lengths and attention_mask both describe the padding; give one of the two")
    if attention_mask is not None:
        mask = _lists(attention_mask, "attention_mask")
        if list(map(len, mask)) != list(map(len, rows)):
            raise ValueError(f"attention_mask has rows of {[*map(len, mask)]}, input_ids of {[*map(len, rows)]} tokens")
        if broken := [n for n, row in enumerate(mask) if 1 in row and 0 in row[row.index(1) :][: sum(row)]]:
            raise ValueError(f"attention_mask has zeros between the ones of row {broken[0]}; pad on one side only")
        rows = [list(itertools.compress(row, real)) for row, real in zip(rows, mask, strict=True)]
    elif prompt_lengths is not None:
        (lengths,) = _lists([prompt_lengths], "prompt_lengths")  # type: ignore[list-item]
        if len(lengths) != len(rows):
            raise ValueError(f"{len(lengths)} prompt_lengths for {len(rows)} rows of input_ids; give one per row")
        for row, length in zip(rows, lengths, strict=True):
            if not 0 <= length <= len(row):
                raise ValueError(f"prompt_lengths says {length} for a row of {len(row)} ids")
        rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    elif pad is not None:
        _check_unpadded(rows, pad)
    if not rows or not all(rows):
        raise ValueError("the prompt is empty: every row needs at least one token id, for example BOS")
    return rows


def _lists(values: Tensor | list[list[int]], name: str) -> list[list[int]]:
    try:
        return [[operator.index(v) for v in row] for row in (values.tolist() if isinstance(values, Tensor) else values)]
    except TypeError as error:
        raise ValueError(f"{name} must be whole numbers, [batch, tokens]; one row is [[1, 2]] ({error})") from None


def _check_unpadded(rows: list[list[int]], pad: int) -> None:
    """Raise ValueError for prompts that look padded on the left.

    A prompt looks padded if it begins with two or more ``pad``. With one ``pad``, it looks padded if all prompts have
    the same length and another one begins without it.
    """
    leading = [next((n for n, token in enumerate(row) if token != pad), len(row)) for row in rows] or [0]
    most, same_length = max(leading), len({len(row) for row in rows}) == 1
    if most > 1 or (same_length and most > min(leading)):
        raise ValueError(
            f"row {leading.index(most)} of input_ids begins with {pad}, the padding token, which would count as text: "
            "also pass the tokenizer's attention_mask (generate(..., attention_mask=inputs['attention_mask']))"
        )


def padding_id(target: TargetModel) -> int | None:
    """The padding token of a target; None if it is unknown or also the BOS token."""
    sources = (getattr(target.model, "generation_config", None), target.config)
    pad, begin = (
        next((value for source in sources if (value := getattr(source, name, None)) is not None), None)
        for name in ("pad_token_id", "bos_token_id")
    )
    return pad if isinstance(pad, int) and pad != begin else None


def whole(value: Any, name: str) -> int:
    """Return ``value`` as an int, or raise ValueError with its ``name``."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, found {value!r}") from None


def check_loaded(target: object) -> None:
    """Raise ValueError if ``target`` is no ``TargetModel``, for example a name or a model of transformers."""
    if not isinstance(target, TargetModel):
        kind = with_article(type(target).__name__)
        wrap = "; wrap the loaded model: TargetModel(model)" if hasattr(target, "get_output_embeddings") else ""
        raise ValueError(f"target must be what TargetModel.from_pretrained gives, found {kind}{wrap}")


def check_seed(value: object) -> int:
    """Return ``value`` as an int, or raise ValueError if torch's generators do not accept it as a seed."""
    seed = whole(value, "seed")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must fit in 64 bits, found {shortened(seed)}")
    return seed


def check_call(target: TargetModel, drafter: "Drafter", prompts: list[list[int]], max_new_tokens: int) -> None:
    """Raise ValueError if prompts, limit, drafter and target do not fit together."""
    if not hasattr(drafter, "propose"):
        kind = with_article(type(drafter).__name__)
        raise ValueError(f"drafter must be what make_drafter or load_drafter gives, found {kind}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    if drafter.target is not target:
        raise ValueError(f"the drafter was built for target {drafter.target.name!r}: build one with this target object")
    if drafter.max_batch is not None and len(prompts) > drafter.max_batch:
        raise ValueError(f"drafter {drafter.name!r} decodes at most {drafter.max_batch} row(s), found {len(prompts)}")
    low, high = min(map(min, prompts)), max(map(max, prompts))
    if low < 0 or high >= target.vocab_size:
        raise ValueError(f"token ids are between {low} and {high}, and {target.name} has {target.vocab_size} tokens")
    longest = max(len(prompt) for prompt in prompts)
    limit = drafter.max_context
    if longest + max_new_tokens > limit:
        whose = target.name if limit == target.max_context else f"{drafter.name}'s draft model"
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the {limit} positions of "
            f"{whose}: shorten the prompt, or set max_new_tokens to at most {max(limit - longest, 0)}"
        )


def eos_ids(target: TargetModel, eos_token_id: int | list[int] | None) -> frozenset[int]:
    """Return the given EOS ids or, for None, those of the target's generation config.

    Raises:
        ValueError: an id outside the target's vocabulary, which would never end a sequence.
    """
    source = "eos_token_id"
    if eos_token_id is None:
        eos_token_id = getattr(getattr(target.model, "generation_config", None), "eos_token_id", None)
        source = f"eos_token_id in the generation config of {target.name}"
    if eos_token_id is None:
        return frozenset()
    several = eos_token_id if isinstance(eos_token_id, list | tuple | set | frozenset) else [eos_token_id]
    ids = frozenset(whole(token, source) for token in several)
    if wrong := sorted(token for token in ids if not 0 <= token < target.vocab_size):
        raise ValueError(
            f"{source} is {wrong[0]}, but the vocabulary of {target.name} has {target.vocab_size} tokens: give the id "
            "of a token that ends an answer, or [] for none"
        )
    return ids
