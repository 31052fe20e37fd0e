"""train.start: what it refuses, what it plans, and that its script makes a drafter, killed on the way."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import nursery
import pytest
import tiny_run
import torch
import yaml
from chat_formats import dialogue

import train.start
from data_prep.configs import FeaturesConfig, MagpieConfig, RegenerateConfig
from data_prep.dialogues.loss_mask import MaskedTokens
from drafters.config import validate
from drafters.methods import drafter_class
from eval.configs import LosslessConfig, SpeedConfig, TuneConfig
from train.configs import StartConfig, schema_of
from train.plan.facts import Data, Machine, Model, Rates, look_at_model, mask_token
from train.plan.fill import fill
from train.plan.shares import check_minutes, compared_methods, fixed_steps
from train.plan.steps import Plan, Planner

SCHEMAS = {"magpie": MagpieConfig, "regenerate": RegenerateConfig, "features": FeaturesConfig, "speed": SpeedConfig}
SCHEMAS |= {"lossless": LosslessConfig, "tune": TuneConfig}
SHIM = """#!/bin/bash
reply="{0}/reply.$$"; mkfifo "$reply"
printf '%s\\t%s\\n' "$reply" "$(printf '%q ' "$@")" > {0}/asked
read -r status < "$reply"; exit "$status"
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sixty dialogues and two records that are none."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(dialogue(index)) + "\n" for index in range(60)) + '{"id": 1}\nno JSON\n')
    return file


class Pythons:
    """A script named ``python`` that has this process, whose imports are done, fork what it would start."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.asked = folder, list[str]()
        self.process: nursery.Process | None = None
        (folder / "python").write_text(SHIM.format(folder))
        (folder / "python").chmod(0o755)
        os.mkfifo(folder / "asked")
        self.pipe = os.open(folder / "asked", os.O_RDWR)  # so that it never ends
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with os.fdopen(self.pipe) as lines:
            for line in lines:
                reply, words = line.rstrip("\n").split("\t")
                self.asked.append(words.strip())
                self.process = tiny_run.begin(["python", *shlex.split(words)], self.folder / f"{len(self.asked)}.log")
                status = self.process.wait()
                if Path(reply).exists() and status >= 0:
                    Path(reply).write_text(f"{status}\n")

    def said(self) -> str:
        """What the latest one wrote."""
        return (self.folder / f"{len(self.asked)}.log").read_text()[-3000:]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))


@pytest.mark.slow
def test_from_a_model_and_dialogues_to_a_card(
    target_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a step that another one's files do not suit, and one that a kill leaves unable to go on."""
    out, pythons = tmp_path / "mine", Pythons(tmp_path / "pythons")
    monkeypatch.setattr(sys, "executable", str(pythons.folder / "python"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    given = ["--target", str(target_folder), "--data", str(data), "--out", str(out)]
    train.start.main(given)
    printed = capsys.readouterr().out
    assert "60 kept, dropped 2 (no_conversations 1, broken_json 1)" in printed
    assert "others' answers: the target will give its own" in " ".join(printed.split())
    edit(out / "configs/regenerate.yaml", max_new_tokens=8)
    edit(out / "configs/eagle.yaml", minutes=None, steps=40, save_every=2, precision="float32", heldout_tokens=64)
    edit(out / "configs/lossless.yaml", texts=16, new_tokens=4, greedy_tokens=4, rounded=None)
    speed = yaml.safe_load((out / "configs/speed.yaml").read_text())
    speed["prompts"]["count"] = 1
    edit(out / "configs/speed.yaml", prompts=speed["prompts"], max_new_tokens=4, drafters=speed["drafters"][:-1])

    whole = subprocess.Popen(["bash", str(out / "run.sh")], start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (out / "eagle/state/latest").exists():
        assert whole.poll() is None, pythons.said()
        assert time.monotonic() < deadline, pythons.said()
        time.sleep(0.001)
    os.killpg(whole.pid, signal.SIGKILL)
    assert pythons.process is not None
    pythons.process.kill()
    whole.wait()
    before = len(pythons.asked)

    ran: list[int] = []
    monkeypatch.setattr(os, "execvp", lambda _, line: ran.append(subprocess.run(line, timeout=300).returncode))
    train.start.main([*given, "--run"])
    assert ran == [0], pythons.said()
    programs = [words.split()[1 if words.startswith("-m") else 0] for words in pythons.asked[before:]]
    assert programs[1:] == ["eval.speed", "eval.lossless", "drafters.hub"]
    assert pythons.asked[before].endswith("--resume")
    report = json.loads((out / "speed/report.json").read_text())
    assert [row["drafter"] for row in report["rows"]][2:] == ["EAGLE, auto", "EAGLE, chain of 3"]
    card = (out / "card/README.md").read_text()
    assert "Losslessness" in card
    subprocess.run(["bash", str(out / "run.sh")], check=True)  # all is done
    assert len(pythons.asked) == before + 4


@pytest.mark.slow
def test_from_a_model_alone_to_answers(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches unanswered questions that the split drops, and a plan that no step's schema takes."""
    monkeypatch.setattr("train.plan.steps.ASKED", 200)  # a random target seldom ends a question
    out, pythons = tmp_path / "mine", Pythons(tmp_path / "pythons")
    monkeypatch.setattr(sys, "executable", str(pythons.folder / "python"))
    given = ["--target", str(target_folder), "--out", str(out)]
    train.start.main(given)
    printed = " ".join(capsys.readouterr().out.split())
    assert "no --data: the target asks itself, up to" in printed
    assert f"read some of {out}/asked/questions.jsonl" in printed
    edit(out / "configs/magpie.yaml", count=40, max_new_tokens=200)
    edit(out / "configs/regenerate.yaml", max_new_tokens=8)
    script = (out / "run.sh").read_text().split("\n# features: ")[0]  # without the features and all that follows
    (out / "run.sh").write_text(script.replace("--heldout 200 ", "--heldout 8 "))
    subprocess.run(["bash", str(out / "run.sh")], check=True, timeout=300)
    assert [words.split()[1] for words in pythons.asked[:2]] == ["data_prep.magpie", "data_prep.split"]
    asked, held, new = (
        [json.loads(line)["conversations"] for line in (out / file).read_text().splitlines()]
        for file in ("asked/questions.jsonl", "answers/heldout.jsonl", "answers/train.jsonl")
    )
    assert len(asked) == 40 and 0 < len(held) <= 8 and 20 < len(new) <= 32
    assert all([turn["from"] for turn in each] == ["human", "gpt"] for each in held + new)
    with pytest.raises(ValueError, match="data was None, is"):
        train.start.main([*given, "--data", str(out / "answers/train.jsonl")])


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Model:
    return look_at_model(str(target_folder))


def plan(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> Plan:
    """A plan for a machine that is described, not measured; ``changes``: of its parts, and of the start."""
    monkeypatch.setattr(Planner, "training_rate", lambda self, config: 2000.0)
    monkeypatch.setattr(Planner, "check", lambda self, config: None)  # which the dry run's tests check
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine = Machine(torch.device("cpu"), 0, 10**11, 10**11, "bfloat16")
    start = {"target": model.name, "data": "data.jsonl", "out": str(tmp_path / "mine")}
    start |= {key: changes.pop(key) for key in ("method", "minutes", "hub") if key in changes}
    parts = {"data": DATA, "machine": machine, "rates": known()}
    for key, value in changes.items():
        part = next(name for name, each in parts.items() if hasattr(each, key))
        parts[part] = replace(parts[part], **{key: value})
    made = Planner(validate(StartConfig, start, "test"), model, **parts).make(["python"])
    for name, schema in SCHEMAS.items():
        if f"configs/{name}.yaml" in made.files:
            validate(schema, config_of(made, name), name)
    subprocess.run(["bash", "-n"], input=made.files["run.sh"], text=True, check=True)
    steps = re.findall("^# ([a-z]+): about", made.files["run.sh"], re.M)
    assert steps == list(made.seconds)
    return made


def config_of(made: Plan, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(made.files[f"configs/{name}.yaml"]))


def test_the_minutes_are_kept(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches steps that together take longer than was said, and answers without time to train on them."""
    for minutes in (12, 120, 1200):
        took = plan(model, monkeypatch, tmp_path, minutes=minutes).seconds
        assert list(took) == ["split", "answers", "features", "train", "speed", "lossless", "card"]
        assert 0.75 * minutes < sum(took.values()) / 60 < 1.05 * minutes
        assert took["train"] > 0.3 * 60 * minutes * (took["answers"] > 10)
    with pytest.raises(ValueError, match=r"--minutes 2: starting .* take [\d.]+ of them here, .* give at least \d"):
        plan(model, monkeypatch, tmp_path, minutes=2)


def known(**changes: Any) -> Rates:
    """A machine's rates."""
    return replace(Rates(100.0, 800.0, 64, 5000.0, 10.0, 300.0), **changes)


DATA = Data("data.jsonl", 10_000, 20_000, 2_000_000, 1_000_000, False, "10,000 kept", 1.0)


def test_the_fixed_steps_by_hand(model: Model) -> None:
    """Catches a start, a row of the report, the held-out prompts or a precision of the lossless test that is left out.

    In 100 minutes at 100 tokens/s: five rows of 96 tokens, of which 8% would be 100 prompts and 20 are the most. 12%
    are 720 s of 300 tokens/s, of which 2 x 8 x 64 go to greedy texts; 512 sampled texts of 32 tokens are the most.
    """
    answer = replace(model, answer=256)
    found = fixed_steps(6000.0, "eagle", answer, DATA, known())
    assert compared_methods(drafter_class("eagle")) == 5
    assert (found.prompts, found.begun, found.texts) == (20, 8, 512)
    assert found.report == 10 + 5 * 20 * 96 / 100 and found.tune == 0.0
    assert found.certificate == pytest.approx(2 * 10 + (2 * 8 * 64 + 512 * 32) / 300)
    assert found.others == 2 * 1.0 + 4 * 10
    assert found.seconds == found.report + found.certificate + found.others
    asked = fixed_steps(6000.0, "eagle", answer, replace(DATA, asking=0.1), known(exact=None))
    assert (asked.certificate, asked.others) == (0.0, 2 * 1.0 + 5 * 10)
    few = fixed_steps(60.0, "kangaroo", answer, None, known(exact=20.0))  # held-out dialogues: eight at least
    assert (few.prompts, few.begun, few.texts) == (4, 4, 64)
    knobs = drafter_class("kangaroo").recipe.knobs
    assert few.tune == 10 + (sum(map(len, knobs.values())) + 2) * 4 * 96 / 100


@pytest.mark.parametrize("rates", [known(), known(one=3.0), known(exact=11.0, start=47.0), known(exact=None, one=0.7)])
def test_the_minutes_that_are_asked_for_suffice(rates: Rates, model: Model) -> None:
    """Catches a number of minutes that is refused in turn, because its report is longer."""
    settings = {"target": "t", "out": "o", "minutes": 1}
    with pytest.raises(ValueError, match=r"--minutes 1: starting .* take [\d.]+ of them .* give at least \d+") as told:
        check_minutes(validate(StartConfig, settings, "test"), model, DATA, rates)
    enough = int(str(told.value).split()[-1])
    check_minutes(validate(StartConfig, settings | {"minutes": enough}, "test"), model, DATA, rates)
    seconds = fixed_steps(60 * (enough - 1), "eagle", model, DATA, rates).seconds
    assert seconds > 0.8 * 60 * (enough - 1)


def test_too_few_minutes_are_refused_at_once(
    target_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches minutes of measuring before it is said that the time is too short: for the programs' starts, which are
    known before the target is loaded, and for the lossless test, which is known before the target answers."""
    given = ["--target", str(target_folder), "--data", str(data), "--out", str(tmp_path / "mine")]

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("too late")

    told = r"of them here, by what is known before all is measured, .* give at least \d+"
    monkeypatch.setattr("train.plan.rates.answering", refuse)
    monkeypatch.setattr("train.plan.rates.exact_rate", lambda *given: 0.1)
    with pytest.raises(ValueError, match=told):
        train.start.main([*given, "--minutes", "300"])
    monkeypatch.setattr("train.plan.write.measure", refuse)
    with pytest.raises(ValueError, match=told):
        train.start.main([*given, "--minutes", "0.01"])
    assert not (tmp_path / "mine").exists()


def test_a_plan_by_hand(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a step's time without a program's start, states saved at every step, held-out questions that are not
    asked, features of a part of the answers, and a certificate of steps without a draft."""
    many = {"dialogues": 10**6, "tokens": 2 * 10**8, "answers": 10**8}  # more than the target can answer
    made = plan(model, monkeypatch, tmp_path, minutes=120, **many)
    config = config_of(made, "eagle")
    assert config["save_every"] == config["export_every"] == round(2 * 60 * 2000 / 2048)
    minutes = config_of(made, "regenerate")["minutes"]
    assert made.seconds["answers"] == pytest.approx(1.1 * 60 * minutes + 2 * 10, abs=1)
    assert made.seconds["train"] == pytest.approx(60 * config["minutes"] + 10, abs=1)
    tokens = 60 * minutes * 800 * 2  # of dialogues, half of them in answers
    assert made.seconds["features"] == pytest.approx(tokens / 5000 + 10, rel=1e-2)
    assert "limit" not in config_of(made, "features")
    assert config_of(made, "lossless")["drafter"] == {
        "drafter": "eagle",
        "checkpoint": str(tmp_path / "mine" / "eagle"),
        "tree": "chain",
        "depth": 3,
    }
    made = plan(model, monkeypatch, tmp_path, minutes=120, asking=0.5, **many)
    asked, answered = config_of(made, "magpie")["count"], 60 * config_of(made, "regenerate")["minutes"] * 800 / 100
    assert asked == pytest.approx(1.1 * answered, rel=1e-2)
    assert made.seconds["ask"] == pytest.approx(0.5 * asked + 10)
    assert config_of(made, "magpie")["minutes"] == pytest.approx(1.5 * 0.5 * asked / 60, abs=0.01)


def test_a_step_that_fails_ends_the_script(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches later steps on what a failed one has left, and a failed step that is never tried again."""
    (tmp_path / "python").write_text("#!/bin/bash\necho $2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    text = plan(model, monkeypatch, tmp_path).files["run.sh"]
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True)
    assert done.returncode == 3 and done.stdout.splitlines()[1:] == ["data_prep.split"]
    assert not (tmp_path / "mine").exists()


def test_names_go_into_a_script(
    model: Model, target_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a name with a line break, whose second line the shell would run, and a folder whose name it would
    expand."""
    given = {"target": str(target_folder), "data": "d", "out": "o"}
    for key in given:
        with pytest.raises(ValueError, match=f"{key}: has a line break"):
            validate(StartConfig, given | {key: "a\ntouch b"}, "the command line")
    monkeypatch.chdir(tmp_path)
    made = plan(model, monkeypatch, tmp_path / "$(touch x)")
    last = ["out=" + shlex.quote(str(tmp_path / "$(touch x)" / "mine")), made.files["run.sh"].splitlines()[-1]]
    assert last[0] in made.files["run.sh"].splitlines()
    said = subprocess.run(["bash", "-c", "\n".join(last)], capture_output=True, text=True, check=True).stdout
    assert "/$(touch x)/mine/speed/report.md" in said and not (tmp_path / "x").exists()
    asked = fill(
        "magpie.yaml",
        {"out": "o", "target": "a: b # c", "source": "s", "count": 1, "asking": 1, "rows": 1, "question": 2},
    )
    assert yaml.safe_load(asked)["target"] == "a: b # c"


def test_what_is_there_decides(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches features written to a disk that they fill, answers of the target that it gives again, and a Kangaroo
    whose options were not searched.
    """
    made = plan(model, monkeypatch, tmp_path, disk=10**8)
    assert "features" not in made.seconds
    assert config_of(made, "eagle")["features"] == "online" and "heldout" in config_of(made, "eagle")["data"]
    assert "are computed during training" in made.notes[0]
    made = plan(model, monkeypatch, tmp_path, own=True, minutes=30)
    assert "answers" not in made.seconds
    assert config_of(made, "features")["limit"] < 10_000
    made = plan(model, monkeypatch, tmp_path, method="kangaroo", hub="you/it")
    assert list(made.seconds)[-4:] == ["tune", "speed", "lossless", "push"]
    assert '$out/tune/best.yaml"' in made.files["run.sh"] and "you/it --report" in made.files["run.sh"]
    made = plan(model, monkeypatch, tmp_path, exact=None)
    assert "lossless" not in made.seconds and "--certificate" not in made.files["run.sh"]
    made = plan(model, monkeypatch, tmp_path, gpus=2)
    lines = made.files["run.sh"].splitlines()
    assert len([line for line in lines if line.startswith("  deepspeed ")]) == 1
    assert len([line for line in lines if "torchrun --standalone --nproc-per-node 2 -m data_prep." in line]) == 3


def other(model: Model, **changes: Any) -> Model:
    """The model with another configuration."""
    return replace(model, config=type(model.config)(**{**model.config.to_dict(), **changes}))


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
def test_heads_of_several_states(method: str, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches features without the states that the head reads, a key or an option that it does not have, and a
    vocabulary of its LM head that decoding would change."""
    large = other(model, vocab_size=100_000, num_hidden_layers=8)
    for target, vocabulary in (other(model, num_hidden_layers=8), None), (large, 16_384):
        made = plan(target, monkeypatch, tmp_path, method=method)
        config = validate(schema_of(method), config_of(made, method), "the training")
        config = config.settled(lambda: 8)
        assert config.taps and config_of(made, "features")["exit_layers"] == list(config.taps)
        assert (config.draft_vocab, config.loss_vocab) == (vocabulary, None)
        rows = config_of(made, "speed")["drafters"]
        options = drafter_class(method).options.model_fields
        assert len(rows) == 5
        assert all(set(row) - {"label", "drafter", "checkpoint"} <= set(options) for row in rows[2:4])
    made = plan(large, monkeypatch, tmp_path, method=method, minutes=20)
    assert config_of(made, method)["draft_vocab"] == 4096


def test_the_mask_token_is_one_that_texts_lack(model: Model) -> None:
    """Catches a mask token that ends turns, or that the dialogues have: blocks would be trained to take it for text."""
    tokenizer = model.chat.tokenizer
    data = Data("data.jsonl", 10, 10, 100, 50, False, "", 1.0)
    larger, full = (other(model, vocab_size=len(tokenizer) + more) for more in (3, 0))
    assert mask_token(larger, data) == len(tokenizer)
    special = tokenizer.convert_tokens_to_ids(sorted(model.chat.special_tokens))
    lacked = next(token for token in special if token != tokenizer.eos_token_id)
    others = np.array([token for token in special if token != lacked])
    assert mask_token(full, replace(data, some=[MaskedTokens(others, others > 0)])) == lacked
    every = np.array(special)
    with pytest.raises(ValueError, match="give --method eagle3"):
        mask_token(full, replace(data, some=[MaskedTokens(every, every > 0)]))


def test_what_cannot_be_done_is_refused_and_nothing_written(target_folder: Path, data: Path, tmp_path: Path) -> None:
    """Catches hours that end in an error which was there in the first minute."""
    out = tmp_path / "mine"
    given = ["--target", str(target_folder), "--data", str(data), "--out", str(out)]
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps(dialogue(0)) + "\n")
    with pytest.raises(ValueError, match="1 kept, dropped 0; at least 24 usable dialogues are needed"):
        train.start.main([*given, "--data", str(few)])
    few.write_text("")
    with pytest.raises(ValueError, match=r"few.jsonl is empty"):
        train.start.main([*given, "--data", str(few)])
    bare = tmp_path / "bare"
    shutil.copytree(target_folder, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat template"):
        train.start.main([*given, "--target", str(bare)])
    assert not out.exists()
    out.mkdir()
    (out / "start.json").write_text(json.dumps({"settings": {"minutes": 60}}))
    with pytest.raises(ValueError, match="holds another start: .*minutes was 60, is 120"):
        train.start.main(given)
