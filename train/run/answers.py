"""Check that the held-out answers are the target's own, as in decoding.

In decoding, a drafter continues the target's own text. On other answers, such as a data set's, acceptance differs. So a
run measures the share of their tokens that are the target's own choice.
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
# 0.97 or more for a target's own greedy answers: batches round differently where two tokens are nearly tied, and an
# answer that was cut has an end that the target did not write.
LEAST_OWN = 0.9


def shipped(config: str) -> str:
    """The path of a file below ``configs/``, from the working directory."""
    path = Path(os.path.relpath(CONFIGS / config))
    return str(CONFIGS / config if path.parts[0] == os.pardir else path)


def describe_heldout(config: TrainConfig, manifest: StoreManifest) -> dict[str, Any]:
    """Facts on the held-out text for run.json; ``remake``: the command to replace its answers by the target's own."""
    made = {"source": manifest.source, "answers": manifest.answers}
    if manifest.answers in ("own", "sampled"):
        return made
    return made | {"remake": remake_online(config) if config.data else remake_store(config, manifest)}


def remake_store(config: TrainConfig, manifest: StoreManifest) -> str:
    """Command that deletes the held-out store and makes it again, with the settings in its manifest."""
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
    """Command that writes the target's answers into a file beside the run, for ``data.heldout``."""
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
    """For a run's summary: the source of the held-out answers, and a warning if they are not the target's own.

    Args:
        heldout: of ``describe_heldout``; empty for older runs.
        share: of the answers' tokens that the target ranks first; None: not measured.
    """
    found: dict[str, Any] = {key: heldout.get(key) for key in ("source", "answers")}
    found |= {"own_share": share, "warning": None}
    if share is None or share >= LEAST_OWN:
        return found
    begin = f"{share:.0%} of the tokens of the held-out answers are the target's own greedy choice"
    known = heldout.get("answers")
    if known == "sampled":
        said = "it sampled them, so these figures are for sampling, not for greedy decoding"
    elif known == "own":
        said = "although it wrote them: the features may have another dtype, or be damaged"
    else:
        said = "so acceptance in decoding will differ. To measure on its own answers: "
        said += heldout["remake"]
    return found | {"warning": f"{begin}: {said}"}


def answers_line(found: dict[str, Any]) -> str:
    """``describe_answers`` in one line."""
    if found["warning"]:
        return f"warning: {found['warning']}"
    share = "" if found["own_share"] is None else f" ({found['own_share']:.1%} of their tokens are its greedy choice)"
    return f"held-out answers: {ANSWERS[found['answers']]}{share}"
