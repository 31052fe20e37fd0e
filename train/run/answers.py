"""Check that the held-out answers are the target's own, as in decoding.

In decoding, a drafter continues the target's own text. On other answers, such as a data set's, acceptance differs. So a
run measures the share of their tokens that are the target's own choice.
"""

from pathlib import Path
from typing import Any

from data_prep.store.manifest import ANSWERS, StoreManifest
from train.core.config import TrainConfig

OWN_SHARE = "heldout_own_answers"  # in metrics.jsonl, of the evaluation before the first step
# 0.97 or more for a target's own greedy answers: batches round differently where two tokens are nearly tied, and an
# answer that was cut has an end that the target did not write.
LEAST_OWN = 0.9


def describe_heldout(config: TrainConfig, manifest: StoreManifest) -> dict[str, Any]:
    """Facts on the held-out text for run.json; ``remake``: how to replace its answers by the target's own."""
    made = {"source": manifest.source, "answers": manifest.answers}
    if manifest.answers in ("own", "sampled"):
        return made
    if config.data is None:
        how = f"delete {Path(config.features) / 'heldout'}, then run data_prep.features with heldout_answers=own"
    else:
        how = f"run data_prep.regenerate source={config.data.heldout}, then train with data.heldout=<its out>"
    return made | {"remake": how}


def describe_answers(heldout: dict[str, Any], share: float | None) -> dict[str, Any]:
    """For a run's summary: the source of the held-out answers, and a warning if they are not the target's own.

    Args:
        heldout: of ``describe_heldout``; empty for older runs.
        share: of the answers' tokens that the target ranks first; None: not measured.
    """
    found = {key: heldout.get(key) for key in ("source", "answers")} | {"own_share": share, "warning": None}
    if share is None or share >= LEAST_OWN:
        return found
    reasons = {
        "sampled": "it sampled them, so these figures are for sampling, not for greedy decoding",
        "own": "although it wrote them: the features may have another dtype, or be damaged",
    }
    other = f"so acceptance in decoding will differ. To measure on its own answers: {heldout.get('remake')}"
    begin = f"{share:.0%} of the tokens of the held-out answers are the target's own greedy choice"
    return found | {"warning": f"{begin}: {reasons.get(heldout.get('answers', ''), other)}"}


def answers_line(found: dict[str, Any]) -> str:
    """``describe_answers`` in one line."""
    if found["warning"]:
        return f"warning: {found['warning']}"
    share = "" if found["own_share"] is None else f" ({found['own_share']:.1%} of their tokens are its greedy choice)"
    return f"held-out answers: {ANSWERS[found['answers']]}{share}"
