"""The held-out split with the target's own answers, before its features are made.

Held-out figures on somebody else's answers are not what decoding gives: there a drafter only ever goes on from what the
target wrote. ``<out>/heldout-answers.jsonl`` is what data_prep.regenerate would make of the first dialogues, with its
sidecar, and like that goes on after a kill.

Of several processes one writes the answers, while the others wait for its lock. If it dies the kernel frees the lock,
and the next one goes on from its journal; if it fails for a reason that concerns all, they fail one after the other.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from data_prep import regenerate_run
from data_prep.common.ranks import Rank, TargetKeys
from data_prep.dialogues.reader import source_digest
from data_prep.features import FeaturesConfig
from data_prep.regenerate import RegenerateConfig
from data_prep.regenerate import check as check_regeneration
from data_prep.store.lock import LOCK, folder_lock, is_locked
from data_prep.store.manifest import MANIFEST, StoreManifest, read_manifest
from drafters.model.files import load_config_only
from drafters.model.target import TargetModel

HELDOUT = "heldout"
# Dialogues are answered together by batch_tokens, the key for the memory: 16 at its default.
TOKENS_A_ROW, MOST_ROWS = 512, 32


def with_own_answers(
    config: FeaturesConfig, headers: dict[str, StoreManifest], target: Callable[[], TargetModel]
) -> FeaturesConfig:
    """``config`` with the held-out source that its ``heldout_answers`` asks for, which is written if it is not there.

    Args:
        headers: the manifests that the stores will begin with, by split; that of ``heldout`` is changed to match.
        target: gives the target, if it is wanted.

    Raises:
        ValueError: the store holds other answers; or no dialogue is left; see data_prep.regenerate, too.
    """
    header = headers.get(HELDOUT)
    if header is None or config.heldout_answers == "given" or header.answers != "given":
        return config
    check_store(Path(config.out) / HELDOUT)
    wanted = regeneration(config)
    check_regeneration(wanted)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    if (out / LOCK).is_file() and is_locked(out / LOCK):
        print(f"{wanted.out}: waiting for the process that writes it")
    with folder_lock(out):
        answer(wanted, config, target)
    header.source, header.source_digest, header.answers = wanted.out, source_digest(wanted.out), "own"
    return config.model_copy(update={"splits": {**config.splits, HELDOUT: wanted.out}})


def regeneration(config: FeaturesConfig) -> RegenerateConfig:
    """The config with which data_prep.regenerate writes the same answers."""
    context = getattr(load_config_only(config.target, config.revision), "max_position_embeddings", None)
    longest = config.heldout_new_tokens if context is None else min(config.heldout_new_tokens, context // 2)
    room = config.max_length + longest  # an answer that would begin behind max_length is cut off anyway
    return RegenerateConfig(
        source=config.splits[HELDOUT],
        out=answers_file(config),
        target=config.target,
        limit=min(config.heldout_dialogues, config.limit or config.heldout_dialogues),
        batch=min(MOST_ROWS, max(1, config.batch_tokens // TOKENS_A_ROW)),
        max_new_tokens=longest,
        max_context=room if context is None else min(context, room),
        **{key: getattr(config, key) for key in TargetKeys.model_fields},
    )


def answers_file(config: FeaturesConfig) -> str:
    """Where the answers go."""
    return str(Path(config.out) / "heldout-answers.jsonl")


def answer(wanted: RegenerateConfig, config: FeaturesConfig, target: Callable[[], TargetModel]) -> None:
    """Write the answers, or what is missing of them.

    Raises:
        ValueError: see ``with_own_answers``; or the memory does not suffice.
    """
    try:
        regenerate_run.run(wanted, Rank(), target)
    except ValueError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"out of memory while {wanted.batch} held-out dialogues were answered; lower batch_tokens (now "
            f"{config.batch_tokens}) and run again: what was answered before is kept"
        ) from error


def check_store(path: Path) -> None:
    """Raise ValueError where the store holds features of other answers than the target's own."""
    there = read_manifest(path) if (path / MANIFEST).is_file() else None
    if there is None or not (there.consumed or there.complete) or there.answers == "own":
        return
    raise ValueError(
        f"{path} holds features of the answers that {there.source} gives, and heldout_answers is own; keep that store "
        f"with heldout_answers=given, or delete it (rm -r {path}) to have it made of the target's own"
    )
