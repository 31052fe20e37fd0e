"""Publish a drafter on the Hub: its files, its card, and retries over a bad connection.

The Hub is not sent files that it has, so a repeated command continues an interrupted upload.
"""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that huggingface_hub uses
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from drafters.common.paths import shown_names
from drafters.hub import checkpoint
from drafters.hub.client import check_repo_ids, look_up
from drafters.hub.model_card import CARD_FILE, Card, check_card, model_card, published, with_header

ATTEMPTS, WAIT = 4, 2.0  # seconds before the second attempt; doubled before each later one
TEMPORARY = (409, 412, 429)  # refusals that a later attempt may not meet, as any status from 500 on
GENERATE_FILES = {  # with these files transformers decodes with a drafter from its folder or repository
    "custom_generate/generate.py": Path(__file__).parents[1].joinpath("custom_generate.py").read_bytes(),
    "custom_generate/requirements.txt": b"learned-drafters>=0.1.0\n",
}
EVENTS = "tensorboard/events.out.tfevents.*"
Files = dict[str, Path | bytes]


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload drafter",
    card: Card | None = None,
    revision: str | None = None,
) -> str:
    """Publish the checkpoint in ``folder`` as the Hub model ``repo_id`` ("user/name"), with a model card.

    A ``README.md`` in the folder is published, with the license, base model and data sets of ``card`` in its header;
    otherwise a card is written from ``config.json`` and ``card``. In JSON files and in a written card, a local path is
    replaced by its last component, also a relative one. TensorBoard's events of the training are published, too.

    Args:
        private: create the repository private (None: the account's default; an existing repository is not changed).
        token: as huggingface_hub takes it (None: the one stored by ``hf auth login``).
        revision: the branch to write to, created if it does not exist; None is main.

    Returns:
        the address of the repository.

    Raises:
        ValueError: ``folder`` is no complete checkpoint, ``repo_id`` no repository name, the certificate or report is
            of another drafter or target or would not be on the card, or the Hub refuses or cannot be reached.
    """
    files = files_of(Path(folder), repo_id, card)
    try:
        for attempt in itertools.count(1):
            try:
                return _upload(files, repo_id, private, token, commit_message, revision)
            except (HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:
                wait, said = _pause(error, attempt), _reason(error)
                print(f"attempt {attempt} of {ATTEMPTS} failed ({said}); again in {wait:g} s", file=sys.stderr)
                time.sleep(wait)
        raise AssertionError
    except OfflineModeIsEnabled:
        raise ValueError(f"cannot publish {repo_id!r}: HF_HUB_OFFLINE is set; unset it to reach the Hub") from None
    except HfHubHTTPError as error:
        denied = error.response.status_code in (401, 403)
        fix = "Log in with `hf auth login`, or pass a token that may write there" if denied else "Publish again later"
        raise ValueError(f"the Hub refused to publish {repo_id!r}: {_reason(error)}. {fix}") from None
    except (OSError, HTTPError) as error:
        raise ValueError(
            f"cannot publish {repo_id!r}: the Hub cannot be reached ({_reason(error)}). Repeat the command later"
        ) from None


def files_of(folder: Path, repo_id: str, card: Card | None = None) -> Files:
    """What is published of ``folder``, by its name there, the weights last; errors are ``push_to_hub``'s."""
    text = card_of(folder, repo_id, card)
    config = checkpoint.read_config(folder)
    *others, weights = config.files
    others += [checkpoint.CONFIDENCE_FILE] if (folder / checkpoint.CONFIDENCE_FILE).is_file() else []
    files: Files = {CARD_FILE: text.encode(), **GENERATE_FILES}
    files |= {str(path.relative_to(folder)): path for path in sorted(folder.glob(EVENTS))}
    files |= {checkpoint.CONFIG_FILE: _shown(folder / checkpoint.CONFIG_FILE, published, config.hub_names)}
    files |= {name: _shown(folder / name, shown_names, config.hub_names) for name in others}
    return files | {weights: folder / weights}


def _shown(file: Path, show: Callable[[Any, list[str]], Any], known: list[str]) -> Path | bytes:
    """A JSON file; its content without local names, if ``show`` changes it."""
    found = json.loads(file.read_text(encoding="utf-8"))
    shown = show(found, known)
    return file if shown == found else (json.dumps(shown, indent=2, sort_keys=True) + "\n").encode()


def card_of(folder: Path, repo_id: str, card: Card | None = None) -> str:
    """The model card that is published with the checkpoint in ``folder``; errors are ``push_to_hub``'s."""
    card = card or Card()
    check_repo_ids(repo_id, card.base_model, *card.datasets)
    check_card(folder, card.certificate, card.report, card.figures)
    config, weights = checkpoint.load_checkpoint(folder)
    checkpoint.check_finite(weights, source=str(folder))
    if (written := folder / CARD_FILE).is_file():
        return with_header(written, card)
    known = checkpoint.parse_config(config, str(folder)).hub_names
    return model_card(config, repo_id, sum(value.numel() for value in weights.values()), card, known)


def _upload(
    files: Files, repo_id: str, private: bool | None, token: str | bool | None, message: str, revision: str | None
) -> str:
    """One commit to a repository and branch, created if they do not exist; returns the repository's address."""
    with contextlib.suppress(RepositoryNotFoundError):  # the repository may be missing, but the Hub has to answer
        look_up(repo_id, token=token)
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]  # new ones: they keep a state
    api.create_commit(repo.repo_id, operations, commit_message=message, revision=revision)
    return str(repo)


def _pause(error: Exception, attempt: int) -> float:
    """Seconds until the next attempt; raises ``error`` if that would fail for the same reason."""
    if "xet" in str(error).lower() and not constants.HF_HUB_DISABLE_XET:
        constants.HF_HUB_DISABLE_XET = True  # a server without Xet storage: upload the plain way
        return 0.0
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 500
    final = isinstance(error, HFValidationError | OfflineModeIsEnabled | RuntimeError)
    if final or attempt == ATTEMPTS or (status < 500 and status not in TEMPORARY):
        raise error
    return WAIT * 2.0 ** (attempt - 1)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
