"""How a report looks: the Markdown page, and its table on the screen."""

import itertools
import shlex
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eval.prompts.prompts import shown_sizes
from eval.report.acceptance import ABOUT, DEFINITIONS, acceptance_beside, acceptance_by_position
from eval.report.accuracy import ABOUT as ABOUT_ACCURACY
from eval.report.accuracy import accuracy_notes, accuracy_table
from eval.report.rows import number, setting_of, shown_name, statements, warnings

EXPLANATION = """\
- **tau**: tokens committed per target forward, bonus token included; plain decoding is 1.0 by definition.
  *tau, no loops*: the same without the row's own outputs that end in a loop.
- **tokens/s**: decoding alone, {batch}: without the prefill's time and without the first token, which it gives.
  *end to end*: all new tokens over the whole call, prefill included.
- **speedup**: tokens/s over the autoregressive drafter in the same loop, from totals over the same prompts; in brackets
  the 95% confidence interval (paired bootstrap over {units}). *median*: of the {units}' own ratios. Of several rounds
  each {unit} counts with the one of its median ratio; *tokens/s* is of the row's own median times.
- **exact**: share of prompts whose greedy tokens equal plain decoding's in the same dtype; empty where tokens are
  sampled.
- **ppl**: perplexity of the outputs under the target (its own distribution, unfiltered; softmax in float32), every
  token of the same weight. A lossless method's is plain decoding's but for sampling noise; a lossy one's shows the
  change.
- **J/token**: energy of the device over whole calls, prefill included, over all new tokens, first ones included; all
  rounds together. It is the counter's own reading, idle power included; where there is none it is not estimated.
- **draft, verify, commit**: milliseconds a step: proposing (with whatever a drafter has to catch up on after the step
  before), the target's forward with the acceptance rule, the rest. **host**: of all three, outside forward passes (of
  the target, draft models and trained heads alike): pools, trees, masks, acceptance rules; **overhead**: its share.
- **prefill**: milliseconds a prompt, or a batch of them, until the first token; a drafter's pass over the prompt
  belongs to it. It is in *end to end* and in none of the others.
- **tau by the tokens before a step**: prompt and answer so far, from one power of two to the next, of 20 steps or more.
- **draft vocabulary**: where a drafter's is pruned, the share of its outputs' tokens that are in it: of the others it
  can draft none.
- **stock generate**: transformers' `generate`, by the same count. Where sampling, it draws other tokens than the loop
  (same temperature, top-k and top-p, another generator); the two are paired by prompt all the same.
- rows marked **(stock)** are transformers' accelerated generation, which tells no steps: no tau. It drafts before its
  first forward; the tokens that this forward gives at once, and its time, are counted as prefill.
- **drafted**: nodes proposed a step. **lossy** methods change the target's output distribution; all others preserve it.
"""
TOGETHER = """\
- **batch**: prompts decoded together, from one prefill until the last of them ends; the same prompts at every size.
  *tokens/s* counts those of all; *tau* is of each prompt's own steps. *speedup* is over plain decoding of the same
  batch size. *exact*: against plain decoding of the smallest one. Where sampling, a prompt's tokens hang on its batch.
"""

Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """The lines of a Markdown table; its first ``texts`` columns are left-aligned, the others right-aligned."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def run_again(argv: list[str]) -> list[str]:
    """The section with the command that makes the report again."""
    return ["## To run it again", "", f"    {shlex.join(argv)}", ""]


def speedup_with_interval(row: Row) -> str:
    """``1.87x [1.67, 2.07]``."""
    interval = row["speedup_ci"]
    return number(row["speedup"], 2, "x") + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "drafter": shown_name,
    "T": lambda row: f"{row['temperature']:g}",
    "batch": lambda row: str(row["batch"]),
    "tau": lambda row: number(row["tau"], 2),
    "tau, no loops": lambda row: number(row["tau_without_loops"], 2),
    "tokens/s": lambda row: number(row["tokens_per_second"], 1),
    "end to end": lambda row: number(row["end_to_end_tokens_per_second"], 1),
    "speedup": speedup_with_interval,
    "median": lambda row: number(row["speedup_median"], 2, "x"),
    "exact": lambda row: number(row["exact_match"], 3),
    "ppl": lambda row: number(row["perplexity"], 2),
    "J/token": lambda row: number(row["joules_per_token"], 3),
    "host J/token": lambda row: number(row["host_joules_per_token"], 3),
    "draft ms": lambda row: number(row["draft_ms"], 2),
    "verify ms": lambda row: number(row["verify_ms"], 2),
    "commit ms": lambda row: number(row["other_ms"], 2),
    "host ms": lambda row: number(row.get("host_ms"), 2),
    "prefill ms": lambda row: number(row["prefill_ms"], 1),
    "overhead": lambda row: "-" if row["overhead"] is None else f"{row['overhead']:.1%}",
    "drafted": lambda row: number(row["drafted_per_step"], 1),
}


NOT_ON_SCREEN = ("median", "commit ms", "host ms", "prefill ms")  # the page has them; a terminal is narrow


def columns_of(report: dict[str, Any]) -> dict[str, Callable[[Row], str]]:
    """All columns; the host's energy only where it was measured, which is beside a GPU, the batch where it is not 1."""
    hidden = set() if any(row["host_joules_per_token"] is not None for row in report["rows"]) else {"host J/token"}
    hidden |= set() if batched(report) else {"batch"}
    return {name: cell for name, cell in COLUMNS.items() if name not in hidden}


def batched(report: dict[str, Any]) -> bool:
    """Whether prompts were decoded together."""
    return bool(report["environment"]["batch"] != 1)


def print_table(report: dict[str, Any], console: Console) -> None:
    """What a terminal is wide enough for, and what is remarkable about it."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = {name: cell for name, cell in columns_of(report).items() if name not in NOT_ON_SCREEN}
    for index, column in enumerate(shown):
        grid.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=not index)
    for _, rows in itertools.groupby(report["rows"], key=itemgetter("temperature")):
        for row in rows:
            grid.add_row(*(cell(row) for cell in shown.values()), style=None if row["lossless"] else "yellow")
        grid.add_section()
    for row in report["failures"]:
        grid.add_row(*_failed(row, [*shown]), style="red")
    console.print(grid)
    for line in _best(report):
        console.print(line, markup=False, highlight=False)
    for line in statements(report):
        console.print(line, markup=False, highlight=False)
    for line in warnings(report):
        console.print(line, style="bold red", markup=False, highlight=False)


def _failed(row: Row, columns: list[str]) -> list[str]:
    """The line of a method that failed: no figure; ``warnings`` says why."""
    return [
        COLUMNS[name](row) if name in ("drafter", "T", "batch") else "failed" if name == "tau" else "-"
        for name in columns
    ]


def markdown(report: dict[str, Any], picture: Path) -> str:
    """``report.md``."""
    lines = ["# Speed of drafters", "", *setting(report), "", f"![speedup over plain decoding]({picture.name})", ""]
    columns = columns_of(report)
    rows = [[cell(row) for cell in columns.values()] for row in report["rows"]]
    lines += table([*columns], [*rows, *(_failed(row, [*columns]) for row in report["failures"])])
    lines += ["", *(f"- {line}" for line in statements(report))]
    lines += [f"- **{line}**" for line in warnings(report)]
    lines += ["", *_by_batch(report), "## Columns", "", explanation(report)]
    lines += _accuracy(report) + _acceptance(report) + _contexts(report) + _grids(report) + _categories(report)
    return "\n".join([*lines, *run_again(report["environment"]["argv"])])


def explanation(report: dict[str, Any]) -> str:
    """What the columns mean."""
    if batched(report):
        return EXPLANATION.format(batch="all rows of a batch together", unit="batch", units="batches") + TOGETHER
    return EXPLANATION.format(batch="batch 1", unit="prompt", units="prompts")


def _by_batch(report: dict[str, Any]) -> list[str]:
    """EAGLE's Table 7: speeds with the batch sizes across, and the best of each method."""
    sizes = report["environment"]["batch"]
    if not isinstance(sizes, list):
        return []
    speeds: dict[tuple[str, str], dict[int, str]] = {}
    for row in report["rows"]:
        cell = f"{number(row['tokens_per_second'], 1)} ({number(row['speedup'], 2, 'x')})"
        speeds.setdefault((shown_name(row), f"{row['temperature']:g}"), {})[row["batch"]] = cell
    cells = [[*key, *(line.get(size, "-") for size in sizes)] for key, line in speeds.items()]
    heading = "## tokens/s (speedup over plain decoding of the same batch size)"
    titles = ["drafter", "T", *(f"batch {size}" for size in sizes)]
    best = [f"- {line}" for line in _best(report)]
    lines = [heading, "", *table(titles, cells), "", *best, ""]
    if settings := best_settings(report):
        titles = ["drafter", "T", *(f"batch {size}" for size in sizes)]
        lines += ["## The fastest settings by batch size", "", *table(titles, settings), ""]
    return lines


def best_settings(report: dict[str, Any]) -> list[list[str]]:
    """Of every entry with a grid, by batch size the knobs of most tokens per second, and the speedup with them."""
    sizes = report["environment"]["batch"]
    best: dict[tuple[str, str], dict[int, Row]] = {}
    for row in report["rows"]:
        if row["grid"] and row["tokens_per_second"] is not None:
            line = best.setdefault((row["entry"], f"{row['temperature']:g}"), {})
            if row["tokens_per_second"] > line.get(row["batch"], {"tokens_per_second": 0.0})["tokens_per_second"]:
                line[row["batch"]] = row
    return [
        [
            *key,
            *(f"{_knobs(line[n]['grid'])} ({number(line[n]['speedup'], 2, 'x')})" if n in line else "-" for n in sizes),
        ]
        for key, line in best.items()
    ]


def _knobs(grid: dict[str, Any]) -> str:
    return ", ".join(f"{knob} {value}" for knob, value in grid.items())


def by_context(report: dict[str, Any]) -> list[list[str]]:
    """A table, head first, of tau by the tokens before a step; nothing below the head where there is one bin alone."""
    rows = [row for row in report["rows"] if row.get("by_context") and row["tau"] != 1.0]
    bins = sorted({(one["from"], one["to"]) for row in rows for one in row["by_context"]})
    lines = [["drafter", "T", "batch", *(f"{low:,} to {high:,}" for low, high in bins)]]
    for row in rows if len(bins) > 1 else []:
        known = {one["from"]: f"{one['tau']:.2f}" for one in row["by_context"]}
        place = [shown_name(row), f"{row['temperature']:g}", str(row["batch"])]
        lines.append([*place, *(known.get(low, "-") for low, _ in bins)])
    return lines


def _contexts(report: dict[str, Any]) -> list[str]:
    head, *rows = by_context(report)
    return ["## tau by the tokens before a step", "", *table(head, rows), ""] if rows else []


def _best(report: dict[str, Any]) -> list[str]:
    """The best throughput over the batch sizes, where there are several."""
    if not isinstance(report["environment"]["batch"], list):
        return []
    return [
        f"best throughput, {shown_name(row)}, T = {row['temperature']:g}: {number(row['tokens_per_second'], 1)} "
        f"tokens/s at batch {row['batch']}, {number(row['over_plain'], 2)} times plain decoding's best"
        for row in report["throughput"]
    ]


def setting(report: dict[str, Any]) -> list[str]:
    """What was measured, where."""
    facts = report["environment"]
    prompts, limits = facts["prompt_set"], facts["limits"]
    skipped = ", ".join(f"{reason} {count:,}" for reason, count in prompts["skipped"].items()) or "none"
    order = f"; {prompts['consecutive']} of one category in a row" if prompts["consecutive"] else ""
    earlier = prompts["context"]
    filled = f" (filled up to {earlier['tokens']:,} with dialogues of {earlier['files']})" if earlier else ""
    counts = ", ".join(f"{name} {count}" for name, count in prompts["categories"].items())
    by_category = f" (by category: {counts}{order})" if counts else ""
    fewer = {name: suite["max_new_tokens"] for name, suite in prompts.get("suites", {}).items()}
    few = ", ".join(f"of {name} {most}" for name, most in fewer.items() if most and most < limits["max_new_tokens"])
    later = f", {prompts['later_turns']} of them later turns" if prompts.get("later_turns") else ""
    return [
        f"{target_line(facts)}, {batch_line(facts)}",
        machine_line(facts),
        f"- prompts: {prompts['prompts']}{later} of {prompts['file']} ({prompts['format']}){by_category}, "
        f"{prompts['prompt_tokens']['mean']:.0f} tokens on average, at most {prompts['prompt_tokens']['max']}{filled}; "
        f"{prompts['warmup_prompts']} others for warm-up; skipped: {skipped}",
        f"- limits: {length_of_answers(limits)}{f' ({few})' if few else ''}, "
        f"{limits['rounds']} round(s); sampled rows top-k "
        f"{limits['top_k'] or 'off'}, top-p {limits['top_p']:g}; seed {limits['seed']}",
        software_line(facts),
        *engine_lines(facts),
        *processes_line(facts),
        *parts_line(facts),
    ]


def processes_line(facts: dict[str, Any]) -> list[str]:
    """Of a report that several processes made."""
    if facts.get("processes", 1) == 1:
        return []
    return [
        f"- {facts['processes']} processes shared the prompts: every speed is that of one of them, and a method that "
        "remembers prompts knew those of its own process"
    ]


def length_of_answers(limits: dict[str, Any]) -> str:
    """At most or, where EOS is ignored, exactly so many tokens."""
    most = f"{limits['max_new_tokens']} new tokens"
    return f"exactly {most}, whatever ends before" if limits.get("ignore_eos") else f"at most {most}"


def batch_line(facts: dict[str, Any]) -> str:
    """The batch size, or all of them."""
    return f"batch {shown_sizes(facts['batch'] if isinstance(facts['batch'], list) else [facts['batch']])}"


def engine_lines(facts: dict[str, Any]) -> list[str]:
    """Of a report with other engines: what each is, and which were left out."""
    told = []
    for label, engine in facts.get("engines", {}).items():
        more = ", ".join(f"{key} {value}" for key, value in engine.items() if key not in ("engine", "version"))
        told.append(f"- {label}: {engine['engine']} {engine['version']}{f' ({more})' if more else ''}")
    return told + [f"- left out: {label}: {why}" for label, why in facts.get("engines_left_out", {}).items()]


def parts_line(facts: dict[str, Any]) -> list[str]:
    """Of a report that was interrupted: when each part of it was measured."""
    parts = facts.get("parts", [])
    if len(parts) < 2:
        return []
    *before, last = parts
    told = ", ".join(
        f"{part['runs']:,} runs from {part['date']} (load average {number(part['load_average'], 1)})" for part in before
    )
    return [f"- interrupted and resumed {len(before)} time(s): {told}, the rest from {last['date']}"]


def target_line(facts: dict[str, Any]) -> str:
    """The target, for a list."""
    target = facts["target"]
    revision = f" at revision {target['revision']}" if target["revision"] else ""
    tuned = target.get("tuned_from")
    other = (
        f"; tuned from {tuned['name']}, another model: what is lossless here keeps this one's output" if tuned else ""
    )
    return (
        f"- target: {target['name']}{revision}, {target['parameters'] / 1e6:,.1f}M parameters, {facts['dtype']}, "
        f"engine {facts['engine']}{', layers in ' + facts['quantize'] if facts['quantize'] else ''}{other}"
    )


def machine_line(facts: dict[str, Any]) -> str:
    """The machine, its load, and the most memory that was held, for a list."""
    peaks = [f"{n / 1e9:.2f} GB ({where})" for where, n in (facts.get("peak_memory_bytes") or {}).items() if n]
    name = facts["gpu"] or facts["cpu"]
    fewest = facts.get("fewest_threads") or facts["threads"]
    lowered = f" (at times {fewest}, beside other processes)" if fewest < facts["threads"] else ""
    level = f" ({facts['cpu_instructions']})" if facts.get("cpu_instructions") else ""  # not in older reports
    return (
        f"- machine: {name}{level}, {facts['cpu_cores']} CPU cores, {facts['threads']} threads{lowered}; "
        f"load average {number(facts['load_average'], 1)} before, {number(facts['load_average_after'], 1)} after"
        + (f"; at most {' and '.join(peaks)} of memory" if peaks else "")
    )


def software_line(facts: dict[str, Any]) -> str:
    """Versions, commit and date, for a list."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = (facts["commit"] or "unknown")[:12] + (" with local changes" if facts["dirty"] else "")
    return f"- software: {versions}; commit {commit}; {facts['date']}"


def _acceptance(report: dict[str, Any]) -> list[str]:
    head, *rows = acceptance_by_position(report["rows"])
    lines = ["## Acceptance by position", "", *table(head, rows), "", DEFINITIONS, ""] if rows else []
    tables = [["", *table(head, rows)] for head, *rows in acceptance_beside(report["rows"])]
    return lines + (["## Acceptance by depth", "", ABOUT, *itertools.chain(*tables), ""] if tables else [])


def _accuracy(report: dict[str, Any]) -> list[str]:
    head, *rows = accuracy_table(report["rows"]) or [[]]
    notes = [f"- {line}" for line in accuracy_notes(report)]
    return ["## Accuracy", "", *table(head, rows), "", *notes, "", ABOUT_ACCURACY] if rows else []


def _categories(report: dict[str, Any]) -> list[str]:
    """A table for the categories, and one for the sub-categories."""
    lines = []
    for kind, shown in (("categories", "category"), ("sub_categories", "sub-category")):
        rows = [row for row in report["rows"] if kind in row]
        names = list(rows[0][kind]) if rows else []
        cells = []
        for row in rows:
            figures = [f"{number(c['speedup'], 2, 'x')} ({number(c['tau'], 2)})" for c in row[kind].values()]
            cells.append([shown_name(row), f"{row['temperature']:g}", *figures])
        if rows:
            lines += [f"## Speedup (tau) by {shown}", "", *table(["drafter", "T", *names], cells), ""]
    return lines


def _grids(report: dict[str, Any]) -> list[str]:
    """A table for every grid of two or three knobs: the last one across."""
    grids: dict[tuple[str, str], list[Row]] = {}
    for row in report["rows"]:
        if row["grid"] and 2 <= len(row["grid"]) <= 3:
            grids.setdefault((row["entry"], setting_of(row)), []).append(row)
    return [line for (entry, where), rows in grids.items() for line in _pivot(entry, where, rows)]


def _pivot(entry: str, where: str, rows: list[Row]) -> list[str]:
    *down, across = rows[0]["grid"]
    fastest = max(row["tokens_per_second"] or 0.0 for row in rows)
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        figure = number(row["tokens_per_second"], 1)
        figure = f"**{figure}**" if row["tokens_per_second"] == fastest else figure
        place = {knob: str(value) for knob, value in row["grid"].items()}
        line = cells.setdefault(tuple(place[knob] for knob in down), {})
        line[place[across]] = f"{figure} ({number(row['tau'], 2)})"
    columns = list(dict.fromkeys(value for line in cells.values() for value in line))
    titles = [*down, *(f"{across} = {value}" for value in columns)]
    lines = [[*place, *(line.get(column, "-") for column in columns)] for place, line in cells.items()]
    heading = f"## {entry}, {where}: tokens/s (tau); the fastest in bold"
    return [heading, "", *table(titles, lines, texts=0), ""]
