"""``report.md``, and the report's table on the screen."""

import itertools
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eval.report.remarks import fastest, statements, warnings
from eval.report.sections import best_lines, columns_of, failed_cells, sections
from eval.report.tables import (
    batch_line,
    length_of_answers,
    machine_line,
    number,
    run_again,
    say,
    software_line,
    table,
    target_line,
)

EXPLANATION = """\
- **tau**: tokens committed per target forward, bonus token included; plain decoding is 1.0 by definition.
  *tau, no loops*: without the row's own outputs that end in a loop.
- **tokens/s**: decoding only, {batch}: without the prefill's time and without the first token, which prefill gives.
  *end to end*: all new tokens over the whole call, prefill included.
- **speedup**: tokens/s over the autoregressive drafter in the same loop, from totals over the same prompts; in brackets
  the 95% confidence interval (paired bootstrap over {units}). *median*: of the {units}' own ratios. With several rounds
  each {unit} counts with the round of its median ratio; *tokens/s* uses the row's own median times.
- **exact**: share of prompts whose greedy tokens equal plain decoding's in the same dtype; empty for sampled rows.
- **ppl**: perplexity of the outputs under the target (its own distribution, unfiltered; softmax in float32), every
  token with the same weight. A lossless method has plain decoding's, except for sampling noise.
- **J/token**: energy of the device over whole calls, prefill included, over all new tokens of all rounds. It is the
  counter's reading, idle power included; without a counter it is not estimated.
- **draft, verify, commit**: milliseconds per step: proposing (and catching up after the previous step), the target's
  forward with the acceptance rule, the rest. **host**: the part of all three outside forward passes (of the target,
  draft models and trained heads): pools, trees, masks, acceptance rules; **overhead**: its share.
- **prefill**: milliseconds per prompt or batch until the first token, with the drafter's pass over the prompt. *end to
  end* contains it, no other column does.
- **draft vocabulary**: if a drafter's is pruned, the share of its outputs' tokens that are in it.
- **stock generate**: transformers' `generate`, counted in the same way. If sampled, it draws other tokens than the loop
  (same temperature, top-k and top-p, another generator); the two are still paired by prompt.
- rows marked **(stock)**: transformers' accelerated generation, which reports no steps, so no tau. It drafts before its
  first forward; the tokens and the time of this forward are counted as prefill.
- **drafted**: nodes proposed per step. **lossy** methods change the target's output distribution; all others keep it.
"""
TOGETHER = """\
- **batch**: prompts decoded together, from one prefill until the last of them ends; the same prompts at every size.
  *tokens/s* counts all of them; *tau* counts each prompt's own steps. *speedup* is over plain decoding of the same
  batch size. *exact* is against plain decoding of the smallest one. If sampled, tokens depend on the batch.
"""
NOT_ON_SCREEN = ("median", "commit ms", "host ms", "prefill ms")  # a terminal is narrow


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print the main columns, the statements and the warnings."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = {name: cell for name, cell in columns_of(report).items() if name not in NOT_ON_SCREEN}
    for index, column in enumerate(shown):
        grid.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=not index)
    for _, rows in itertools.groupby(report["rows"], key=itemgetter("temperature")):
        for row in rows:
            grid.add_row(*(cell(row) for cell in shown.values()), style=None if row["lossless"] else "yellow")
        grid.add_section()
    for row in report["failures"]:
        grid.add_row(*failed_cells(row, [*shown]), style="red")
    console.print(grid)
    for line in [*best_lines(report), *statements(report)]:
        say(console, line)
    for line in warnings(report):
        say(console, line, "bold red")


def markdown(report: dict[str, Any], picture: str | None = None) -> str:
    """Return ``report.md``; ``picture``: file with the speedups."""
    lines = ["# Speed of drafters", "", *setting(report), ""]
    lines += [f"![speedup over plain decoding]({picture})", ""] if picture is not None else []
    columns = columns_of(report)
    rows = [[cell(row) for cell in columns.values()] for row in report["rows"]]
    lines += table([*columns], [*rows, *(failed_cells(row, [*columns]) for row in report["failures"])])
    lines += ["", *(f"- {line}" for line in [*fastest(report), *statements(report)])]
    lines += [f"- **{line}**" for line in warnings(report)]
    lines += ["", "## Columns", "", explanation(report)]
    for section in sections(report):
        lines += [f"## {section.title}", "", *table(section.head, section.rows, section.texts), ""]
        lines += [section.about, ""] if section.about else []
    return "\n".join([*lines, *run_again(report["environment"]["argv"])])


def explanation(report: dict[str, Any]) -> str:
    """Return what the columns mean."""
    if report["environment"]["batch"] != 1:
        return EXPLANATION.format(batch="all rows of a batch together", unit="batch", units="batches") + TOGETHER
    return EXPLANATION.format(batch="batch 1", unit="prompt", units="prompts")


def setting(report: dict[str, Any]) -> list[str]:
    """Return what was measured, and on which machine, as items of a list."""
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
    lines = [
        f"{target_line(facts)}, {batch_line(facts)}",
        machine_line(facts),
        f"- prompts: {prompts['prompts']}{later} of {prompts['file']} ({prompts['format']}){by_category}, "
        f"{prompts['prompt_tokens']['mean']:.0f} tokens on average, at most {prompts['prompt_tokens']['max']}{filled}; "
        f"{prompts['warmup_prompts']} others for warm-up; skipped: {skipped}",
        f"- limits: {length_of_answers(limits)}{f' ({few})' if few else ''}, "
        f"{limits['rounds']} round(s); sampled rows top-k "
        f"{limits['top_k'] or 'off'}, top-p {limits['top_p']:g}; seed {limits['seed']}",
        software_line(facts),
    ]
    for label, engine in facts.get("engines", {}).items():
        more = ", ".join(f"{key} {value}" for key, value in engine.items() if key not in ("engine", "version"))
        lines.append(f"- {label}: {engine['engine']} {engine['version']}{f' ({more})' if more else ''}")
    lines += [f"- left out: {label}: {why}" for label, why in facts.get("engines_left_out", {}).items()]
    if facts.get("processes", 1) > 1:
        lines.append(
            f"- {facts['processes']} processes shared the prompts: every speed is that of one process, and a method "
            "that remembers prompts remembers those of its own process"
        )
    *before, last = facts.get("parts", [None])
    if before:
        listed = ", ".join(
            f"{part['runs']:,} runs from {part['date']} (load average {number(part['load_average'], 1)})"
            for part in before
        )
        lines.append(f"- interrupted and resumed {len(before)} time(s): {listed}, the rest from {last['date']}")
    return lines
