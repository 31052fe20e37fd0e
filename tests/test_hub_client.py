"""What is asked of the Hub before weights are read, against a Hub on loopback (hub_server.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from hub_server import HubServer, Repository
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from test_hub import Login, hub, login  # noqa: F401

from drafters import load_frozen_ends
from drafters.common.fingerprints import FORMER, same_weights
from drafters.hub import client
from drafters.hub.client import PATIENCE, _with_timeout, look_up


def test_whether_the_cache_counts_where_the_hub_refuses(
    hub: HubServer,  # noqa: F811
    login: Login,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a refused revision taken from another one in the cache, a name that is asked for in vain, an overloaded
    Hub taken for a missing repository, and requests for folders or offline."""
    hub.repositories["user/d"] = repository = Repository(private=False)
    first = repository.commit({"config.json": b"{}"}, "first")
    repository.branches["v2"] = first
    hf_hub_download("user/d", "config.json")

    def asked(status: int | None, *given: Any) -> list[str]:
        hub.requests.clear()
        hub.faults = [("config.json", status)] if status else []
        look_up(*given)
        return hub.requests

    for status in (401, 403, 404, 429, 500, 503):
        assert asked(status, "user/d") == ["HEAD /user/d/resolve/main/config.json"]
    for status in (401, 403, 429):
        with pytest.raises(HfHubHTTPError):
            asked(status, "user/d", "v2")
    assert len(asked(503, "user/d", "v2")) == 1
    with pytest.raises(RepositoryNotFoundError):
        asked(None, "user/none")
    with pytest.raises(RevisionNotFoundError):
        asked(None, "user/d", "none")
    (tmp_path / "user" / "d").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert asked(401, "user/d") == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert asked(401, "user/none") == []


def test_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a revision like refs/pr/1 that becomes a path, a token that is not sent, a Hub that is waited for in
    vain, and one that is merely not reached: the cache may have the model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked: list[Any] = []
    timeout = type("ReadTimeout", (HTTPError,), {})  # of the HTTP library that huggingface_hub uses
    errors = [timeout("late"), HTTPError("none"), OSError("none")]

    def fail(url: str, **options: Any) -> None:
        asked.append((url, options["token"], options["timeout"]))
        raise errors[len(asked) - 1]

    monkeypatch.setattr(client, "get_hf_file_metadata", fail)
    with pytest.raises(ValueError, match="does not answer when asked for 'user/d'"):
        look_up("user/d", "refs/pr/1", "hf_token")
    look_up("user/d")
    look_up("user/d")
    url = f"{constants.ENDPOINT}/user/d/resolve/refs%2Fpr%2F1/config.json"
    assert asked[0] == (url, "hf_token", constants.HF_HUB_ETAG_TIMEOUT) and len(asked) == 3
    with pytest.raises(ValueError, match="Repo id"):
        look_up("user/d/e")


def test_requests_have_a_timeout() -> None:
    """Catches a request that waits for ever, and a download's own timeout replaced."""
    request = SimpleNamespace(extensions={"timeout": {"connect": None, "read": 7.0, "write": None}})
    _with_timeout(request)
    assert request.extensions["timeout"] == {"connect": PATIENCE, "read": 7.0, "write": PATIENCE}


def test_a_target_that_is_not_downloaded(
    hub: HubServer,  # noqa: F811
    login: Login,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a dry run that downloads a whole target, a store whose fingerprint covers a part of it, and a request to
    the Hub for each file that is there."""
    tiny.build("llama").save_pretrained(tmp_path / "target", max_shard_size="60KB")
    found = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    hub.repositories["user/target"] = repository = Repository(private=False)
    repository.commit(found, "a target")
    shards = [name for name in found if name.endswith(".safetensors")]
    known = load_frozen_ends(str(tmp_path / "target")).fingerprint

    def here() -> int:
        return len(list((tmp_path / "home").rglob("snapshots/*/*.safetensors")))

    former = load_frozen_ends("user/target", device="meta").fingerprint
    assert former == known[:FORMER] and same_weights(known, former, "a store")
    assert "not downloaded" in caplog.messages[-1] and here() < len(shards)
    assert load_frozen_ends("user/target", device="meta", download=True).fingerprint == known
    assert here() == len(shards)
    hub.requests.clear()
    assert load_frozen_ends("user/target", device="meta").fingerprint == known
    asked = {line.removeprefix("HEAD /user/target/resolve/main/") for line in hub.requests}
    assert len(asked & set(shards)) <= 2 and not [line for line in hub.requests if "GET" in line and "model-" in line]
