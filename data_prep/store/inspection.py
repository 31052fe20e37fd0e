"""Print the content of feature stores, for data_prep.inspect."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import Bar
from data_prep.dialogues.encoding import tokenizer_hash
from data_prep.store.manifest import ANSWERS, StoreManifest, read_manifest
from data_prep.store.reader import FeatureStore, StoredDialogue, broken_shards, size_problem
from drafters.common.states import named_states
from drafters.model.files import load_bare_tokenizer

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
TRAINED = "bold green"  # colour of the tokens that the loss counts
MARKS = ("[[", "]]")  # around them without colour
MOST_TOKENS = 600  # of the decoded dialogue


def inspect_all(stores: list[Path], options: argparse.Namespace) -> int:
    """Print all stores, and a verdict in the last line; returns 1 if something is damaged."""
    console = Console(highlight=False, soft_wrap=True)
    problems = [problem for folder in stores for problem in inspect(folder, options, console)]
    sys.stdout.flush()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    checked = "every byte is as it was written" if options.verify else "files and sizes are right; --verify reads all"
    half = [str(folder) for folder in stores if not read_manifest(folder).complete]
    if problems:
        more = f", and {len(problems) - 1} more, named above" if len(problems) > 1 else ""
        verdict = f"NOT fine: {problems[0]}{more}"
    elif half:
        verdict = f"fine as far as it goes ({checked}), but not finished: {', '.join(half)}"
    else:
        verdict = f"fine ({checked})"
    console.print(f"Result: {verdict}", markup=False)
    return 1 if problems else 0


def inspect(folder: Path, options: argparse.Namespace, console: Console) -> list[str]:
    """Print one store and return its problems."""
    manifest = read_manifest(folder)
    console.rule(Text(str(folder)), align="left")
    console.print(facts_table(manifest))
    if options.verify:
        with Bar(total=manifest.size, unit="B", unit_scale=True, desc="reading", leave=False) as progress:
            problems = broken_shards(folder, manifest, progress.update)
    else:
        problems = [problem for entry in manifest.shards if (problem := size_problem(folder, entry))]
    if problems:
        return [f"{folder}: {problem}" for problem in problems]
    if options.verify:
        console.print(f"All {len(manifest.shards):,} shards are as they were written (SHA-256).")
    if not manifest.dialogues:
        console.print("No dialogue has been written yet.")
        return []
    try:
        store = FeatureStore(folder, manifest)
    except ValueError as error:
        return [f"{folder}: {error}"]
    lengths, states = store.lengths.double(), Table("states", "mean |x|", "max |x|", "zeros", box=None)
    table = Table("tokens of a dialogue", *(f"{share}%" for share in PERCENTILES), "mean", box=None)
    shares = torch.quantile(lengths, torch.tensor(PERCENTILES, dtype=torch.float64) / 100)
    table.add_row("", *(f"{value:,.0f}" for value in shares.tolist()), f"{lengths.mean():,.1f}")
    console.print(table)
    sums = state_sums(store, options.sample)
    for name, (total, zeros, count, largest) in sums.items():
        states.add_row(name, f"{total / count:.4g}", f"{largest:.4g}", f"{zeros / count:.2%}")
    console.print(states)
    bad = [name for name, values in sums.items() if not all(map(math.isfinite, values))]
    problems = [f"{folder}: NaN or infinite values in {' and '.join(bad)}; make the features again"] if bad else []
    index = options.dialogue
    if not 0 <= index < len(store):
        return [*problems, f"--dialogue {index}: {folder} holds dialogues 0 to {len(store) - 1:,}"]
    print_dialogue(store, index, options.tokenizer, console)
    return problems


def facts_table(manifest: StoreManifest) -> Table:
    """The manifest as a table."""
    answers = manifest.response_tokens / max(manifest.tokens, 1)
    of = f" of {manifest.plan.dialogues:,}" if manifest.plan else ""
    half = f"half written: {manifest.consumed:,}{of} dialogues so far; run the same data_prep.features command again"
    rows = {
        "state": "complete" if manifest.complete else f"{half} to finish it",
        "dialogues": f"{manifest.dialogues:,}",
        "tokens": f"{manifest.tokens:,}, {answers:.1%} of them the assistant's",
        "dropped": _counts(manifest.dropped),
        "changed": _counts(manifest.changed),
        "shards": f"{len(manifest.shards):,}",
        "size": f"{manifest.size:,} bytes, {manifest.size / max(manifest.tokens, 1):,.1f} a token",
        "stored as": f"{manifest.dtype}, features and taps {manifest.taps or 'none'}, {manifest.hidden_size:,} wide",
        "states": "; ".join(f"{tensor}: {name}" for tensor, name in named_states(manifest.taps).items()),
        "target": f"{manifest.target_name}, revision {manifest.target_revision or 'not given'}, ran in "
        f"{manifest.target_dtype}, vocabulary {manifest.vocab_size:,}, fingerprint {manifest.target_fingerprint}",
        "tokenizer": f"{manifest.tokenizer_hash}; template {manifest.template_hash}"
        + (f" from {manifest.chat_template}" if manifest.chat_template else "")
        + (f", dated {manifest.template_date}" if manifest.template_date else ""),
        "source": f"{manifest.source}, digest {manifest.source_digest}",
        "answers": ANSWERS[manifest.answers],
        "limits": f"max_length {manifest.max_length:,}, limit {manifest.limit or 'none'}",
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()) or "not recorded",
        "commit": manifest.commit or "not recorded",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    return table


def state_sums(store: FeatureStore, sample: int) -> dict[str, list[float]]:
    """Sum of absolute values, zeros, values and maximum by state, over ``sample`` dialogues spread over the store."""
    wanted = min(len(store), sample)
    sums: dict[str, torch.Tensor] = {}
    for dialogue in (store[index * len(store) // wanted] for index in range(wanted)):
        taps = {f"tap {layer}": values for layer, values in dialogue.taps.items()}
        for name, values in {"features": dialogue.features, **taps}.items():
            size = values.float().abs()
            current = torch.tensor([size.double().sum(), (size == 0).sum(), size.numel(), size.max()]).double()
            before = sums.get(name, torch.zeros(4, dtype=torch.float64))
            sums[name] = torch.cat([before[:3] + current[:3], torch.maximum(before[3:], current[3:])])
    return {name: values.tolist() for name, values in sums.items()}


def print_dialogue(store: FeatureStore, index: int, tokenizer: str | None, console: Console) -> None:
    """Decode a dialogue, with the trained tokens in colour, or in brackets without colour."""
    name = tokenizer or store.manifest.target_name
    revision = None if tokenizer else store.manifest.target_revision
    try:
        decoder: Any = load_bare_tokenizer(name, revision)
    except ValueError as error:
        console.print(f"Not decoded: {error}; give another with --tokenizer", markup=False)
        return
    if tokenizer_hash(decoder) != store.manifest.tokenizer_hash:
        console.print(f"{name!r} is another tokenizer than the store's: the text may be wrong", markup=False)
    coloured = console.color_system is not None and not console.no_color
    how = "in colour" if coloured else f"in {MARKS[0]} {MARKS[1]}"
    dialogue = store[index]
    length, trained = len(dialogue.input_ids), int(dialogue.loss_mask.sum())
    console.print(f"\nDialogue {index:,}: {length:,} tokens, {trained:,} of them trained on ({how}):")
    console.print(decoded(dialogue, decoder, coloured))
    if length > MOST_TOKENS:
        console.print(f"... and {length - MOST_TOKENS:,} more tokens")


def decoded(dialogue: StoredDialogue, tokenizer: Any, coloured: bool) -> Text:
    """The dialogue's text with runs of trained tokens marked.

    A run is the text that its tokens add: decoded separately, some tokenizers would drop its first space.
    """
    ids, mask = dialogue.input_ids[:MOST_TOKENS], dialogue.loss_mask[:MOST_TOKENS]
    changes = [0, *((mask[1:] != mask[:-1]).nonzero()[:, 0] + 1).tolist(), len(ids)]
    text, before = Text(), ""
    for start, end in zip(changes, changes[1:], strict=False):
        after = tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        part = printable(after[len(before) :])
        if not mask[start]:
            text.append(part)
        elif coloured:
            text.append(part, style=TRAINED)
        else:
            text.append(f"{MARKS[0]}{part}{MARKS[1]}")
        before = after
    return text


def printable(text: str) -> str:
    """``text`` without control characters, with which a data file could control the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"
