"""Check names of Hub repositories, and ask the Hub once before a library sends it dozens of requests."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, get_hf_file_metadata, get_session, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from drafters.common.wording import shortened

PATIENCE = 30.0  # seconds: the timeout of requests for which huggingface_hub sets none


def check_repo_ids(own: Any, *others: Any) -> None:
    """Raise ValueError for a name that cannot be a repository's, as ``user/name``; None among ``others`` is skipped.

    Args:
        own: of the repository that the user writes to. Others may have old names without a user, such as gpt2.
    """
    for name in (own, *(other for other in others if other is not None)):
        try:
            validate_repo_id(name)
            bare = "/" not in name and name is own
            if bare or not name.isascii() or name.startswith(("datasets/", "spaces/", "models/")):
                raise HFValidationError("give the user or organisation and the name, in ASCII")
        except HFValidationError as error:
            raise ValueError(f"{shortened(name)} is no Hub repository name like 'user/my-drafter': {error}") from None


def look_up(name: str | Path, revision: str | None = None, token: str | bool | None = None) -> None:
    """Ask the Hub once for the config.json of a repository, for at most HF_HUB_ETAG_TIMEOUT seconds (10).

    Other connection errors are ignored, because a library may find the repository in its cache; so are refusals (an
    expired token, too many requests) if the file is in the cache.

    Raises:
        ValueError: the Hub accepts the connection and does not answer, or ``name`` is no repository name.
        HfHubHTTPError: no such repository or revision, or no permission to read it, and it is not in the cache.
    """
    if constants.HF_HUB_OFFLINE or Path(name).exists():
        return
    validate_repo_id(str(name))
    cached = isinstance(try_to_load_from_cache(str(name), "config.json", revision=revision), str)
    url = f"{constants.ENDPOINT}/{name}/resolve/{quote(revision or 'main', safe='')}/config.json"
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    hooks = get_session().event_hooks["request"]
    if _with_timeout not in hooks:
        hooks.append(_with_timeout)
    try:
        get_hf_file_metadata(url, token=token, timeout=seconds)
    except (EntryNotFoundError, OfflineModeIsEnabled):
        pass
    except HfHubHTTPError as error:
        if error.response.status_code < 500 and not cached:
            raise
    except HTTPError as error:
        if "Timeout" in type(error).__name__:  # of the HTTP library that huggingface_hub uses
            raise ValueError(
                f"the Hub at {constants.ENDPOINT} does not answer when asked for {str(name)!r} (waited {seconds} s); "
                "try again later or, if it was downloaded before, set HF_HUB_OFFLINE=1 to work without the Hub"
            ) from None
    except OSError:
        pass


def _with_timeout(request: Any) -> None:
    """Set a timeout for requests without one: most of huggingface_hub's, except downloads."""
    given = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {name: PATIENCE if value is None else value for name, value in given.items()}
