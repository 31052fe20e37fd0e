"""Whose answers a data file holds."""

import contextlib
import datetime
import json
from pathlib import Path

from data_prep.store.manifest import Answers, StoreManifest

RUN_FILE = "run.json"  # of an unfinished output: what its texts depend on
DATE = "template_date"
# The answers of a store in words. None: it was made before that was written down.
WORDS: dict[Answers | None, str] = {
    "own": "the target's own, greedy",
    "sampled": "the target's own, sampled",
    "given": "as the data file gives them",
    None: "not recorded",
}


def sidecar(out: str) -> Path:
    """``<out>.json``, which data_prep.regenerate and data_prep.magpie write once their output is whole."""
    return Path(f"{out}.json")


def unfinished(out: str) -> Path:
    """The folder of a run's journals, as long as its output is not whole."""
    return Path(f"{out}.unfinished")


def begun_on(out: str) -> str | None:
    """Return the date (YYYY-MM-DD) in the prompts of ``out``, finished or not; None if they have none."""
    for file, keys in ((sidecar(out), ("identity", DATE)), (unfinished(out) / RUN_FILE, (DATE,))):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found = json.loads(file.read_text())
            for key in keys:
                found = found[key]
            return str(datetime.date.fromisoformat(found))
    return None


def check_own(out: str) -> None:
    """Raise ValueError where a file is in the way that is neither a run's output nor has its journals beside it."""
    if Path(out).exists() and not sidecar(out).exists() and not unfinished(out).exists():
        raise ValueError(f"out: {out} exists and was not written by this program; give another file or delete it")


def whose(header: StoreManifest) -> Answers:
    """Whether the answers in a store's source are its target's, with its template, by the source's sidecar.

    An endpoint does not tell which weights it has: its answers are ``given``.
    """
    try:
        facts = json.loads(sidecar(header.source).read_text())
        identity = facts["identity"]
        made_with = {
            "target_fingerprint": header.target_fingerprint,
            "tokenizer_hash": header.tokenizer_hash,
            "chat_template": header.template_hash,
        }
        same = all(identity[key] == value for key, value in made_with.items())
        if not same or facts.get("digest", header.source_digest) != header.source_digest:  # or replaced since
            return "given"
        return "sampled" if identity["temperature"] > 0 else "own"
    except (OSError, ValueError, LookupError, TypeError):
        return "given"
