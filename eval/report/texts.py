"""The outputs as text, for ``report.html``: invisible characters are written out."""

import json
import os
import unicodedata
from collections.abc import Sequence
from typing import Any

from eval.measure.runs import Run
from eval.prompts.prompts import Prompt
from eval.report.build import outputs_of

MOST = 4_000_000  # bytes of all texts together, which a browser opens at once
UNCHANGED = "\n\t\u200c\u200d"  # the last two join letters of several scripts


def visible(text: str) -> str:
    """Return the text with characters written out that are invisible or change the direction of others.

    Control characters become their pictures (``\\x00``: U+2400); others (zero width, direction overrides, surrogate
    halves, line separators, private use) become their code in angle brackets.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in UNCHANGED or character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(character) == "Zs":
        return character
    return f"\u27e8U+{code:04X}\u27e9"


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def make_texts(
    runs: list[Run], described: dict[str, dict[str, Any]], baseline_label: str, prompts: list[Prompt], tokenizer: Any
) -> dict[str, Any]:
    """Return prompts and outputs of the first round and the smallest batch, up to ``MOST`` bytes.

    An output has ``same``, the number of its first tokens that are plain decoding's, and ``rest``, the text of the
    others.
    """
    batch = min(run.batch for run in runs)
    by_prompt: list[list[Run]] = [[] for _ in prompts]
    for run in outputs_of([run for run in runs if run.round == 0 and run.batch == batch and run.failure is None]):
        if run.method in described:
            by_prompt[run.prompt].append(run)
    texts: list[dict[str, Any]] = []
    size = 0
    for prompt, outputs in zip(prompts, by_prompt, strict=True):
        shown = visible(_decoded(tokenizer, prompt.ids))
        one: dict[str, Any] = {"id": prompt.id, "category": prompt.category, "prompt": shown}
        one["outputs"] = _outputs(outputs, baseline_label, tokenizer)
        size += len(json.dumps(one))
        if size > MOST and texts:
            break
        texts.append(one)
    return {"batch": batch, "shown": texts, "prompts": len(prompts)}


def _outputs(runs: list[Run], baseline_label: str, tokenizer: Any) -> list[dict[str, Any]]:
    plain = {run.temperature: run.tokens for run in runs if run.method == baseline_label}
    outputs = []
    for run in runs:
        base = plain[run.temperature] if run.method != baseline_label else []
        common = min(len(run.tokens), len(base))
        same = next((n for n in range(common) if run.tokens[n] != base[n]), common)
        known, text = (_decoded(tokenizer, ids) for ids in (run.tokens[:same], run.tokens))
        rest = text[len(os.path.commonprefix([known, text])) :]  # what is known may end within a character
        one: dict[str, Any] = {"drafter": run.method, "temperature": run.temperature, "same": same}
        outputs.append(one | {"rest": visible(rest)})
    return outputs
