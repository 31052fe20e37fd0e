"""What is a Hub repository is recorded when it is loaded; local names are published by their last part only."""

import json
from pathlib import Path
from typing import Any

import pytest
import rigged
import tiny
import tiny_run
import yaml
from chat_formats import CHATML, CHATML_SPECIALS, byte_level
from hub_server import HubServer, Repository
from test_hub import Login, evidence, hub, login  # noqa: F401
from torch import nn

from data_prep.configs import FeaturesConfig
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.extraction.headers import make_headers
from drafters import TargetModel
from drafters.hub.checkpoint import load_checkpoint
from drafters.hub.model_card import Card
from drafters.hub.publishing import files_of
from drafters.layouts.convert import convert
from drafters.layouts.export import export
from train.core.config import Lora
from train.core.lora import save_adapter, with_lora

TARGET, DATA = "models/my-llama", "data/sharegpt.jsonl"


def sent(folder: Path, **card: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """config.json, the card's header and all text that is published of a drafter."""
    files = files_of(folder, "user/d", Card(**card))
    texts = {name: one if isinstance(one, bytes) else one.read_bytes() for name, one in files.items()}
    readme = texts["README.md"].decode()
    text = "\n".join(value.decode() for name, value in texts.items() if name.endswith((".md", ".json")))
    return json.loads(texts["config.json"]), yaml.safe_load(readme.split("---\n")[1]), text


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with relative names, seen from another folder: none of them exists there."""
    monkeypatch.chdir(tmp_path)
    target = tiny_run.save_target(Path(TARGET))
    target.name = TARGET
    features = tiny_run.write_stores(Path("features"), target)
    for manifest in features.glob("*/manifest.json"):
        found = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(found | {"source": DATA, "hub_names": []}))
    tiny_run.train_here("eagle", tiny_run.settings(TARGET, features, Path("runs/head"), steps=1))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path / "runs" / "head"


def test_a_run_with_relative_names(elsewhere: Path) -> None:
    """Catches a folder and a file that the card's header gives as a model and a data set of the Hub, and paths of the
    first machine in config.json."""
    config, header, text = sent(elsewhere)
    assert config["target"]["name"] == "my-llama" and config["training"]["data"] == "sharegpt.jsonl"
    assert config["training"]["hub_names"] == []
    assert config["training"]["config"]["target"] == "my-llama" and config["training"]["config"]["out"] == "head"
    assert not {"base_model", "base_model_relation", "datasets"} & header.keys()
    assert "models/" not in text and "data/" not in text and "runs/" not in text
    assert "trained for the target `my-llama`" in text


def test_a_record_of_the_hub(elsewhere: Path) -> None:
    """Catches a Hub model or data set that the header leaves out, also where a folder has its name, and a data set's
    configuration in the header."""
    file = elsewhere / "config.json"
    config = json.loads(file.read_text())
    config["target"]["name"], config["training"]["data"] = "someone/llama", "someone/chats:en:train"
    config["training"]["hub_names"] = ["someone/chats:en:train", "someone/llama"]
    config["training"]["config"] |= {"target": "someone/llama", "init_from": "other/head"}
    file.write_text(json.dumps(config))
    Path("someone/llama").mkdir(parents=True)
    config, header, _ = sent(elsewhere)
    assert config["target"]["name"] == config["training"]["config"]["target"] == "someone/llama"
    assert config["training"]["data"] == "someone/chats:en:train"
    assert config["training"]["config"]["init_from"] == "head"  # not recorded
    assert header["base_model"] == "someone/llama" and header["datasets"] == ["someone/chats"]


def test_an_adapter_of_a_local_drafter(elsewhere: Path) -> None:
    """Catches the base's folder in peft's file, and a base on the Hub that loses its owner."""
    named = {"name": "runs/base", "fingerprint": "f00d"}
    for name, known, shown in (("runs/base", [], "base"), ("someone/base", ["someone/base"], "someone/base")):
        adapter = with_lora(nn.Sequential(nn.Linear(16, 8)), Lora(r=2), name)
        config = load_checkpoint(elsewhere)[0] | {"base": named | {"name": name}}
        save_adapter(adapter, config | {"training": {"hub_names": known}}, Path("adapter"))
        files = files_of(Path("adapter"), "user/d")
        peft, ours = (files[file] for file in ("adapter_config.json", "config.json"))
        read = [json.loads(one if isinstance(one, bytes) else one.read_bytes()) for one in (peft, ours)]
        assert read[0]["base_model_name_or_path"] == read[1]["base"]["name"] == shown
        assert f"load_drafter('{shown}', target, adapter='user/d')" in str(files["README.md"], "utf-8")


def test_what_is_loaded_is_recorded(
    hub: HubServer,  # noqa: F811
    login: Login,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a target, a head, a run or a store that forgets whether it came from the Hub or a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.run.inputs.check_tokenizer", lambda *given: None)  # the server lists no templates
    tiny.build("llama", vocab_size=300, head_dim=12).save_pretrained("user/local")
    byte_level(CHATML, CHATML_SPECIALS, None, "<|im_end|>").save_pretrained("user/local")
    hub.repositories["user/target"] = repository = Repository(private=False)
    repository.commit({path.name: path.read_bytes() for path in Path("user/local").iterdir()}, "a target")
    for name, on_hub in (("user/target", True), ("user/local", False)):
        target = TargetModel.from_pretrained(name, "float32", "cpu")
        assert target.on_hub == on_hub
        known = [name] if on_hub else []
        rigged.eagle(target, None, "chain").save_pretrained(f"{name}-head")
        config = load_checkpoint(f"{name}-head")[0]
        assert config["training"]["hub_names"] == known
        export(f"{name}-head", "vllm", Path(f"out/{target.name}-vllm"))
        made = json.loads(Path(f"out/{name}-vllm/config.json").read_text())["made_from"]
        assert made["target"] == (name if on_hub else "local") and made["drafter"] == f"{Path(name).name}-head"
        convert(f"out/{name}-vllm", name, Path(f"back/{name}"))
        assert load_checkpoint(f"back/{name}")[0]["training"]["hub_names"] == known
        features = tiny_run.write_stores(Path(f"features/{name}"), target)
        manifest = features / "train" / "manifest.json"
        found = json.loads(manifest.read_text()) | {"source": "someone/chats", "hub_names": ["someone/chats"]}
        manifest.write_text(json.dumps(found))
        run = Path(f"runs/{name}")
        tiny_run.train_here("eagle", tiny_run.settings(name, features, run, steps=1, init_from=f"{name}-head"))
        assert load_checkpoint(run)[0]["training"]["hub_names"] == ["someone/chats", *known]
        assert json.loads((run / "run.json").read_text())["hub_names"] == ["someone/chats", *known]
        splits = {"train": "someone/chats:en:train" if on_hub else DATA}
        Path("data").mkdir(exist_ok=True)
        Path(DATA).touch()
        values = {"target": name, "splits": splits, "max_length": 64, "heldout_answers": "given", "out": "store"}
        header = make_headers(FeaturesConfig(**values), load_tokenizer("user/local"))["train"]
        assert header.hub_names == ([name, splits["train"]] if on_hub else [])
