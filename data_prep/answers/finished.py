"""The finished output of a run that several processes shared, its sidecar ``<out>.json``, and the merge of parts."""

import contextlib
import datetime
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.answers.journal import RUN_FILE, WEIGHTS, AnsweredBatch, check_identity, read_journals
from data_prep.common.disk import is_finished, sidecar, unfinished
from data_prep.dialogues.encoding import template_hash, tokenizer_hash
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import source_digest
from data_prep.store.lock import folder_lock
from data_prep.store.manifest import Answers, StoreManifest
from drafters.cli.program import command
from drafters.common.files import replace_text
from drafters.common.fingerprints import same_weights
from drafters.common.provenance import git_commit, library_versions
from drafters.model.ends import load_frozen_ends

DATE = "template_date"
# Identity keys that older outputs lack. In a finished output, a missing one counts as equal to the current value.
LATER = {"unanswered", "reader", DATE}


def target_identity(target: str, revision: str | None, chat: ChatTokenizer) -> dict[str, Any]:
    """Facts of the target, apart from its name, on which its texts depend; a target on the Hub is downloaded."""
    ends = load_frozen_ends(target, device="meta", revision=revision, download=True)
    return {
        WEIGHTS: ends.fingerprint,
        "tokenizer_hash": tokenizer_hash(chat.tokenizer),
        "chat_template": template_hash(chat.template),
        **({DATE: chat.date} if chat.date else {}),
    }


def report_finished(out: str, identity: dict[str, Any], describe: Callable[[dict[str, Any]], str]) -> bool:
    """Whether the output is finished; if so, print a line. ValueError if it has other settings or was changed since."""
    if not is_finished(out):
        return False
    file = sidecar(out)
    try:
        facts = json.loads(file.read_text())
        before = {key: identity[key] for key in LATER & identity.keys()} | facts["identity"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{file} was not written by this program; give another `out`, or move it") from None
    check_identity(Path(out), before, identity)
    digest = source_digest(out)
    if facts.get("digest", digest) != digest:
        raise ValueError(
            f"{out} was changed or replaced after it was written: its digest is {digest}, {file} has "
            f"{facts['digest']}; put the first file back, or delete both to have it written again"
        )
    print(f"{out} is finished already: {describe(facts)}")
    return True


def answers_of(batches: Iterable[AnsweredBatch]) -> list[str]:
    """The answers, or questions, in batches of journals."""
    return [turn.answer for batch in batches for turn in batch.turns if turn.answer is not None]


def resume_notice(out: str, what: str) -> str:
    """Last line of an interrupted run: the number of answers or questions kept, and the command that continues."""
    if is_finished(out):
        return f"{out} is whole"
    if not (count := len(answers_of(read_journals(unfinished(out))))):
        return f"no {what} was written yet; to start again: {command()}"
    return f"{count:,} {what}s are kept in {unfinished(out)}; to go on: {command()}"


@contextlib.contextmanager
def merging(out: str) -> Iterator[Path | None]:
    """Hold the lock for merging and give the folder of the journals; None if another process has merged them."""
    folder = unfinished(out)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        if is_finished(out):
            shutil.rmtree(folder, ignore_errors=True)
            yield None
        else:
            yield folder


def costs(batches: Sequence[AnsweredBatch]) -> dict[str, Any]:
    """Tokens, seconds of all processes together, and tokens/s of one process; commit and versions."""
    tokens = sum(turn.tokens for batch in batches for turn in batch.turns)
    seconds = sum(batch.seconds for batch in batches)
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "commit": git_commit(Path(__file__).parent),
        "versions": library_versions("torch", "transformers", "tokenizers"),
    }


def finish(out: str, records: Iterable[dict[str, object]], facts: dict[str, Any]) -> None:
    """Write the output and its ``facts``, and delete the journals."""
    sidecar(out).unlink(missing_ok=True)  # it may describe an older output, which was deleted
    replace_text(Path(out), "".join(json.dumps(record) + "\n" for record in records))
    facts["digest"] = source_digest(out)  # so that a replaced output is noticed
    replace_text(sidecar(out), json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(unfinished(out), ignore_errors=True)


def begun_on(out: str) -> str | None:
    """The date (YYYY-MM-DD) in the prompts of ``out``, finished or not; None if they have none."""
    for file, keys in ((sidecar(out), ("identity", DATE)), (unfinished(out) / RUN_FILE, (DATE,))):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            value = json.loads(file.read_text())
            for key in keys:
                value = value[key]
            return str(datetime.date.fromisoformat(value))
    return None


def whose(header: StoreManifest) -> Answers:
    """Whether the sidecar of a store's source shows that the store's target wrote the answers with its template.

    Answers of an endpoint are ``given``, because it does not say which weights it has.
    """
    try:
        facts = json.loads(sidecar(header.source).read_text())
        identity = facts["identity"]
        made_with = {
            "tokenizer_hash": header.tokenizer_hash,
            "chat_template": header.template_hash,
        }
        same = all(identity[key] == value for key, value in made_with.items())
        same = same and same_weights(identity[WEIGHTS], header.target_fingerprint, header.source)
        if not same or facts.get("digest", header.source_digest) != header.source_digest:  # or replaced since
            return "given"
        return "sampled" if identity["temperature"] > 0 else "own"
    except (OSError, ValueError, LookupError, TypeError):
        return "given"
