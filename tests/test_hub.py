"""Publishing and loading with huggingface_hub's own client against a Hub on loopback (hub_server.py)."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rigged
import tiny
import torch
import yaml
from chat_formats import CHATML_SPECIALS, byte_level
from hub_server import TOKEN, HubServer, Repository
from huggingface_hub import constants
from torch import nn

import drafters.hub.__main__
from drafters import TargetModel, generate, load_drafter
from drafters.hub.checkpoint import load_checkpoint, save_checkpoint
from drafters.hub.model_card import Card
from drafters.hub.publishing import GENERATE_FILES, push_to_hub
from drafters.model.head_adapter import fingerprint, load_head
from train.core.config import Lora
from train.core.lora import save_adapter, with_lora

CONFIG = {
    "drafter_type": "eagle",
    "format_version": 1,
    "drafter": {"bias": False},
    "target": {
        "name": "someone/a-target",
        "revision": "0123abc",
        "fingerprint": "f00d",
        "hidden_size": 8,
        "vocab_size": 97,
        "num_hidden_layers": 4,
    },
    "training": {
        "steps": 1200,
        "tokens": 2_000_000,
        "data": "dialogues | train split",
        "versions": {"torch": "2.13.0"},
    },
}
Login = Callable[..., None]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def login(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    """``login(token, home)``: from now on this process is that user's machine, with a cache of its own, and online.

    The library reads these settings from the environment when it is imported; one test below does so in a process of
    its own, the others set them where the library keeps them.
    """

    def switch(token: str | None = TOKEN, home: str = "home") -> None:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        # What transformers keeps of an earlier test names that test's server, which answers its open connections.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.setattr("drafters.hub.publishing.WAIT", 0.0)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / home / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)

    switch()
    return switch


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A trained drafter's folder, with things in it that must stay at home."""
    folder = tmp_path / "run" / "drafter"
    save_checkpoint(folder, nn.Linear(16, 8, bias=False), CONFIG)
    (folder / "optimizer.bin").write_bytes(b"resumable state")
    return folder


def files(hub: HubServer, repo: str) -> dict[str, bytes]:
    return hub.repositories[repo].commits[hub.repositories[repo].head]


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> str:
    """The message of the ValueError that the call raises, which must be one line."""
    with pytest.raises(ValueError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_pushed_is_what_is_loaded(hub: HubServer, login: Login, saved: Path) -> None:
    """Catches an upload that leaves a file out, takes the whole run folder along, or changes the weights on the way."""
    assert push_to_hub(saved, "user/my-drafter") == f"{hub.endpoint}/user/my-drafter"
    published = files(hub, "user/my-drafter")
    assert sorted(published) == ["README.md", "config.json", *GENERATE_FILES, "model.safetensors"]
    assert published["model.safetensors"] == (saved / "model.safetensors").read_bytes()

    login(token=None, home="elsewhere")
    config, state = load_checkpoint("user/my-drafter")
    expected_config, expected_state = load_checkpoint(saved)
    assert config == expected_config
    assert state.keys() == expected_state.keys()
    assert state["weight"].dtype == torch.bfloat16
    assert torch.equal(state["weight"], expected_state["weight"])


def test_an_adapter_is_pushed_and_loaded(hub: HubServer, login: Login, tmp_path: Path) -> None:
    """Catches an adapter pushed without one of its files, or with the run's; one merged with another scale."""
    base = nn.Sequential(nn.Linear(16, 8, bias=False))
    save_checkpoint(tmp_path / "base", base, CONFIG, dtype=None)
    whole, lora = base[0].weight.detach().clone(), Lora(r=2, alpha=6)
    adapter = with_lora(base, lora, "user/base")
    matrices: dict[str, torch.Tensor] = {}
    for name, weights in base.named_parameters():
        if weights.requires_grad:
            matrices["A" if "lora_A" in name else "B"] = nn.init.normal_(weights.data)
    named = {"name": "user/base", "fingerprint": fingerprint(load_checkpoint(tmp_path / "base")[1])}
    folder = tmp_path / "adapter"
    save_adapter(adapter, CONFIG | {"drafter": {"depth": 3}, "base": named}, folder)
    (folder / "optimizer.bin").write_bytes(b"resumable state")
    push_to_hub(tmp_path / "base", "user/base")
    push_to_hub(folder, "user/adapter")
    published = files(hub, "user/adapter")
    assert sorted(published) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        *GENERATE_FILES,
    ]
    assert b"load_drafter('user/base', target, adapter='user/adapter')" in published["README.md"]

    login(token=None, home="elsewhere")
    assert load_checkpoint("user/adapter")[0]["base"] == named
    for given in ({"path": "user/adapter"}, {"path": "user/base", "adapter": "user/adapter"}):
        config, weights = load_head(**given)
        torch.testing.assert_close(weights["0.weight"], whole + 3 * matrices["B"] @ matrices["A"])
        assert config["drafter"] == CONFIG["drafter"] | {"depth": 3}  # type: ignore[operator]


def test_model_card(hub: HubServer, login: Login, saved: Path) -> None:
    """Catches a card whose front matter the Hub cannot parse, a table broken by a bar, or unmeasured figures."""
    push_to_hub(saved, "user/plain")
    plain = files(hub, "user/plain")["README.md"].decode()
    front = yaml.safe_load(plain.split("---\n")[1])
    assert front["base_model"] == "someone/a-target"
    assert front["tags"] == ["speculative-decoding", "eagle", "custom_generate"]
    assert front["library_name"] == "drafters"
    assert "license" not in front
    assert "| data | dialogues \\| train split |" in plain
    assert "| versions.torch | 2.13.0 |" in plain
    assert "load_drafter('user/plain', target)" in plain
    assert "Measured" not in plain

    push_to_hub(saved, "user/full", card=Card(license="mit", figures={"tau, greedy, held-out": 2.91}))
    full = files(hub, "user/full")["README.md"].decode()
    assert yaml.safe_load(full.split("---\n")[1])["license"] == "mit"
    assert "| tau, greedy, held-out | 2.91 |" in full


def evidence(fingerprint: str = "f00d", method: str = "eagle") -> dict[str, dict[str, Any]]:
    """A certificate and a report, as far as a card reads them."""
    facts: dict[str, Any] = {"target": {"name": "t", "fingerprint": fingerprint, "parameters": 1}, "dtype": "bfloat16"}
    facts |= {"gpu": None, "cpu": "A CPU", "cpu_cores": 2}
    facts |= {
        "commit": None,
        "dirty": False,
        "date": "2026-01-01T00",
        "argv": ["python", "-m", "x", "a b"],
        "threads": 2,
    }
    facts |= {"prompt_set": {"prompts": 3, "file": "/home/me/q.jsonl", "sha256": "p"}}
    facts |= {"limits": {"max_new_tokens": 9, "top_k": 0, "top_p": 1.0, "rounds": 1, "seed": 0}}
    tests = [{"distance": 0.034}, {"distance": 0.5}]
    sampled = {"tokens": 16000, "p_value": 0.5, "tests": tests, "power": 0.99}
    greedy = [{"dtype": "float32", "tokens": 4096, "texts": 32, "divergences": [{}, {}], "unexplained": 1}]
    certificate = {"verdict": "not lossless", "reasons": ["a reason"], "greedy": greedy, "sampled": sampled}
    certificate |= {"drafter": {"drafter": method, "checkpoint": "/home/me/x", "tree": "chain"}, "environment": facts}
    same = {"temperature": 0.0, "tokens_per_second": 5.0, "tau": 2.0, "speedup": 1.5, "speedup_ci": [1.25, 1.75]}
    names = {"autoregressive": True, "E|1": True, "E, lossy": False, "other": True}
    rows = [same | {"drafter": name, "lossless": lossless} for name, lossless in names.items()]
    entries = [{"drafter": "autoregressive", "label": None}, {"drafter": method, "label": "E|1"}]
    entries += [{"drafter": method, "label": "E, lossy"}, {"drafter": "kangaroo", "label": "other"}]
    return {
        "certificate": certificate,
        "report": {
            "environment": facts | {"config": {"drafters": entries}},
            "baseline": {"temperatures": [{"temperature": 0.0}]},
            "rows": rows,
        },
    }


def test_dry_run_and_revision(hub: HubServer, login: Login, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that writes, a file that it does not list, a branch that is dropped on the way, and events of
    the training left at home."""
    (saved / "tensorboard").mkdir()
    (saved / "tensorboard" / "events.out.tfevents.1.x").write_bytes(b"events")
    arguments = ["push", str(saved), "user/d", "--revision", "v2", "--dataset", "someone/chats"]
    arguments += ["--base-model", "someone/other"]
    drafters.hub.__main__.main([*arguments, "--dry-run"])
    listed = capsys.readouterr().out
    assert not [line for line in hub.requests if not line.startswith(("HEAD", "GET"))]
    drafters.hub.__main__.main(arguments)
    repository = hub.repositories["user/d"]
    tree = repository.commits[repository.branches["v2"]]
    assert tree["tensorboard/events.out.tfevents.1.x"] == b"events" and repository.commits[repository.head] == {}
    assert sorted(line.split()[0] for line in listed.splitlines()[:-1]) == sorted(tree)
    assert f"{len(tree['model.safetensors'])} bytes\n" in listed and "user/d, branch v2" in listed
    front = yaml.safe_load(tree["README.md"].decode().split("---\n")[1])
    assert front["datasets"] == ["someone/chats"] and front["base_model"] == "someone/other"
    assert load_checkpoint("user/d", revision="v2")[0]["drafter_type"] == "eagle"


def test_a_push_that_was_broken_off_goes_on(hub: HubServer, login: Login, saved: Path) -> None:
    """Catches weights that are sent again though they lie there, patience with a Hub that says no, and none with one
    that is overloaded."""
    hub.faults = [("commit/main", 502)] * 4
    assert "Publish again later" in refusal(push_to_hub, saved, "user/d")
    assert not hub.faults and len([line for line in hub.requests if line.startswith("PUT")]) == 1
    hub.requests.clear()
    push_to_hub(saved, "user/d")
    assert not [line for line in hub.requests if line.startswith("PUT")]
    assert files(hub, "user/d")["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    for status in (409, 412, 429):
        hub.faults = [("commit/main", status)]
        push_to_hub(saved, f"user/after-{status}")
        assert not hub.faults and "model.safetensors" in files(hub, f"user/after-{status}")
    for status in (401, 403):
        hub.faults, hub.requests = [("repos/create", status)] * 2, []
        assert "hf auth login" in refusal(push_to_hub, saved, "user/new")
        assert len(hub.faults) == 1, "asked again"


def test_what_is_pulled_drafts_the_same(
    hub: HubServer, login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights that change on the way, options that are lost, and snippets of the card that do not run: ours,
    and the one for transformers, whose generate.py comes from the Hub."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("drafters.common.precision.cpu_has_bf16", lambda: False)  # both in the files' float32
    tiny.build("llama", vocab_size=300).save_pretrained(tmp_path / "target")
    byte_level(None, CHATML_SPECIALS, None, "<|im_end|>").save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    target = TargetModel.from_pretrained("target", dtype="float32")
    rigged.eagle(target, None, "static").save_pretrained("mine")
    push_to_hub("mine", "user/mine")
    both = load_drafter("mine", target, tree="static"), load_drafter("user/mine", target, tree="static")
    texts = [generate(target, each, [[5, 6, 7]], max_new_tokens=24, temperature=1.0) for each in both]
    assert texts[0].trace.steps == texts[1].trace.steps and torch.equal(texts[0].tokens, texts[1].tokens)
    card = files(hub, "user/mine")["README.md"].decode()
    ours, theirs = re.findall(r"```python\n(.*?)```", card, re.S)
    made: list[dict[str, Any]] = [{}, {}]
    exec(ours, made[0])
    exec(theirs, made[1])
    assert made[0]["result"].tokens[0].tolist() == made[1]["output"][0, made[0]["input_ids"].shape[1] :].tolist()


def test_nothing_that_is_sent_holds_a_path_of_this_machine(
    hub: HubServer, login: Login, saved: Path, tmp_path: Path
) -> None:
    """Catches the author's folders in config.json, and in the card's tables and commands."""
    target = {**CONFIG["target"], "name": f"{tmp_path}/my models/target"}  # type: ignore[dict-item]
    save_checkpoint(
        saved, nn.Linear(16, 8, bias=False), CONFIG | {"target": target, "training": {"data": f"{tmp_path}/x"}}
    )
    found = evidence()
    for each in found.values():
        argv = ["python", "-m", "x", f"out={tmp_path}/my runs/x", "--config", f"{tmp_path}/y.yaml"]
        each["environment"] |= {"argv": argv}
    found["certificate"]["drafter"] |= {"checkpoint": str(saved), "pool": f"{tmp_path}/phrases.safetensors"}
    push_to_hub(saved, "user/d", card=Card(**found, figures={f"tau on {tmp_path}/z": 2.0}))
    sent = files(hub, "user/d")
    for name, content in sent.items():
        assert str(tmp_path).encode() not in content, name
    assert json.loads(sent["config.json"])["target"] == target | {"name": "target"}
    assert "python -m x out=x --config y.yaml" in sent["README.md"].decode()


def test_private_repository(hub: HubServer, login: Login, saved: Path) -> None:
    """Catches private=True that is dropped on the way: the drafter would be public; and a copy in the cache that is
    refused because the token is gone."""
    push_to_hub(saved, "user/secret", private=True)
    assert hub.repositories["user/secret"].private
    assert load_checkpoint("user/secret")[0]["drafter_type"] == "eagle"
    login(token=None)
    assert load_checkpoint("user/secret")[0]["drafter_type"] == "eagle"
    login(token=None, home="elsewhere")
    refused = refusal(load_checkpoint, "user/secret")
    assert refused.startswith("no drafter 'user/secret'") and "hf auth login" in refused
    assert load_checkpoint("user/secret", token=TOKEN)[0]["drafter_type"] == "eagle"


def test_errors_are_one_clear_line(
    hub: HubServer, login: Login, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback of HTTP errors where one sentence would do, and an upload that cannot be loaded."""
    monkeypatch.chdir(tmp_path)
    missing = refusal(load_checkpoint, "user/none")
    assert missing.startswith(f"no drafter 'user/none': there is no folder {tmp_path / 'user' / 'none'}")
    assert "no such Hub repository" in missing
    assert "no Hub repository name" in refusal(push_to_hub, saved, "user/a/b")
    (saved / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "holds no model.safetensors" in refusal(push_to_hub, saved, "user/d")
    (tmp_path / "model.safetensors").rename(saved / "model.safetensors")
    login(token="hf_somebody_else")
    assert "hf auth login" in refusal(push_to_hub, saved, "user/d")
    login()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refusal(load_checkpoint, "user/none")
    assert "cannot be reached" in refusal(push_to_hub, saved, "user/d")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot be reached" in refusal(load_checkpoint, "user/none")
    assert "HF_HUB_OFFLINE" in refusal(push_to_hub, saved, "user/d")
    assert not hub.repositories


def test_pickled_repository_is_refused_unread(hub: HubServer, login: Login) -> None:
    """Catches a fallback to pytorch_model.bin, which can run code: it must not even be downloaded."""
    hub.repositories["user/old"] = repository = Repository(private=False)
    repository.commit({"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"\x80\x04."}, "old format")
    message = refusal(load_checkpoint, "user/old")
    assert "holds pytorch_model.bin but no model.safetensors" in message
    assert "weights_only=True" in message
    assert not [line for line in hub.requests if line.endswith("/pytorch_model.bin")]
