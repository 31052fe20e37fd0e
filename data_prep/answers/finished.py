"""The output of a run that several processes shared: whole, with what it was made from beside it, or not there."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.answers.journal import check_identity
from data_prep.answers.ownership import DATE, sidecar, unfinished
from data_prep.dialogues.encoding import template_hash, tokenizer_hash
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import source_digest
from data_prep.store.lock import folder_lock
from drafters.common.files import replace_text
from drafters.model.ends import load_frozen_ends

# Identity keys that older outputs lack. For a finished output, a missing one counts as equal to the current value.
LATER = {"unanswered", "reader", DATE}


def target_identity(target: str, revision: str | None, chat: ChatTokenizer) -> dict[str, Any]:
    """What texts by a target depend on, its name aside."""
    ends = load_frozen_ends(target, device="meta", revision=revision)
    return {
        "target_fingerprint": ends.fingerprint,
        "tokenizer_hash": tokenizer_hash(chat.tokenizer),
        "chat_template": template_hash(chat.template),
        **({DATE: chat.date} if chat.date else {}),
    }


def is_finished(out: str) -> bool:
    """Whether the output is whole."""
    return sidecar(out).is_file() and Path(out).is_file()


def report_finished(out: str, identity: dict[str, Any], describe: Callable[[dict[str, Any]], str]) -> bool:
    """Whether the output is there; says so in a line.

    Raises:
        ValueError: it was made with other settings, or is another file by now.
    """
    if not is_finished(out):
        return False
    file = sidecar(out)
    try:
        facts = json.loads(file.read_text())
        before = {key: identity[key] for key in LATER & identity.keys()} | facts["identity"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{file} is not what this program writes; give another `out`, or move it") from None
    check_identity(Path(out), before, identity)
    digest = source_digest(out)
    if facts.get("digest", digest) != digest:
        raise ValueError(
            f"{out} was changed or replaced after it was written: its digest is {digest}, {file} has "
            f"{facts['digest']}; put the first file back, or delete both to have the answers written again"
        )
    print(f"{out} is finished already: {describe(facts)}")
    return True


@contextlib.contextmanager
def merging(out: str) -> Iterator[Path | None]:
    """The folder of the journals, and no other process puts their parts together meanwhile; None: one already has."""
    folder = unfinished(out)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        if is_finished(out):
            shutil.rmtree(folder, ignore_errors=True)
            yield None
        else:
            yield folder


def finish(out: str, records: Iterable[dict[str, object]], facts: dict[str, Any]) -> None:
    """Write the output and its ``facts``, and delete the journals."""
    sidecar(out).unlink(missing_ok=True)  # of an output that was deleted; it would vouch for this one
    replace_text(Path(out), "".join(json.dumps(record) + "\n" for record in records))
    facts["digest"] = source_digest(out)  # of the very file that it vouches for
    replace_text(sidecar(out), json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(unfinished(out), ignore_errors=True)
