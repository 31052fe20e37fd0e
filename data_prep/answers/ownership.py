"""Whether a data file's answers are the target's own, and the date in their prompts."""

import contextlib
import datetime
import json

from data_prep.common.outputs import sidecar, unfinished
from data_prep.store.manifest import Answers, StoreManifest

RUN_FILE = "run.json"  # in the folder of journals: the settings on which the texts depend
DATE = "template_date"


def begun_on(out: str) -> str | None:
    """The date (YYYY-MM-DD) in the prompts of ``out``, finished or not; None if they have none."""
    for file, keys in ((sidecar(out), ("identity", DATE)), (unfinished(out) / RUN_FILE, (DATE,))):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found = json.loads(file.read_text())
            for key in keys:
                found = found[key]
            return str(datetime.date.fromisoformat(found))
    return None


def whose(header: StoreManifest) -> Answers:
    """Whether the sidecar of a store's source shows that the store's target wrote the answers with its template.

    Answers of an endpoint are ``given``, because it does not say which weights it has.
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
