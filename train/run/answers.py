"""Whose answers the held-out text has, and what that means for the figures taken on it.

In decoding a drafter goes on from what the target wrote. On other answers, a dialogue's original ones, acceptance is
another than decoding gives, so a run measures how many of their tokens are the target's own choice.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from data_prep.store.manifest import ANSWERS, StoreManifest
from train.core.config import TrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
OWN_SHARE = "heldout_own_answers"  # in metrics.jsonl, of the evaluation before the first step
# Of a target's own greedy answers 0.97 and more: batches round differently where two tokens are nearly tied, and
# an answer that was cut has an end that the target did not write.
LEAST_OWN = 0.9


def shipped(config: str) -> str:
    """A path to the file below ``configs/`` that can be typed here."""
    path = Path(os.path.relpath(CONFIGS / config))
    return str(CONFIGS / config if path.parts[0] == os.pardir else path)


def describe_heldout(config: TrainConfig, manifest: StoreManifest) -> dict[str, Any]:
    """What run.json says of the held-out text; ``remake``: the command that gives it the target's own answers."""
    made = {"source": manifest.source, "answers": manifest.answers}
    if manifest.answers in ("own", "sampled"):
        return made
    return made | {"remake": remake_online(config) if config.data else remake_store(config, manifest)}


def remake_store(config: TrainConfig, manifest: StoreManifest) -> str:
    """Deletes the held-out store and makes it anew, with the keys that its manifest tells."""
    values: dict[str, Any] = {
        "target": config.target,
        "revision": config.revision,
        "dtype": manifest.target_dtype,
        "store_dtype": manifest.dtype,
        "chat_template": manifest.chat_template,
        "splits": json.dumps({"heldout": manifest.source}),
        "out": config.features,
        "exit_layers": json.dumps(manifest.taps),
        "max_length": manifest.max_length,
        "batch_tokens": max(8192, manifest.max_length),
        "limit": manifest.limit,
    }
    make = ["python", "-m", "data_prep.features", "--config", shipped("features/stdlib.yaml")]
    return f"rm -r {shlex.quote(str(Path(config.features) / 'heldout'))} && {_line(make, values)}"


def remake_online(config: TrainConfig) -> str:
    """Writes the answers into a file beside the run, for ``data.heldout``."""
    assert config.data is not None
    data, out = config.data, config.out.with_name(f"{config.out.name}-heldout.jsonl")
    values: dict[str, Any] = {
        "target": config.target,
        "revision": config.revision,
        "dtype": data.target_dtype,
        "chat_template": data.chat_template,
        "drafter": "null",
        "source": data.heldout,
        "limit": min(100, data.limit or 100),
        "out": out,
    }
    make = ["python", "-m", "data_prep.regenerate", "--config", shipped("regenerate/stdlib.yaml")]
    return f"{_line(make, values)}, then train with {shlex.quote(f'data.heldout={out}')}"


def _line(words: list[str], values: dict[str, Any]) -> str:
    return shlex.join([*words, *(f"{key}={value}" for key, value in values.items() if value is not None)])


def describe_answers(heldout: dict[str, Any], share: float | None) -> dict[str, Any]:
    """For a run's summary: whose answers its held-out figures were taken on.

    Args:
        heldout: of ``describe_heldout``; empty in runs that did not write it down.
        share: of the answers' tokens that the target puts first, if it was measured.
    """
    found: dict[str, Any] = {key: heldout.get(key) for key in ("source", "answers")}
    found |= {"own_share": share, "warning": None}
    if share is None or share >= LEAST_OWN:
        return found
    begin = f"{share:.0%} of the tokens of the held-out answers are the target's own greedy choice"
    known = heldout.get("answers")
    if known == "sampled":
        said = "it sampled them, so these figures are those of sampling, not of greedy decoding"
    elif known == "own":
        said = "though it wrote them, so the features may have been made in another dtype, or be damaged"
    else:
        said = "so acceptance on them is not what decoding will give. Figures on its own answers take: "
        said += heldout["remake"]
    return found | {"warning": f"{begin}: {said}"}


def answers_line(found: dict[str, Any]) -> str:
    """``describe_answers`` in a line."""
    if found["warning"]:
        return f"warning: {found['warning']}"
    share = "" if found["own_share"] is None else f" ({found['own_share']:.1%} of their tokens are its greedy choice)"
    return f"held-out answers: {ANSWERS[found['answers']]}{share}"
