"""The page of a parity check, made from its JSON."""

from typing import Any

from eval.figures.readings import SHORTER
from eval.report.tables import machine_line, run_again, software_line, table, target_line

ABOUT = """\
Drafts are chains of {depth} tokens, decoded greedily. *drafted*: tokens of a draft, over the steps with room for all; a
step without a draft has 0. *position j*: share of drafts whose first j tokens were accepted, over all drafts of all
prompts, with its standard error over prompts. *apart*: the largest difference from the engine, of tau or at a position,
in standard errors; up to 2 is chance. *alike*: share of steps after the same text that accepted equally. *over as
loaded*: difference of tau from the head as loaded; its error is that of the differences of the same prompts."""


def verdict_lines(report: dict[str, Any]) -> list[str]:
    """Return the verdict, and for each mistake that is named what to check in the engine or to change in the head."""
    engine, verdict, advice = report["environment"]["config"]["engine"], report["verdict"], _advice(report)
    hints = [f"{name}: {what}" for name, what in advice.items()]
    if engine == "ours":
        if verdict == "fault":
            which = "another reading accepts" if len(advice) == 1 else f"{len(advice)} readings, not told apart, accept"
            return [f"fault: {which} more than the one that was loaded", *hints]
        return ["pass: no other reading accepts more than the one that was loaded", *_not_told_apart(report, [*advice])]
    if verdict == "pass":
        within = "within 2 standard errors at every position"
        return [f"pass: {engine} accepts what our loop accepts, in drafts as long, {within}"]
    mistakes = [name for name in advice if name != SHORTER]
    if verdict == "unknown fault":
        first = f"{engine} does not accept what our loop accepts, and no known mistake explains it"
    elif mistakes:
        count = len(mistakes)
        which = "this mistake reproduces" if count == 1 else f"{count} mistakes, not told apart, reproduce"
        first = f"{engine} does not accept what our loop accepts; {which} its acceptance"
    else:
        theirs, ours = report["engine"]["drafted"]["value"], report["readings"][0]["drafted"]["value"]
        first = f"{engine} drafts {theirs:.2f} tokens a step, and our loop {ours:.2f}"
    return [f"{verdict}: {first}", *hints]


def _not_told_apart(report: dict[str, Any], names: list[str]) -> list[str]:
    """Which readings may be the right one as well, and how many prompts like these could tell; not in older checks."""
    prompts, lines = report["environment"]["prompts"], []
    for name in names:
        line = f"not told apart on these {prompts:,} prompts: {name}"
        if (gain := report.get("gains", {}).get(name)) is not None:
            line += f", tau {gain['value']:+.3f} ± {gain['error']:.3f}; "
            more = gain["prompts_needed"]
            line += "no number of such prompts could" if more is None else f"about {more:,} prompts like these could"
        lines.append(line)
    return lines


def _advice(report: dict[str, Any]) -> dict[str, str]:
    """What to do, by the name of each mistake that is named; checks before it was stored had only what to check."""
    checks = {one["name"]: f"check {one['check']}" for one in report["readings"] if one["check"]}
    advice = report.get("advice", checks)
    return {name: advice[name] for name in report["named"] if name in advice}


def figures_table(report: dict[str, Any]) -> list[str]:
    """Return the readings as a table: the engine, then as loaded, then the mistakes, the nearest or best first."""
    engine, readings = report["engine"], report["readings"]
    depth = len(readings[0]["cumulative"])
    first, rest = readings[0], readings[1:]
    if engine is None:
        rows = sorted(readings, key=lambda one: -_value(one["tau"]))
    else:
        nearest = sorted(rest, key=lambda one: (-_value(one["alike"]), sum(gap * gap for gap in one["apart"])))
        rows = [{"name": report["environment"]["config"]["engine"], **engine}, first, *nearest]
    head = ["reading", "tau", "drafted", *(f"position {at + 1}" for at in range(depth))]
    gains = report.get("gains", {})
    head += ["apart", "alike"] if engine is not None else ["over as loaded"] if gains else []
    lines = []
    for one in rows:
        cells = [
            one["name"],
            _rate(one["tau"], 2),
            _rate(one.get("drafted"), 2),
            *(_rate(rate, 3) for rate in one["cumulative"]),
        ]
        if engine is not None:
            gaps = [*one.get("apart", ()), one.get("tau_apart", 0.0)]
            gap = f"{max(map(abs, gaps)):.1f}" if "apart" in one else "-"
            cells += [gap, _rate(one.get("alike"), 3)]
        elif gains:
            cells.append(_rate(gains.get(one["name"]), 3))
        lines.append(cells)
    return table(head, lines)


def _value(rate: dict[str, float] | None) -> float:
    return 0.0 if rate is None else rate["value"]


def _rate(rate: dict[str, float] | None, digits: int) -> str:
    return "-" if rate is None else f"{rate['value']:.{digits}f} ± {rate['error']:.{digits}f}"


def markdown(report: dict[str, Any]) -> str:
    """Return ``parity.md``."""
    facts = report["environment"]
    config = facts["config"]
    first, *hints = verdict_lines(report)
    lines = [
        f"# {config['checkpoint']}: {report['verdict']}",
        "",
        f"**{first}.**",
        "",
        *(f"- {line}" for line in hints),
    ]
    lines += [target_line(facts), machine_line(facts), software_line(facts), f"- prompts: {facts['prompts']:,}", ""]
    lines += [*figures_table(report), "", ABOUT.format(depth=len(report["readings"][0]["cumulative"])), ""]
    return "\n".join([*lines, *run_again(facts["argv"])])
