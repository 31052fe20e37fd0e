"""A drafter's way to the Hub: which files go, what its card says, and what a bad line does to the upload.

What lies there already is not sent again, so an upload that was broken off goes on when it is begun anew.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of whichever HTTP library huggingface_hub uses
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from drafters.common.paths import names_only
from drafters.hub.card_evidence import CARD_FILE, check_card
from drafters.hub.checkpoint import CONFIG_FILE, check_finite, load_checkpoint, one_line, read_config
from drafters.hub.client import check_repo_ids, look_up
from drafters.hub.model_card import Card, model_card, with_header

ATTEMPTS, WAIT = 4, 2.0  # seconds before the second, twice as many before each that follows
PASSING = (409, 412, 429)  # refusals that may be none the next time; and all from 500 on
GENERATE_FILES = {  # by which transformers decodes with a drafter from its folder or repository
    "custom_generate/generate.py": Path(__file__).parents[1].joinpath("custom_generate.py").read_bytes(),
    "custom_generate/requirements.txt": b"drafters>=0.1.0\n",
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

    A ``README.md`` already in the folder is published, with the license, base model and data sets of ``card`` in its
    header; otherwise a card is written from ``config.json`` and ``card``. In JSON files and in a written card, a local
    path is replaced by its last component. TensorBoard's events of the training are published, too.

    Args:
        private: create the repository private (None: as the account's default; an existing repository keeps its own).
        token: as huggingface_hub takes it (None: the one stored by ``hf auth login``).
        revision: the branch to write to, made if it is not there; None is main.

    Returns:
        the address of the repository.

    Raises:
        ValueError: ``folder`` is no complete checkpoint, ``repo_id`` no repository name, what was measured is of
            another drafter or target or would not be on the card, or the Hub refuses, or cannot be reached for a while.
    """
    files = files_of(Path(folder), repo_id, card)
    try:
        return _patiently(lambda: _upload(files, repo_id, private, token, commit_message, revision))
    except OfflineModeIsEnabled:
        raise ValueError(f"cannot publish {repo_id!r}: HF_HUB_OFFLINE is set; unset it to reach the Hub") from None
    except HfHubHTTPError as error:
        denied = error.response.status_code in (401, 403)
        fix = "Log in with `hf auth login`, or pass a token that may write there" if denied else "Publish again later"
        raise ValueError(f"the Hub refused to publish {repo_id!r}: {one_line(error)}. {fix}") from None
    except (OSError, HTTPError) as error:
        raise ValueError(
            f"cannot publish {repo_id!r}: the Hub cannot be reached ({one_line(error)}). The same command goes on later"
        ) from None


def files_of(folder: Path, repo_id: str, card: Card | None = None) -> Files:
    """What is published of ``folder``, by its name there, the weights last; errors are ``push_to_hub``'s."""
    text = card_of(folder, repo_id, card)
    *others, weights = (CONFIG_FILE, *read_config(folder).files)
    files: Files = {CARD_FILE: text.encode(), **GENERATE_FILES}
    for path in sorted(folder.glob(EVENTS)):
        files[str(path.relative_to(folder))] = path
    return files | {name: _without_paths(folder / name) for name in others} | {weights: folder / weights}


def _without_paths(file: Path) -> Path | bytes:
    """A JSON file, or its content where that has paths of this machine."""
    found = json.loads(file.read_text(encoding="utf-8"))
    shown = names_only(found)
    return file if shown == found else (json.dumps(shown, indent=2, sort_keys=True) + "\n").encode()


def card_of(folder: Path, repo_id: str, card: Card | None = None) -> str:
    """The model card that is published with the checkpoint in ``folder``; errors are ``push_to_hub``'s."""
    card = card or Card()
    check_repo_ids(repo_id, card.base_model, *card.datasets)
    check_card(folder, card.certificate, card.report, card.figures)
    config, weights = load_checkpoint(folder)
    check_finite(weights, source=str(folder))
    if (written := folder / CARD_FILE).is_file():
        return with_header(written, card)
    return model_card(config, repo_id, sum(value.numel() for value in weights.values()), card)


def add_custom_generate(folder: Path) -> None:
    """Write what makes ``model.generate(custom_generate=folder)`` decode with the drafter there."""
    for name, content in GENERATE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _upload(
    files: Files, repo_id: str, private: bool | None, token: str | bool | None, message: str, revision: str | None
) -> str:
    """One commit to a repository and branch that need not exist yet; returns the repository's address.

    What is asked for is new at every attempt: the Hub then says which files it has.
    """
    with contextlib.suppress(RepositoryNotFoundError):  # it need not be there, but the Hub has to answer
        look_up(repo_id, token=token)
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo.repo_id, branch=revision, exist_ok=True)

    def commit(*open_files: str) -> None:
        with contextlib.ExitStack() as stack:
            operations = [
                CommitOperationAdd(name, stack.enter_context(Path(content).open("rb")))  # type: ignore[arg-type]
                if name in open_files
                else CommitOperationAdd(name, content)
                for name, content in files.items()
            ]
            api.create_commit(repo.repo_id, operations, commit_message=message, revision=revision)

    try:
        commit()
    except Exception as error:
        if "xet" not in str(error).lower():
            raise
        # A server without Xet storage. A file that is handed over open goes the plain way.
        commit(*(name for name, content in files.items() if isinstance(content, Path)))
    return str(repo)


def _patiently(upload: Callable[[], str]) -> str:
    """``upload`` again where it failed for a reason that passes: a line that drops, a Hub that is overloaded."""
    for attempt in range(1, ATTEMPTS):
        try:
            return upload()
        except (HFValidationError, OfflineModeIsEnabled):
            raise
        except (HTTPError, ConnectionError, TimeoutError) as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else 500
            if status < 500 and status not in PASSING:
                raise
            wait = WAIT * 2 ** (attempt - 1)
            print(f"attempt {attempt} of {ATTEMPTS} failed ({one_line(error)}); again in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
    return upload()
