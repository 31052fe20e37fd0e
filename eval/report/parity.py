"""The page of a parity check, made from its JSON."""

from typing import Any

from eval.report.tables import machine_line, run_again, software_line, table, target_line

ABOUT = """\
Drafts are chains of {depth} tokens, decoded greedily. *position j*: share of drafts whose first j tokens were accepted,
over all drafts of all prompts, with its standard error over prompts. *apart*: the largest difference from the engine at
a position, in standard errors; up to 2 is chance. *alike*: share of steps after the same text that accepted equally."""


def verdict_lines(found: dict[str, Any]) -> list[str]:
    """Return the verdict, and what to check for each mistake that is named."""
    config = found["environment"]["config"]
    engine, named = config["engine"], found["named"]
    checks = {one["name"]: one["check"] for one in found["readings"]}
    told = [f"{name}: check {checks[name]}" for name in named if checks[name]]
    if engine == "ours":
        first = "as loaded, the head accepts most" if found["verdict"] == "pass" else "another reading accepts more"
        others = [name for name in named if checks[name]]
        if found["verdict"] == "pass" and others:
            return [f"pass: {first}; as much within chance: {', '.join(others)}"]
        return [f"{found['verdict']}: {first}", *told]
    if found["verdict"] == "pass":
        return [f"pass: {engine} accepts what our loop accepts, within 2 standard errors at every position"]
    if found["verdict"] == "fault":
        which = "this mistake reproduces" if len(named) == 1 else f"{len(named)} mistakes, not told apart, reproduce"
        return [f"fault: {engine} does not accept what our loop accepts; {which} its acceptance", *told]
    return [f"unknown fault: {engine} does not accept what our loop accepts, and no known mistake explains it"]


def figures_table(found: dict[str, Any]) -> list[str]:
    """Return the readings as a table: the engine, then as loaded, then the mistakes, the nearest or best first."""
    engine, readings = found["engine"], found["readings"]
    depth = len(readings[0]["cumulative"])
    first, rest = readings[0], readings[1:]
    if engine is None:
        rows = sorted(readings, key=lambda one: -_value(one["tau"]))
    else:
        nearest = sorted(rest, key=lambda one: (-_value(one["alike"]), sum(gap * gap for gap in one["apart"])))
        rows = [{"name": found["environment"]["config"]["engine"], **engine}, first, *nearest]
    head = ["reading", "tau", *(f"position {at + 1}" for at in range(depth))]
    head += [] if engine is None else ["apart", "alike"]
    lines = []
    for one in rows:
        cells = [one["name"], _rate(one["tau"], 2), *(_rate(rate, 3) for rate in one["cumulative"])]
        if engine is not None:
            gap = f"{max(map(abs, one['apart'])):.1f}" if "apart" in one else "-"
            cells += [gap, _rate(one.get("alike"), 3)]
        lines.append(cells)
    return table(head, lines)


def _value(rate: dict[str, float] | None) -> float:
    return 0.0 if rate is None else rate["value"]


def _rate(rate: dict[str, float] | None, digits: int) -> str:
    return "-" if rate is None else f"{rate['value']:.{digits}f} ± {rate['error']:.{digits}f}"


def markdown(found: dict[str, Any]) -> str:
    """Return ``parity.md``."""
    facts = found["environment"]
    config = facts["config"]
    first, *told = verdict_lines(found)
    lines = [f"# {config['checkpoint']}: {found['verdict']}", "", f"**{first}.**", "", *(f"- {line}" for line in told)]
    lines += [target_line(facts), machine_line(facts), software_line(facts), f"- prompts: {facts['prompts']:,}", ""]
    lines += [*figures_table(found), "", ABOUT.format(depth=len(found["readings"][0]["cumulative"])), ""]
    return "\n".join([*lines, *run_again(facts["argv"])])
