"""The outputs as text, token by token, for ``report.html``: everything a model wrote is shown, nothing is executed."""

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from eval.measure.runner import Run
from eval.prompts.prompts import Prompt
from eval.report.rows import outputs_of
from eval.report.tables import kind, shown_name

MOST = 4_000_000  # bytes of all texts together, which a browser opens at once
LONGEST_CHARACTER = 8  # tokens that may make one character; more are shown as they are
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


def pieces(tokenizer: Any, ids: Sequence[int], start: int = 0) -> list[str]:
    """Return the text of every token from ``start`` on; if several tokens make one character, the last has it."""
    found: list[str] = []
    before, read = max(start - LONGEST_CHARACTER, 0), start
    for end in range(start + 1, len(ids) + 1):
        known, text = (_decoded(tokenizer, ids[before:place]) for place in (read, end))
        if read == start:
            known = known.rstrip("\ufffd")  # a character that began before ``start`` is complete only here
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
    """Return prompts and outputs of the first round and the smallest batch, up to ``MOST`` bytes.

    An output has ``same``, the number of its first tokens that are plain decoding's, and ``rest``, the text of the
    others.
    """
    batch = min(run.batch for run in runs)
    by_prompt: list[list[Run]] = [[] for _ in prompts]
    for run in outputs_of([run for run in runs if run.round == 0 and run.batch == batch and run.failure is None]):
        if run.method in described:
            by_prompt[run.prompt].append(run)
    found: list[dict[str, Any]] = []
    size = 0
    for prompt, outputs in zip(prompts, by_prompt, strict=True):
        shown = visible(_decoded(tokenizer, prompt.ids))
        one: dict[str, Any] = {"id": prompt.id, "category": prompt.category, "prompt": shown}
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
        common = min(len(run.tokens), len(base))
        same = next((n for n in range(common) if run.tokens[n] != base[n]), common)
        one: dict[str, Any] = {"drafter": run.method, "temperature": run.temperature, "same": same}
        found.append(one | {"rest": pieces(tokenizer, run.tokens, same)})
    return found


def page_data(rows: list[dict[str, Any]], texts: dict[str, Any], runs: list[Run]) -> dict[str, Any]:
    """Return the data of the page's script: every output's tokens and the steps that committed them.

    An output's ``steps`` are triples: tokens committed, drafted tokens among them, index of the drafter in ``sources``.
    """
    first = [run for run in runs if run.round == 0 and run.batch == texts["batch"]]
    made = {(run.method, run.temperature, run.prompt): run for run in outputs_of(first)}
    by_key = {(row["drafter"], row["temperature"]): row for row in rows if row["batch"] == texts["batch"]}
    sources: dict[str, int] = {}
    shown = []
    for index, prompt in enumerate(texts["shown"]):
        outputs = []
        for output in prompt["outputs"]:
            key = output["drafter"], output["temperature"]
            if key in by_key:
                one = _with_steps(output, by_key[key], made[*key, index], prompt["id"], sources)
                outputs.append((-(by_key[key]["speedup"] or 0.0), one))
        outputs.sort(key=lambda pair: pair[0])
        place = {"id": visible(prompt["id"]), "category": visible(prompt["category"] or ""), "prompt": prompt["prompt"]}
        shown.append(place | {"outputs": [one for _, one in outputs]})
    return {"prompts": shown, "left_out": texts["prompts"] - len(shown), "sources": [visible(name) for name in sources]}


def _with_steps(
    output: dict[str, Any], row: dict[str, Any], run: Run, prompt: str, sources: dict[str, int]
) -> dict[str, Any]:
    steps = []
    for step in run.trace.steps if run.trace is not None else []:
        kept = min(step.accepted, step.committed)
        steps += [step.committed, kept, sources.setdefault(step.source, len(sources)) if kept else 0]
    each = (row.get("divergences") or {}).get("each") or []
    parted = next((one for one in each if (one["prompt"], one["position"]) == (prompt, output["same"])), None)
    return {
        "name": visible(shown_name(row)),
        "kind": kind(row),
        "t": row["temperature"],
        "same": output["same"],
        "rest": output["rest"],
        "first": run.first_tokens,
        "steps": steps,
        "parted": parted,
    }
