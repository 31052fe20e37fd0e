"""Sentences below a report's table: warnings, and statements about the baseline, loops, divergences and options."""

from pathlib import Path
from typing import Any

from eval.report.tables import (
    about_energy,
    at_settings,
    in_batch,
    kind,
    number,
    setting_of,
    shown_name,
    speedup_with_interval,
    tail,
)

UNRECORDED = "no reason recorded"


def warnings(report: dict[str, Any]) -> list[str]:
    """Return what makes figures doubtful: failed methods, a slow baseline, and divergences beyond rounding."""
    lines = [
        f"{shown_name(row)}, {setting_of(row)}: no figures, it failed on prompt {row['prompt']!r}: {row['reason']}"
        for row in report["failures"]
    ]
    for baseline in report["baseline"]["temperatures"]:
        ratio = baseline["over_stock_generate"]
        if ratio is not None and ratio < 1:
            lines.append(
                f"{setting_of(baseline)}: the baseline is slower than stock generate ({ratio:.2f} times its "
                f"speed): every speedup there is {1 / ratio:.2f} times the speedup over stock generate"
            )
    for row in report["rows"]:
        divergences = row.get("divergences", {"count": 0})
        if not row["lossless"] or not divergences["count"] or row.get("engine"):  # another engine rounds differently
            continue
        if tail(divergences, row["prompts"]) is not None:
            continue
        count, fault = divergences["unexplained"], "more than rounding explains: a fault in the method or in the loop"
        if count is None:
            count, fault = divergences["count"], f"an unchecked amount ({divergences.get('unavailable', UNRECORDED)})"
        if count:
            lines.append(
                f"{row['drafter']}{in_batch(row)} is lossless, but {count} of {row['prompts']} greedy outputs differ "
                f"from plain decoding's by {fault}"
            )
    return lines


def fastest(report: dict[str, Any]) -> list[str]:
    """Return a sentence per temperature and batch size: the fastest lossless method, with its interval."""
    place = f"{Path(report['environment']['target']['name']).name}"
    lines = []
    for at, baseline, rows in at_settings(report):
        lossless = [row for row in rows if kind(row) == "own" and row["speedup"] is not None]
        if not lossless:
            lines.append(f"{at}: no lossless method was measured beside plain decoding")
            continue
        best = max(lossless, key=lambda row: row["speedup"])
        speeds = [number(row["tokens_per_second"], 1) for row in (best, baseline)]
        lines.append(
            f"{at}: the fastest lossless method, {shown_name(best)}, has a speedup of {speedup_with_interval(best)}: "
            f"{' instead of '.join(speeds)} tokens/s from {place}"
        )
    return lines


def statements(report: dict[str, Any]) -> list[str]:
    """Return statements about prompts, quantisation, the baseline, loops, energy, load and single rows."""
    facts = report["environment"]
    lines = [shortage] if (shortage := shortage_line(facts["prompt_set"])) else []
    if (cost := facts.get("quantisation")) is not None:
        lines.append(
            f"layers in {facts['quantize']}: KL {cost['kl']:.4f} from the target in {facts['dtype']}, same best token "
            f"at {cost['same_argmax']:.1%} of {cost['positions']:,} positions of prompts and plain decoding's answers"
        )
    for baseline in report["baseline"]["temperatures"]:
        at = setting_of(baseline)
        line = f"{at}: plain decoding in this loop makes {number(baseline['tokens_per_second'], 1)} tokens/s"
        if (ratio := baseline["over_stock_generate"]) is not None:
            stock = number(baseline["stock_generate_tokens_per_second"], 1)
            line += f", {number(ratio, 2)} times stock generate's {stock}"
        lines.append(line)
        lines.append(
            f"{at}: {baseline['loop_share']:.1%} of plain decoding's outputs end in a loop (loops raise tau of every "
            "drafter; see tau, no loops)"
        )
    lines += about_energy(facts["energy"])
    measured = facts["energy"].get("device", {}).get("available", False)
    if measured and any(row["joules_per_token"] is None for row in report["rows"]):
        lines.append("energy: rows without a figure have runs from a start that could not read the counters")
    started = [part["load_average"] for part in facts.get("parts", [facts])]  # all starts of an interrupted report
    busiest = max((load for load in started if load is not None), default=0.0)
    if busiest > facts["cpu_cores"]:
        lines.append(f"the machine was busy when runs began (load average {busiest:.1f}): times are rough")
    lines += [line for row in report["rows"] for line in _about_row(row, facts["dtype"])]
    return lines + [
        f"{shown_name(row)}, {setting_of(row)}: not measured, it decodes at most {row['most']} row(s) at once"
        for row in report.get("left_out", [])
    ]


def shortage_line(prompts: dict[str, Any]) -> str | None:
    """Return a statement if fewer prompts are measured than the config asks for, else None."""
    first = prompts["prompts"] - prompts.get("later_turns", 0)
    if prompts["requested"] is None or first >= prompts["requested"]:
        return None
    return (
        f"only {first} prompts are measured, not the {prompts['requested']} asked for: {prompts['file']} has no more "
        "usable ones"
    )


def _about_row(row: dict[str, Any], dtype: str) -> list[str]:
    lines = []
    divergences = row.get("divergences", {"count": 0})
    if row.get("engine") and row["temperature"] == 0:
        lines.append(_agreement(row, dtype))
    elif row["lossless"] and divergences["count"] and divergences["unexplained"] is not None:
        lines.append(
            f"{row['drafter']}{in_batch(row)}: {divergences['count']} of {row['prompts']} greedy outputs leave plain "
            f"decoding's path, {divergences['count'] - divergences['unexplained']} of them where rounding in {dtype} "
            f"explains it (largest top-2 margin there: {number(divergences['largest_margin'], 3)} logits)"
        )
        if (most := tail(divergences, row["prompts"])) is not None:
            lines[-1] += (
                f"; the other {divergences['unexplained']} exceed the tolerance by {most:.2f} times at most, as a few "
                "of so many tokens may: target.dtype=float32 shows whether it is rounding, all outputs must be equal "
                "there"
            )
    if (chosen := row.get("expected")) is not None:
        lines.append(
            f"{row['drafter']}, {setting_of(row)}: auto chose its options, at the end {chosen['choice']}; "
            f"expected tau {chosen['tau']:.2f} and {chosen['speedup']:.2f}x, measured {number(row['tau'], 2)} and "
            f"{number(row['speedup'], 2, 'x')}"
        )
        if (over := row.get("over_best_fixed")) is not None and over["speedup"] is not None:
            between = " ({:.2f} to {:.2f})".format(*over["speedup_ci"]) if over["speedup_ci"] else ""
            best = f"{between} times the fastest fixed setting of its method, {over['drafter']}"
            lines[-1] += f"; {over['speedup']:.2f}{best}"
    if (coverage := row.get("draft_vocab_coverage")) is not None:
        lines.append(
            f"{row['drafter']}, {setting_of(row)}: drafts with {row['draft_vocab']:,} tokens, those of the text "
            f"included, which are {coverage:.1%} of its outputs' tokens"
        )
    if row["perplexity"] is None:
        lines.append(
            f"{row['drafter']}, {setting_of(row)}: no perplexity of its outputs "
            f"({row.get('perplexity_unavailable', UNRECORDED)})"
        )
    return lines


def _agreement(row: dict[str, Any], dtype: str) -> str:
    """Return how many greedy outputs of another engine equal plain decoding's; differences need not be faults."""
    divergences = row["divergences"]
    same = row["prompts"] - divergences["count"]
    line = f"{shown_name(row)}: {same} of {row['prompts']} greedy outputs are plain decoding's"
    if not divergences["count"] or divergences["each"] is None:
        return line
    places = sorted(each["position"] for each in divergences["each"])
    return (
        f"{line}; the others leave it after {places[len(places) // 2]} tokens (median; the first after {places[0]}), "
        f"{divergences['count'] - divergences['unexplained']} of them where rounding in {dtype} explains it"
    )
