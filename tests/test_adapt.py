"""train.adapt: from a log to an accepted head and its card, killed on the way; and what it refuses before that."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_start import Pythons, edit

import train.adapt
from data_prep.dialogues.encoding import load_tokenizer
from drafters import TargetModel, generate, make_drafter
from drafters.config import validate
from drafters.hub.checkpoint import config_of
from drafters.hub.publishing import files_of
from drafters.model.files import load_config_only
from train.configs import AdaptConfig, schema_of, trained_methods
from train.plan import adapt

ROOT = Path(__file__).parents[1]
TARGET, HEAD = str(ROOT / "checkpoints/stdlib-target"), ROOT / "checkpoints/stdlib-eagle"
CANARY = "zanzibar"  # in all questions


def blurred(folder: Path) -> Path:
    """The shipped head with noise in its weights, so that any training helps it."""
    shutil.copytree(HEAD, folder, ignore=shutil.ignore_patterns("README.md"))
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for value in weights.values():
        if value.dim() > 1:
            value += 0.5 * value.float().std() * torch.randn(value.shape).to(value)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def served(folder: Path, count: int = 60, new: int = 16) -> Path:
    """A log of questions with the target's own greedy answers."""
    target, chat = TargetModel.from_pretrained(TARGET, "float32", "cpu"), load_tokenizer(TARGET)
    asked = [f"What does {CANARY}.call_{number} do?" for number in range(count)]
    prompts = [chat.prompt([{"role": "user", "content": question}])[0] for question in asked]
    plain = make_drafter("autoregressive", target)
    made = generate(target, plain, prompts, max_new_tokens=new)
    answers = [ids[:length] for ids, length in zip(made.tokens.tolist(), made.lengths, strict=True)]
    log = folder / "log.jsonl"
    with log.open("w") as file:
        for number, (question, ids) in enumerate(zip(asked, answers, strict=True)):
            text = chat.tokenizer.decode(ids, skip_special_tokens=True)
            reply = {"message": {"role": "assistant", "content": text}, "finish_reason": "length"}
            usage = {"prompt_tokens": len(prompts[number])}
            row = {"request": {"messages": [{"role": "user", "content": question}]}}
            row |= {"response": {"choices": [reply], "created": 1e9 + number, "usage": usage}}
            file.write(json.dumps(row) + "\n")
    return log


@pytest.mark.slow
def test_from_a_log_to_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step that another one's files do not suit, one that a kill leaves unable to go on, and traffic in the
    files that are published."""
    out, pythons, head = tmp_path / "adapted", Pythons(tmp_path / "pythons"), blurred(tmp_path / "head")
    monkeypatch.setattr(sys, "executable", str(pythons.folder / "python"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    given = ["--drafter", str(head), "--target", TARGET, "--traffic", str(served(tmp_path)), "--out", str(out)]

    def killed(_: str, line: list[str]) -> None:
        edit(out / "configs/eagle.yaml", epochs=None, learning_rate=1e-3, steps=30, save_every=2)
        edit(out / "configs/eagle.yaml", tau_every=15, tau_prompts=2, tau_new_tokens=8)
        edit(out / "configs/lossless.yaml", texts=16, begun=2, greedy_tokens=4, rounded=None)
        script = (out / "run.sh").read_text().replace("--new-tokens 128", "--new-tokens 12")
        (out / "run.sh").write_text(script)
        pythons.kill_at(out / "eagle/state/latest", line)

    monkeypatch.setattr(os, "execvp", killed)
    train.adapt.main(given)
    before = len(pythons.asked)
    ran: list[int] = []
    monkeypatch.setattr(os, "execvp", lambda _, line: ran.append(subprocess.run(line, timeout=300).returncode))
    train.adapt.main(given)
    assert ran == [0], pythons.said()
    programs = [words.split()[1 if words.startswith("-m") else 0] for words in pythons.asked[before:]]
    assert programs[1:] == ["eval.gate", "eval.lossless", "drafters.hub"]
    assert pythons.asked[before].endswith("--resume")
    gate = json.loads((out / "gate/gate.json").read_text())
    assert gate["accepted"] and gate["drafter"] == str(out / "eagle") and gate["rows"][0]["conversations"] >= 18
    card = (out / "card/README.md").read_text()
    assert "tau on new traffic" in card and "Losslessness" in card
    published = files_of(out / "eagle", "you/it")
    texts = [card.encode(), *(text if isinstance(text, bytes) else text.read_bytes() for text in published.values())]
    assert not any(CANARY.encode() in text for text in texts)
    train.adapt.main([*given, "--push", "you/it"])  # asks for a token, here in vain
    assert ran[-1] and pythons.asked[-1].startswith(f"-m drafters.hub push {out / 'eagle'} you/it --report")
    with pytest.raises(ValueError, match="holds another adaptation: .*epochs was 4, is 5"):
        train.adapt.main([*given, "--epochs", "5"])


SHIPPED = ["stdlib-eagle3", "stdlib-dflash", "stdlib-dspark", "stdlib-kangaroo"]


def test_draft_tokens_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a head whose draft tokens are counted again in the traffic and published, and one that --lora refuses."""
    monkeypatch.setattr(adapt, "check_head", lambda *_: load_config_only(TARGET))
    for name, lora in itertools.product(("smollm2-eagle", "smollm2-kangaroo"), (False, True)):
        head = ROOT / "checkpoints" / name
        method = config_of(head).drafter_type
        made = yaml.safe_load(planned(tmp_path, head, lora=lora)[f"configs/{method}.yaml"])
        assert validate(schema_of(method), made, name).draft_vocab is None


def planned(folder: Path, drafter: Path, **changes: Any) -> dict[str, str]:
    """The files of an adaptation."""
    keys = {"drafter": str(drafter), "target": TARGET, "traffic": "log.jsonl", "out": str(folder / "$(touch x)")}
    return adapt.plan(validate(AdaptConfig, keys | changes, "test"), ["python"])


def test_the_recipe_is_the_heads_own(tmp_path: Path) -> None:
    """Catches a head of another shape than the one that is adapted, its rate of a first training, first steps that
    train a part of it, and a name that the shell expands."""
    files = planned(tmp_path, HEAD, guard="$(touch y)", lora=True)
    config = validate(schema_of("eagle"), yaml.safe_load(files["configs/eagle.yaml"]), "test")
    assert config.learning_rate == pytest.approx(adapt.SHARE * 3e-3) and config.lora is not None
    assert config.init_from == str(HEAD) and config.epochs == 4
    subprocess.run(["bash", "-n"], input=files["run.sh"], text=True, check=True)
    steps = re.findall(r"python -m (\S+)", files["run.sh"])  # an unusable guard is known before hours of features
    assert steps[:4] == ["data_prep.traffic", "eval.gate", "data_prep.features", "data_prep.inspect"]
    assert "--guard '$(touch y)'" in files["run.sh"] and "/$(touch x)'" in files["run.sh"]
    for name, lora in itertools.product(SHIPPED, (False, True)):
        head = ROOT / "checkpoints" / name
        method = (stored_head := config_of(head)).drafter_type
        files = planned(tmp_path, head, lora=lora)
        made = validate(schema_of(method), yaml.safe_load(files[f"configs/{method}.yaml"]), name)
        stored = made.settled(lambda: 12).shape.stored()
        kept = {key: value for key, value in config_of(head).drafter.items() if key in stored}
        assert {key: stored[key] for key in kept} == kept and method in trained_methods()
        recorded = stored_head.model_copy(update={"training": {"config": {"ttt_from": 0.5, "unroll_from": 0.5}}})
        assert not {"ttt_from", "unroll_from"} & adapt.recipe(recorded, schema_of(method)).keys()


@pytest.mark.parametrize("recorded", [{"learning_rate": 3e-3}, {}])
def test_a_second_adaptation_has_the_rate_of_the_first(tmp_path: Path, recorded: dict[str, float]) -> None:
    """Catches a thirtieth of a thirtieth, which changes nothing."""
    head = tmp_path / "head"
    shutil.copytree(HEAD, head)
    stored = json.loads((head / "config.json").read_text())
    for _ in range(2):
        (head / "config.json").write_text(json.dumps(stored | {"training": {"config": recorded}}))
        recorded = yaml.safe_load(planned(tmp_path, head)["configs/eagle.yaml"])
        config = validate(schema_of("eagle"), recorded, "test")
        assert config.learning_rate == pytest.approx(1e-4)


def test_what_cannot_be_adapted_is_refused(tmp_path: Path) -> None:
    """Catches a head of another target, whose features are computed for hours before it does not load."""
    head = tmp_path / "head"
    shutil.copytree(HEAD, head)
    stored = json.loads((head / "config.json").read_text())
    stored["target"]["fingerprint"] = "0" * 16 + "-" + "0" * 16
    (head / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"was trained for .*fingerprint 0000.*, and --target .* has fingerprint"):
        planned(tmp_path, head)
    stored |= {"base": {"name": "you/base", "fingerprint": "x"}}
    (head / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="is a LoRA of you/base; give that head, or merge them"):
        planned(tmp_path, head)
    (tmp_path / "guard.txt").touch()
    for guard in ("guard.txt", "missing.jsonl"):
        with pytest.raises(ValueError, match=rf"--guard: .*{guard} is no file of prompts; give one .*or a suite: "):
            train.adapt.check_guard(str(tmp_path / guard))
