"""Models, tokenizers and checkpoints that come with code: no program runs it, not even if a user types "yes"."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import tiny_run
import yaml
from chat_formats import CHAT_VOCAB, CHATML, CHATML_SPECIALS, byte_level, dialogue
from transformers import AutoConfig, AutoTokenizer, dynamic_module_utils

import data_prep.datastore
import data_prep.features
import data_prep.gguf
import data_prep.inspect
import data_prep.magpie
import data_prep.regenerate
import drafters.chat
import drafters.convert
import drafters.export
import eval.engines
import eval.lossless
import eval.speed
import eval.sweep
import eval.tune
import train.start
import train.tools.draft_vocab
import train.tools.shallow
import train.tools.throughput
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import DroppedError
from drafters import TargetModel
from drafters.drafting.draft_model import vocabulary
from drafters.heads.eagle.module import EagleHead
from drafters.hub.checkpoint import make_config, save_checkpoint

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Trap(LlamaConfig):
    model_type = "trap"
class TrapModel(LlamaForCausalLM):
    config_class = Trap
class TrapTokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, *arguments, **options):
    raise AssertionError("not transformers' own generate")
"""
MAPS = {
    "AutoConfig": "trap.Trap",
    "AutoModelForCausalLM": "trap.TrapModel",
    "AutoTokenizer": [None, "trap.TrapTokenizer"],
}
REFUSED = "comes with code of its own"
YES = "y\n" * 100


class Trap:
    """``strange``: a folder of a family that only its own code knows; ``known``: a Llama's, with code beside it.

    Both have weights and a tokenizer, and hold everything that transformers would import.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.marker = root, root / "the-code-ran"
        self.known, self.strange, self.clean = root / "known", root / "strange", root / "clean"
        model = tiny.build("llama", vocab_size=CHAT_VOCAB)
        model.save_pretrained(self.clean)
        byte_level(CHATML, CHATML_SPECIALS, None, "<|im_end|>", vocab_size=CHAT_VOCAB).save_pretrained(self.clean)
        for folder in (self.known, self.strange):
            shutil.copytree(self.clean, folder)
            code = CODE.format(marker=str(self.marker))
            (folder / "trap.py").write_text(code)
            (folder / "custom_generate").mkdir()
            (folder / "custom_generate" / "generate.py").write_text(code)
            change(folder / "config.json", auto_map=MAPS)
            change(folder / "tokenizer_config.json", auto_map=MAPS)
        change(self.strange / "config.json", model_type="trap", architectures=["TrapModel"])
        change(self.strange / "tokenizer_config.json", tokenizer_class="TrapTokenizer")
        lines = [json.dumps(dialogue(index)) + "\n" for index in range(6)]
        self.data = root / "data.jsonl"
        self.data.write_text("".join(lines))
        target = TargetModel(model, name=str(self.clean))
        self.features = tiny_run.write_stores(root / "features", target)
        save_checkpoint(root / "head", EagleHead(target.config), make_config("eagle", {}, target))
        for name in ("trap.py", "custom_generate"):
            copy = shutil.copytree if (self.known / name).is_dir() else shutil.copy
            copy(self.known / name, root / "head" / name)
        change(root / "head" / "config.json", drafter={"auto_map": MAPS})


def change(file: Path, **keys: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    return Trap(tmp_path_factory.mktemp("trap"))


@pytest.fixture
def said_yes(trap: Trap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``yes |`` before every program; where code would be copied to and imported from."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(YES))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    trap.marker.unlink(missing_ok=True)


def test_the_trap_works(trap: Trap, said_yes: None) -> None:
    """Catches a trap that nothing could spring, with which the tests below would prove nothing."""
    for load in (AutoConfig, AutoTokenizer):
        load.from_pretrained(trap.strange)  # a user of transformers, who says yes
        assert trap.marker.exists()
        trap.marker.unlink()
        sys.stdin = io.StringIO(YES)
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]


def speed(target: Path, trap: Trap, **changes: Any) -> dict[str, Any]:
    return {
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(trap.data), "count": 2},
        "drafters": [{"label": "D", "drafter": "speculative", "draft_model": str(trap.clean), "gamma": 2}],
        "temperatures": [0.0],
        "max_new_tokens": 3,
        "rounds": 1,
        "warmup": 1,
        **changes,
    }


def drafter(path: Path) -> dict[str, Any]:
    return {"drafters": [{"label": "D", "drafter": "speculative", "draft_model": str(path), "gamma": 2}]}


def learned(path: Path) -> dict[str, Any]:
    return {"drafters": [{"label": "D", "drafter": "eagle", "checkpoint": str(path)}]}


def stock(path: Path) -> dict[str, Any]:
    return {"stock": [{"label": "assisted", "assistant_model": str(path), "num_assistant_tokens": 2}]}


def features(target: Path, trap: Trap) -> dict[str, Any]:
    return {"target": str(target), "dtype": "float32", "device": "cpu", "splits": {"train": str(trap.data)}}


def regenerate(target: Path, trap: Trap, **changes: Any) -> dict[str, Any]:
    settings = {"source": str(trap.data), "target": str(target), "dtype": "float32", "device": "cpu"}
    return {**settings, "max_new_tokens": 3, **changes}


def magpie(target: Path, trap: Trap) -> dict[str, Any]:
    settings = {"target": str(target), "dtype": "float32", "device": "cpu", "out": str(trap.root / "asked.jsonl")}
    return {**settings, "count": 1, "batch": 1, "temperature": 1.0}


def training(target: Path, trap: Trap, **changes: Any) -> dict[str, Any]:
    return tiny_run.settings(str(target), trap.features, Path("out"), steps=1, **changes)


def online(target: Path, trap: Trap) -> dict[str, Any]:
    data = {"train": str(trap.data), "heldout": str(trap.root / "heldout.jsonl"), "target_dtype": "float32"}
    shutil.copy(trap.data, trap.root / "heldout.jsonl")
    return {**training(target, trap), "features": "online", "data": data}


def eagle(given: list[str]) -> int:
    return tiny_run.main("eagle", given)


def draft_model(given: list[str]) -> int:
    return tiny_run.main("draft_model", given)


Main = Callable[[list[str]], Any]
# (program, its main, its config by the folder with the trap); what a program is given beside its config.
CASES: dict[str, tuple[Main, Callable[[Path, Trap], dict[str, Any]]]] = {
    "data_prep/features.py": (data_prep.features.main, features),
    "data_prep/regenerate.py": (data_prep.regenerate.main, regenerate),
    "data_prep/regenerate.py, draft model": (
        data_prep.regenerate.main,
        lambda path, trap: regenerate(
            trap.clean, trap, drafter={"drafter": "speculative", "draft_model": str(path), "gamma": 2}
        ),
    ),
    "data_prep/magpie.py": (data_prep.magpie.main, magpie),
    "train/eagle.py": (eagle, training),
    "train/eagle.py, online": (eagle, online),
    "train/draft_model.py": (draft_model, lambda path, trap: training(path, trap, draft_model=str(trap.clean))),
    "eval/speed.py": (eval.speed.main, speed),
    "eval/speed.py, draft model": (eval.speed.main, lambda path, trap: speed(trap.clean, trap, **drafter(path))),
    "eval/speed.py, checkpoint": (eval.speed.main, lambda path, trap: speed(trap.clean, trap, **learned(path))),
    "eval/engines.py": (
        eval.engines.main,
        lambda path, trap: speed(path, trap, engines=[{"label": "E", "engine": "vllm", "python": "none"}]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_program_runs_a_models_code(
    case: str, trap: Trap, said_yes: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches ``yes | program`` running code that a download brought, or the advice to set trust_remote_code."""
    main, config_of = CASES[case]
    path = trap.root / "head" if "checkpoint" in case else trap.strange
    values = config_of(path, trap)
    values["out"] = str(tmp_path / "out")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    said = ""
    try:
        main(["--config", str(tmp_path / "run.yaml")])
    except (ValueError, OSError, SystemExit) as error:
        said = str(error)
    printed = capfd.readouterr()
    said += printed.out + printed.err
    assert not trap.marker.exists()
    assert "trust_remote_code" not in said
    assert (REFUSED if path == trap.strange else "auto_map") in said


def test_code_beside_a_known_model_is_left_alone(trap: Trap, said_yes: None, tmp_path: Path) -> None:
    """Catches generate() or a tokenizer taken from a folder whose model transformers knows itself."""
    values = speed(trap.known, trap, out=str(tmp_path / "out"), **stock(trap.known))
    values["drafters"][0]["draft_model"] = str(trap.known)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert not eval.speed.main(["--config", str(tmp_path / "run.yaml")])
    assert (tmp_path / "out" / "report.json").is_file()
    target = TargetModel.from_pretrained(str(trap.known), "float32", "cpu")
    assert vocabulary(target)
    assert not trap.marker.exists()


Line = Callable[[Trap, Path], list[str]]
TEXT = "text.txt"
LINES: dict[str, tuple[Main, Line]] = {  # programs without --config: what is typed
    "inspect": (
        data_prep.inspect.main,
        lambda trap, folder: [str(trap.features / "train"), "--tokenizer", str(trap.strange)],
    ),
    "draft_vocab": (
        train.tools.draft_vocab.main,
        lambda trap, folder: [str(trap.strange), "--data", str(folder / TEXT), "--size", "8"],
    ),
    "shallow": (
        train.tools.shallow.main,
        lambda trap, folder: [str(trap.strange), "--layers", "0", "--out", str(folder / "x")],
    ),
    "chat, draft model": (
        drafters.chat.main,
        lambda trap, folder: ["--target", str(trap.clean), "--drafter", "speculative", f"draft_model={trap.strange}"],
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_no_other_program_runs_a_models_code(
    case: str, trap: Trap, said_yes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a model's or tokenizer's own code run by a program that takes no config."""
    main, line = LINES[case]
    (tmp_path / TEXT).write_text("some words")
    said = ""
    try:
        main(line(trap, tmp_path))
    except ValueError as error:
        said = str(error)
    assert REFUSED in " ".join((said + capsys.readouterr().out).split())
    assert not trap.marker.exists() and not (tmp_path / "x").exists()


def test_a_gguf_file_is_read_alone(trap: Trap, said_yes: None, tmp_path: Path) -> None:
    """Catches a converter that takes configuration and tokenizer, and their code, from the file's folder."""
    shutil.copytree(trap.strange, tmp_path / "downloaded")
    tiny_gguf.write(tmp_path / "downloaded" / "tiny.gguf")
    data_prep.gguf.main([str(tmp_path / "downloaded" / "tiny.gguf"), "--out", str(tmp_path / "target")])
    assert not trap.marker.exists()
    assert not [file for file in (tmp_path / "target").glob("*.json") if "auto_map" in file.read_text()]


def test_an_export_and_an_import_run_no_code(trap: Trap, said_yes: None, tmp_path: Path) -> None:
    """Catches a target's configuration, whose widths an export needs, read with its code."""
    given = [str(trap.root / "clean-head"), "--to", "vllm", "--out", str(tmp_path / "out"), "--target"]
    target = TargetModel.from_pretrained(str(trap.clean), "float32", "cpu")
    save_checkpoint(given[0], EagleHead(target.config), make_config("eagle", {}, target))
    with pytest.raises(ValueError, match=REFUSED):
        drafters.export.main([*given, str(trap.strange)])
    drafters.export.main([*given, str(trap.known)])
    exported = tmp_path / "out" / "config.json"
    assert "auto_map" not in exported.read_text()
    change(exported, auto_map=MAPS)  # and back: neither what comes beside a released head, nor beside its target
    again = [str(tmp_path / "out"), "--out", str(tmp_path / "back"), "--target"]
    with pytest.raises(ValueError, match=REFUSED):
        drafters.convert.main([*again, str(trap.strange)])
    drafters.convert.main([*again, str(trap.known)])
    assert not trap.marker.exists()


def test_a_template_runs_nothing(trap: Trap) -> None:
    """Catches chat templates rendered outside of a sandbox: jinja reaches every module from any of its objects."""
    tokenizer = AutoTokenizer.from_pretrained(trap.clean)
    escape = "{{ cycler.__init__.__globals__.os.mknod('" + str(trap.marker) + "') }}"
    tokenizer.chat_template = escape + "{% for message in messages %}{{ message.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DroppedError, match="unsafe"):
        ChatTokenizer(tokenizer, "trap").render(messages)
    assert not trap.marker.exists()
