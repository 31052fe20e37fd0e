"""Replace the answers of the held-out split by the target's own, before its features are computed.

In decoding, a drafter continues what the target wrote; held-out figures on other answers would differ from that.
``<out>/heldout-answers.jsonl`` and its sidecar are the output of data_prep.regenerate for the first dialogues, and are
continued after a kill like any other.

One of several processes writes the answers; the others wait for its lock. If it dies, the kernel frees the lock, and
the next process continues from its journal.
"""

from collections.abc import Callable
from pathlib import Path

from data_prep.answers.regeneration import regenerate
from data_prep.common.ranks import Rank
from data_prep.configs import FeaturesConfig, RegenerateConfig, TargetKeys
from data_prep.dialogues.reader import source_digest
from data_prep.store.lock import LOCK, folder_lock, is_locked
from data_prep.store.manifest import MANIFEST, StoreManifest, read_manifest
from drafters.model.files import load_config_only
from drafters.model.target import TargetModel

HELDOUT = "heldout"
# Dialogues answered at once: batch_tokens / TOKENS_A_ROW, 16 at the default of that key, which bounds the memory.
TOKENS_A_ROW, MOST_ROWS = 512, 32


def with_own_answers(
    config: FeaturesConfig, headers: dict[str, StoreManifest], target: Callable[[], TargetModel]
) -> FeaturesConfig:
    """``config`` with the held-out source that ``heldout_answers`` asks for, which is written if it is missing.

    The manifest of ``heldout`` in ``headers`` is changed to match. ``target`` is called only if it is needed. Raises
    ValueError if the store has other answers, no dialogue is left, or the memory does not suffice.
    """
    header = headers.get(HELDOUT)
    if header is None or config.heldout_answers == "given" or header.answers != "given":
        return config
    out = Path(config.out)
    check_store(out / HELDOUT)
    wanted = regeneration(config)
    wanted.check()
    out.mkdir(parents=True, exist_ok=True)
    if (out / LOCK).is_file() and is_locked(out / LOCK):
        print(f"{wanted.out}: waiting for the process that writes it")
    with folder_lock(out):
        regenerate(wanted, Rank(), target)
    header.source, header.source_digest, header.answers = wanted.out, source_digest(wanted.out), "own"
    return config.model_copy(update={"splits": {**config.splits, HELDOUT: wanted.out}})


def regeneration(config: FeaturesConfig) -> RegenerateConfig:
    """The config with which data_prep.regenerate writes the same answers."""
    context = getattr(load_config_only(config.target, config.revision), "max_position_embeddings", None)
    longest = config.heldout_new_tokens if context is None else min(config.heldout_new_tokens, context // 2)
    room = config.max_length + longest  # the features cut off an answer that begins after max_length
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
    """The file with the target's own held-out answers."""
    return str(Path(config.out) / "heldout-answers.jsonl")


def check_store(path: Path) -> None:
    """Raise ValueError if the store has features of other answers than the target's own."""
    there = read_manifest(path) if (path / MANIFEST).is_file() else None
    if there is None or not (there.consumed or there.complete) or there.answers == "own":
        return
    raise ValueError(
        f"{path} holds features of the answers in {there.source}, but heldout_answers is own; keep that store with "
        f"heldout_answers=given, or delete it (rm -r {path}) to remake it with the target's own answers"
    )
