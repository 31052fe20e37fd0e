"""Measure a head before and after a change, compare by conversation, and decide: for eval.gate."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from drafters.common.files import replace_json
from drafters.config import validate
from drafters.hub.checkpoint import config_of
from drafters.methods import drafter_class
from eval.configs import SpeedConfig
from eval.prompts.choice import PromptsConfig
from eval.report.changes import compare
from eval.report.measured import finished_report, measure_and_report
from eval.report.pairs import Read, read
from eval.report.tables import make_console, run_again, say, table, write_page

LABEL = "head"  # the same in both reports, which are compared by label
ALPHA = 0.05
ABOUT = """\
tau: tokens committed per target forward, the bonus token included. In brackets the 95% interval of the paired bootstrap
over conversations; *p*: of a sign-flip test, which holds for any number of conversations. Greedy answers in the
decoding loop, the same prompts before and after.
"""


@dataclass
class Row:
    """tau of one set of prompts, before and after, and whether the change is accepted."""

    prompts: str
    conversations: int
    before: float
    after: float
    change: float
    interval: tuple[float, float]
    p_value: float
    needed: str
    passed: bool


def run(parsed: argparse.Namespace, sets: dict[str, PromptsConfig]) -> int:
    """Measure, and if there is a changed head decide and write; return the exit status."""
    console = make_console()
    heads = {"before": parsed.drafter} | ({"after": parsed.changed} if parsed.changed else {})
    folders = {(when, name): measure(parsed, name, when, sets[name], console) for name in sets for when in heads}
    if parsed.changed is None:
        return 0
    reports = {key: read(folder) for key, folder in folders.items()}
    rows = [row(name, reports["before", name], reports["after", name], parsed.most_loss) for name in sets]
    accepted = all(each.passed for each in rows)
    facts = {
        "accepted": accepted,
        "drafter": str(parsed.changed if accepted else parsed.drafter),
        "rows": [asdict(each) for each in rows],
        "argv": parsed.command,
    }
    write_page(facts, page(rows, accepted, parsed), parsed.out, "gate", console)
    replace_json(parsed.out / "figures.json", figures(rows))
    for line in [*shown(rows), verdict(rows, accepted, parsed)]:
        say(console, line)
    return 0 if accepted else 1


def measure(parsed: argparse.Namespace, name: str, when: str, prompts: PromptsConfig, console: Console) -> Path:
    """Measure the head before or after on a set of prompts, unless that is done; return the report's folder."""
    checkpoint = str(parsed.drafter if when == "before" else parsed.changed)
    method = config_of(checkpoint).drafter_type
    chain = {"tree": "chain"} if "tree" in drafter_class(method).options.model_fields else {}
    template = {"chat_template": str(parsed.chat_template)} if parsed.chat_template else {}
    keys = {
        "target": {"path": parsed.target} | template,
        "prompts": prompts.model_dump(mode="json"),
        "drafters": [{"label": LABEL, "drafter": method, "checkpoint": checkpoint} | chain],
        "max_new_tokens": parsed.new_tokens,
        "temperatures": [0.0],
        "warmup": 1,
        "stock_generate": False,
        "out": str(parsed.out / when / name),
    }
    config = validate(SpeedConfig, keys, "eval.gate")
    report = finished_report(config) or measure_and_report(config, parsed.command, console)
    taken_out = report["environment"]["prompt_set"]["skipped"].get("asked_elsewhere", 0)
    if taken_out:
        say(console, f"{name}: {taken_out} prompts are also in the traffic, and are taken out")
    return config.out


def row(name: str, before: Read, after: Read, most_loss: float) -> Row:
    """Compare two reports; ``most_loss``: percent that tau may lose on the guard."""
    rows = compare(before, after, ["before", "after"])["rows"]
    tau: dict[str, Any] = next(each for each in rows if each["drafter"] == LABEL and each["figure"] == "tau")
    low, high = (100 * (end - 1) for end in tau["ratio_ci"])
    if name == "traffic":
        needed, passed = f"above 0, p below {ALPHA:g}", low > 0 and tau["p_value"] < ALPHA
    else:
        needed, passed = f"above -{most_loss:g}%", low > -most_loss
    change = 100 * (tau["ratio"] - 1)
    return Row(name, tau["prompts"], tau["a"], tau["b"], change, (low, high), tau["p_value"], needed, passed)


def shown(rows: list[Row]) -> list[str]:
    """The table of the decision."""
    head = ["prompts", "conversations", "tau before", "tau after", "change", "p", "needed", ""]
    cells = [
        [each.prompts, str(each.conversations), f"{each.before:.3f}", f"{each.after:.3f}", interval(each)]
        + [f"{each.p_value:.2g}", each.needed, "passed" if each.passed else "**failed**"]
        for each in rows
    ]
    return table(head, cells)


def interval(each: Row) -> str:
    """``+9.1% [+7.0, +11.2]``."""
    return "{:+.1f}% [{:+.1f}, {:+.1f}]".format(each.change, *each.interval)


def verdict(rows: list[Row], accepted: bool, parsed: argparse.Namespace) -> str:
    """One line: which head to serve, and why."""
    if accepted:
        guarded = "" if len(rows) > 1 else "; without --guard nothing is known of other prompts"
        return f"accepted: serve {parsed.changed}{guarded}"
    why = "; ".join(f"{each.prompts}: {interval(each)}, needed {each.needed}" for each in rows if not each.passed)
    return f"refused: {parsed.drafter} stays. {why}"


def figures(rows: list[Row]) -> dict[str, str]:
    """Both tables' figures for a model card: counts and tau only."""
    return {
        f"tau on {'new traffic' if each.prompts == 'traffic' else 'the guard'}, {each.conversations} conversations": (
            f"{each.before:.3f} before, {each.after:.3f} after: {interval(each)}"
        )
        for each in rows
    }


def page(rows: list[Row], accepted: bool, parsed: argparse.Namespace) -> str:
    """Return ``gate.md``."""
    lines = ["# Accepted" if accepted else "# Refused", "", verdict(rows, accepted, parsed), ""]
    return "\n".join([*lines, *shown(rows), "", ABOUT, *run_again(parsed.command)])
