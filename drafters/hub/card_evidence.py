"""What was measured of a drafter, for its model card: a certificate of eval.lossless and a report of eval.speed.

Both are read as they were written; of a drafter or target other than the card's they are refused.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

CARD_FILE = "README.md"
Found = Mapping[str, Any]


def check_card(folder: Path, *evidence: object) -> None:
    """Raise ValueError where there is no ``folder``, or it has a card on which the ``evidence`` given would not be."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}; save the drafter first, or give the folder of a trained one")
    if (folder / CARD_FILE).is_file() and any(one is not None for one in evidence):
        raise ValueError(
            f"{folder / CARD_FILE} is published as it is, without the certificate, report or figures given: take it "
            "away, and a card is written with them"
        )


def losslessness(config: Found, certificate: Found) -> str:
    """The card's section of a certificate, for a checkpoint's ``config``.

    Raises:
        ValueError: it is of another method or target.
    """
    _check_target(config, certificate, "the certificate")
    kind, certified = config["drafter_type"], certificate["drafter"]["drafter"]
    if certified != kind:
        raise ValueError(f"the certificate is of the method {certified!r}, and the drafter is of type {kind!r}")
    options = {name: value for name, value in certificate["drafter"].items() if name not in NOT_OPTIONS and value}
    shown = ", ".join(f"{name} {value}" for name, value in options.items() if name not in ("drafter", "checkpoint"))
    lines = [
        f"## Losslessness\n\n**{certificate['verdict']}**, by `eval.lossless`{f' ({shown})' if shown else ''}.",
        "",
    ]
    lines += [f"- {reason}" for reason in certificate["reasons"]]
    for part in certificate["greedy"]:
        lines.append(
            f"- greedy, {part['dtype']}: {part['tokens']:,} tokens of {part['texts']:,} texts against transformers' "
            f"own model; {len(part['divergences']):,} differ, {part['unexplained']:,} of them by more than rounding "
            "explains"
        )
    if (sampled := certificate["sampled"]) is not None:
        distance = next((f"{test['distance']:.3f}" for test in sampled["tests"]), "-")
        lines.append(
            f"- sampled, {sampled['tokens']:,} tokens against the target's own probabilities: p = "
            f"{sampled['p_value']:.2g}; a total variation of {distance} would have been caught with "
            f"{sampled['power']:.0%}"
        )
    return "\n".join([*lines, *_made(certificate["environment"])])


NOT_OPTIONS = ("name", "label", "temperatures", "grid")


def measured(config: Found, report: Found) -> str:
    """The card's section of a report: the rows of the drafter's method, and plain decoding.

    Raises:
        ValueError: it is of another target, or has no row of the method.
    """
    methods, facts = _methods(config, report), report["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    prompts = f"{facts['prompt_set']['prompts']} prompts of {Path(facts['prompt_set']['file']).name}"
    lines = [
        f"Over plain decoding in the same loop, {facts['dtype']}, on {facts['gpu'] or facts['cpu']} with "
        f"{facts['threads']} threads; {prompts}, at most {facts['limits']['max_new_tokens']} new tokens"
        f"{'; ' + versions if versions else ''}. On another machine they are others.",
        "",
        "| | temperature | tau | speedup (95% interval) | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row, method in zip(report["rows"], methods, strict=True):
        if method in (config["drafter_type"], "autoregressive"):
            interval = "" if row["speedup_ci"] is None else " ({:.2f} to {:.2f})".format(*row["speedup_ci"])
            name = row["drafter"].replace("|", "\\|") + ("" if row["lossless"] else " (**lossy**)")
            figures = [
                f"{row['temperature']:g}",
                *("-" if row[k] is None else f"{row[k]:.2f}" for k in ("tau", "speedup")),
            ]
            figures[-1] += interval
            speed = row["tokens_per_second"]
            lines.append(f"| {name} | {' | '.join(figures)} | {'-' if speed is None else f'{speed:.1f}'} |")
    return "\n".join(["## Speed\n", *lines, *_made(facts)])


def model_index(name: str, config: Found, report: Found) -> list[dict[str, Any]]:
    """``model-index`` of a card's front matter: tau and speedup of the drafter's rows; errors are ``measured``'s."""
    facts, results = report["environment"], []
    file = Path(facts["prompt_set"]["file"])
    workload = file.stem if file.is_absolute() or not file.parent.name else f"{file.parent.name}/{file.stem}"
    for row, method in zip(report["rows"], _methods(config, report), strict=True):
        for kind in ("tau", "speedup"):
            if method == config["drafter_type"] and row[kind] is not None:
                label = f"{kind}, {row['drafter']}, temperature {row['temperature']:g}"
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=workload,
                        dataset_name=workload,
                        metric_type=kind,
                        metric_name=label,
                        metric_value=round(row[kind], 3),
                    )
                )
    index: list[dict[str, Any]] = eval_results_to_model_index(name, results)
    return index


def _methods(config: Found, report: Found) -> list[str | None]:
    """The method of each row of a report.

    Raises:
        ValueError: it is of another target, or has no row of the drafter's method.
    """
    _check_target(config, report, "the report")
    kind, drafters = config["drafter_type"], report["environment"]["config"]["drafters"]
    entries = {entry.get("label") or entry["drafter"]: entry["drafter"] for entry in drafters}
    methods = [entries.get(row.get("entry"), entries.get(row["drafter"])) for row in report["rows"]]
    if kind not in methods:
        raise ValueError(
            f"the report has no row of type {kind!r}; it has {', '.join(map(repr, dict.fromkeys(entries)))}"
        )
    return methods


def _made(facts: Found) -> list[str]:
    commit = (facts["commit"] or "unknown")[:12] + (" with local changes" if facts["dirty"] else "")
    return ["", f"Of {facts['date'][:10]}, commit {commit}:", "", f"    {shlex.join(facts['argv'])}"]


def _check_target(config: Found, found: Found, what: str) -> None:
    ours, theirs = config["target"], found["environment"]["target"]
    if ours["fingerprint"] != theirs["fingerprint"]:
        raise ValueError(
            f"{what} is of the target {theirs['name']!r} (fingerprint {theirs['fingerprint']}), and the drafter was "
            f"trained for {ours['name']!r} (fingerprint {ours['fingerprint']})"
        )
