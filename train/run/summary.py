"""The summary of a training run: summary.json and summary.png in its folder; and whether its held-out answers are the
target's own.

In decoding, a drafter continues the target's own text. On other answers, such as a data set's, acceptance differs. So a
run measures the share of their tokens that are the target's own choice.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data_prep.store.manifest import ANSWERS, StoreManifest
from drafters.common.files import replace_json
from train.core.config import TrainConfig
from train.run import picture
from train.run.files import StateFolder, read_metrics, read_object

SMALLER_IS_BETTER = ("loss", "not_finite")  # parts of a figure's name; all others are better if larger
OWN_SHARE = "heldout_own_answers"  # in metrics.jsonl, of the evaluation before the first step
# 0.97 or more for a target's own greedy answers: batches round differently where two tokens are nearly tied, and an
# answer that was cut has an end that the target did not write.
LEAST_OWN = 0.9


def write_summary(run: Path, ended: str | None = None) -> dict[str, Any]:
    """Write summary.json and summary.png into a run folder, replacing those there.

    Args:
        ended: how the run ended; None keeps what an earlier summary of the same step says.

    Raises:
        ValueError: the folder holds no run, or one that logged nothing.
    """
    summary = make_summary(run, ended)
    replace_json(run / "summary.json", summary, allow_nan=True)  # as a diverged run's figures may be
    picture.draw(summary, read_metrics(run), run / "summary.png")
    return summary


def make_summary(run: Path, ended: str | None = None) -> dict[str, Any]:
    """A run's files as one mapping; ``heldout`` has first, last and best of every held-out figure."""
    info, rows = read_object(run / "run.json"), read_metrics(run)
    if not info or not rows:
        missing = "figures in metrics.jsonl" if info else "run.json that can be read"
        raise ValueError(f"no training run to sum up in {run}: it has no {missing}; give the `out` of a config")
    steps = [row for row in rows if "loss" in row]
    last, step = steps[-1] if steps else {}, int(rows[-1]["step"])
    before = read_object(run / "summary.json")
    if ended is None and before.get("steps") == step:  # otherwise killed, or still running
        ended = before.get("ended")
    newest, names = StateFolder(run).newest(), dict.fromkeys(name for row in rows for name in row)
    spent = next((row for row in reversed(rows) if "seconds" in row), {})
    joules, energy = spent.get("joules"), info.get("energy")
    kept = next((row for row in reversed(rows) if "kept_tau" in row), None)
    own_share = next((row[OWN_SHARE] for row in rows if OWN_SHARE in row), None)
    if joules is None and energy is not None and energy["available"]:
        energy = {"available": False, "how": "not all of the run was counted"}
    return {
        "run": str(run),
        "ended": ended,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": step,
        "tokens": int(last.get("tokens", 0)),
        "minutes": round(spent["seconds"] / 60, 2) if spent else None,
        "joules": joules,
        "energy": energy,
        "last_good_state": str(newest) if newest else None,
        "training": {name: last.get(name) for name in ("loss", "learning_rate", "grad_norm")},
        "heldout_answers": describe_answers(info.get("heldout") or {}, own_share),
        "kept": kept and {"step": int(kept["kept_step"]), "tau": kept["kept_tau"]},  # the best that is exported
        "heldout": {name: _course(name, rows) for name in names if name.startswith("heldout_")},
        "speed": {
            **{name: _mean(steps, name) for name in ("tokens_per_second", "mfu", "data_wait")},
            "peak_memory_gb": max((row["peak_memory_gb"] for row in steps if "peak_memory_gb" in row), default=None),
            "tau_seconds": sum(row.get("tau_seconds", 0.0) for row in rows),
        },
        **{key: info.get(key) for key in ("ranks", "hardware", "versions", "commit", "arguments", "config")},
    }


def _course(name: str, rows: list[dict[str, float]]) -> dict[str, float]:
    """First, last and best value of a figure, and the best one's step."""
    points = [(row[name], row["step"]) for row in rows if name in row]
    smaller = any(part in name for part in SMALLER_IS_BETTER)
    best, step = min(points, key=lambda point: point[0] if smaller else -point[0])
    return {"first": points[0][0], "last": points[-1][0], "best": best, "best_step": int(step)}


def _mean(steps: list[dict[str, float]], name: str) -> float | None:
    """The mean over all log lines but the first, which includes the start."""
    values = [row[name] for row in steps if name in row]
    values = values[1:] or values
    return round(sum(values) / len(values), 4) if values else None


def describe_heldout(config: TrainConfig, manifest: StoreManifest) -> dict[str, Any]:
    """Facts on the held-out text for run.json; ``remake``: instruction to replace its answers by the target's own."""
    facts = {"source": manifest.source, "answers": manifest.answers}
    if manifest.answers in ("own", "sampled"):
        return facts
    if config.data is None:
        how = f"delete {Path(config.features) / 'heldout'}, then run data_prep.features with heldout_answers=own"
    else:
        how = f"run data_prep.regenerate source={config.data.heldout}, then train with data.heldout=<its out>"
    return facts | {"remake": how}


def describe_answers(heldout: dict[str, Any], share: float | None) -> dict[str, Any]:
    """For a run's summary: the source of the held-out answers, and a warning if they are not the target's own.

    Args:
        heldout: facts of ``describe_heldout``; empty for older runs.
        share: share of the answers' tokens that the target ranks first, or None if it was not measured.
    """
    facts = {key: heldout.get(key) for key in ("source", "answers")} | {"own_share": share, "warning": None}
    if share is None or share >= LEAST_OWN:
        return facts
    reasons = {
        "sampled": "it sampled them, so these figures are for sampling, not for greedy decoding",
        "own": "although it wrote them: the features may have another dtype, or be damaged",
    }
    other = f"so acceptance in decoding will differ. To measure on its own answers: {heldout.get('remake')}"
    begin = f"{share:.0%} of the tokens of the held-out answers are the target's own greedy choice"
    return facts | {"warning": f"{begin}: {reasons.get(heldout.get('answers', ''), other)}"}


def answers_line(answers: dict[str, Any]) -> str:
    """``describe_answers`` in one line."""
    if answers["warning"]:
        return f"warning: {answers['warning']}"
    share = answers["own_share"]
    note = "" if share is None else f" ({share:.1%} of their tokens are its greedy choice)"
    return f"held-out answers: {ANSWERS[answers['answers']]}{note}"
