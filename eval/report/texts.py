"""The outputs as text, token by token, for the page; whatever a model wrote is shown, and none of it is obeyed."""

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from eval.measure.runner import Run
from eval.prompts.prompts import Prompt
from eval.report.rows import outputs_of

MOST = 4_000_000  # bytes of all texts together: a page that a browser opens at once
LONGEST_CHARACTER = 8  # tokens that may make one character; more are shown as they are
SHOWN_AS_THEY_ARE = "\n\t\u200c\u200d"  # the last two join letters of several scripts


def visible(text: str) -> str:
    """The text with everything that would not be seen, or would turn its neighbours round, written out.

    Control characters become their pictures (``\\x00``: U+2400), others (zero width, direction overrides, halves of
    surrogate pairs, line separators, private use) their code in angle brackets. Nothing is left out.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in SHOWN_AS_THEY_ARE or character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(character) == "Zs":
        return character
    return f"\u27e8U+{code:04X}\u27e9"


def pieces(tokenizer: Any, ids: Sequence[int], start: int = 0) -> list[str]:
    """The text of every token from ``start`` on; of several that make one character, the last has it.

    Together they are the text of all.
    """
    found: list[str] = []
    before, read = max(start - LONGEST_CHARACTER, 0), start
    for end in range(start + 1, len(ids) + 1):
        known, text = (_decoded(tokenizer, ids[before:place]) for place in (read, end))
        if read == start:
            known = known.rstrip("\ufffd")  # a character that began before: it is whole only here
        whole = not text.endswith("\ufffd") or end == len(ids) or end - read >= LONGEST_CHARACTER
        found.append(visible(text[len(known) :]) if whole else "")
        if whole:
            before, read = read, end
    return found


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def make_texts(
    runs: list[Run], described: dict[str, dict[str, Any]], baseline_label: str, prompts: list[Prompt], tokenizer: Any
) -> dict[str, Any]:
    """Prompts and outputs of the first round and the smallest batch, of as many prompts as ``MOST`` bytes hold.

    An output has ``same``, how many of its tokens are plain decoding's, and ``rest``, the text of those after them.
    """
    batch = min(run.batch for run in runs)
    by_prompt: list[list[Run]] = [[] for _ in prompts]
    for run in outputs_of([run for run in runs if run.round == 0 and run.batch == batch and run.failure is None]):
        if run.method in described:
            by_prompt[run.prompt].append(run)
    found: list[dict[str, Any]] = []
    size = 0
    for prompt, outputs in zip(prompts, by_prompt, strict=True):
        one: dict[str, Any] = {
            "id": prompt.id,
            "category": prompt.category,
            "prompt": visible(_decoded(tokenizer, prompt.ids)),
        }
        one["outputs"] = _outputs(outputs, baseline_label, tokenizer)
        size += len(json.dumps(one))
        if size > MOST and found:
            break
        found.append(one)
    return {"batch": batch, "shown": found, "prompts": len(prompts)}


def _outputs(runs: list[Run], baseline_label: str, tokenizer: Any) -> list[dict[str, Any]]:
    plain = {run.temperature: run.tokens for run in runs if run.method == baseline_label}
    found = []
    for run in runs:
        base = plain[run.temperature] if run.method != baseline_label else []
        same = next((n for n, (a, b) in enumerate(zip(run.tokens, base, strict=False)) if a != b), None)
        same = min(len(run.tokens), len(base)) if same is None else same
        one: dict[str, Any] = {"drafter": run.method, "temperature": run.temperature, "same": same}
        found.append(one | {"rest": pieces(tokenizer, run.tokens, same)})
    return found
