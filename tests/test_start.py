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
from drafters.heads.mtp.shape import MTPShape
from drafters.methods import drafter_class
from eval.configs import LosslessConfig, SpeedConfig
from train.configs import StartConfig, schema_of, started_methods
from train.plan import facts as measuring
from train.plan import write
from train.plan.facts import Facts, mask_token

SCHEMAS = {"magpie": MagpieConfig, "regenerate": RegenerateConfig, "features": FeaturesConfig, "speed": SpeedConfig}
SCHEMAS |= {"lossless": LosslessConfig}
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

    def kill_at(self, file: Path, line: list[str]) -> None:
        """Run ``line`` until ``file`` exists, and kill all that it has started."""
        whole = subprocess.Popen(line, start_new_session=True, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not file.exists():
            assert whole.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.001)
        os.killpg(whole.pid, signal.SIGKILL)
        assert self.process is not None
        self.process.kill()
        whole.wait()

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

    pythons.kill_at(out / "eagle/state/latest", ["bash", str(out / "run.sh")])
    before = len(pythons.asked)

    ran: list[int] = []
    monkeypatch.setattr(os, "execvp", lambda _, line: ran.append(subprocess.run(line, timeout=300).returncode))
    train.start.main([*given, "--run"])
    assert ran == [0], pythons.said()
    programs = [words.split()[1 if words.startswith("-m") else 0] for words in pythons.asked[before:]]
    assert programs[1:] == ["eval.speed", "eval.lossless", "drafters.hub"]
    assert pythons.asked[before].endswith("--resume")
    report = json.loads((out / "speed/report.json").read_text())
    assert [row["drafter"] for row in report["rows"]][2:] == ["eagle, auto", "eagle, chain of 3"]
    card = (out / "card/README.md").read_text()
    assert "Losslessness" in card
    subprocess.run(["bash", str(out / "run.sh")], check=True)  # all is done
    assert len(pythons.asked) == before + 4


@pytest.mark.slow
def test_from_a_model_alone_to_answers(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches unanswered questions that the split drops, and a plan that no step's schema takes."""
    out, pythons = tmp_path / "mine", Pythons(tmp_path / "pythons")
    monkeypatch.setattr(sys, "executable", str(pythons.folder / "python"))
    given = ["--target", str(target_folder), "--out", str(out)]
    train.start.main(given)
    printed = " ".join(capsys.readouterr().out.split())
    assert "no --data: the target asks itself; " in printed
    assert f"read some of {out}/asked/questions.jsonl" in printed
    edit(out / "configs/magpie.yaml", count=40, max_new_tokens=200)  # a random target seldom ends a question
    edit(out / "configs/regenerate.yaml", max_new_tokens=8)
    script = (out / "run.sh").read_text().split("\n# features, ")[0]  # without the features and all that follows
    (out / "run.sh").write_text(re.sub(r"--heldout \d+ ", "--heldout 8 ", script))
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


@pytest.fixture
def facts(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    return described(target_folder, monkeypatch)


def described(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """Facts of a machine that is described, not measured: 10,000 dialogues of 200 tokens, half of them in answers."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(write, "check_training", lambda config, facts: None)  # which the dry run's tests check
    config, chat = measuring.load_config_only(str(target_folder)), measuring.load_tokenizer(str(target_folder))
    room = {"memory": 10**11, "disk": 10**11, "longest": 1024, "answer": 256}
    data = {"dialogues": 10_000, "length": 200.0, "answered": 100.0, "reading": 1.0}
    rates = {"rows": 64, "one": 100.0, "many": 800.0, "prefill": 5000.0, "start": 10.0}
    return Facts(config, chat, torch.device("cpu"), "bfloat16", 1, **room, **data, **rates)


class Plan:
    """A plan, whose configs are valid and whose script has the steps that are estimated."""

    def __init__(self, folder: Path, facts: Facts, **changes: Any) -> None:
        start = {"target": "models/target", "data": "data.jsonl", "out": str(folder / "mine")} | changes
        self.start = validate(StartConfig, start, "test")
        self.files, self.seconds = write.plan(self.start, facts, ["python"])
        for name, schema in SCHEMAS.items():
            if f"configs/{name}.yaml" in self.files:
                validate(schema, self.config(name), name)
        self.trained = validate(schema_of(self.start.method), self.config(self.start.method), "the training")
        self.script = self.files["run.sh"]
        subprocess.run(["bash", "-n"], input=self.script, text=True, check=True)
        assert re.findall("^# ([a-z]+), about", self.script, re.M) == list(self.seconds)

    def config(self, name: str) -> dict[str, Any]:
        return dict(yaml.safe_load(self.files[f"configs/{name}.yaml"]))


def test_the_minutes_are_kept(facts: Facts, tmp_path: Path) -> None:
    """Catches steps that together take another time than was said, and answers without time to train on them."""
    for minutes in (12, 120, 1200):
        took = Plan(tmp_path, facts, minutes=minutes).seconds
        assert list(took) == ["split", "regenerate", "features", "train", "speed", "lossless", "card"]
        assert sum(took.values()) == pytest.approx(60 * minutes)
        assert took["train"] > 0.3 * 60 * minutes


def test_a_step_that_fails_ends_the_script(facts: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches later steps on what a failed one has left, and a failed step that is never tried again."""
    (tmp_path / "python").write_text("#!/bin/bash\necho $2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    done = subprocess.run(["bash"], input=Plan(tmp_path, facts).script, text=True, capture_output=True)
    assert done.returncode == 3 and done.stdout.splitlines()[1:] == ["data_prep.split"]
    assert not (tmp_path / "mine").exists()


def test_names_go_into_a_script(facts: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a name with a line break, whose second line the shell would run, and a folder whose name it would
    expand."""
    names = {"target": "t", "data": "d", "out": "o"}
    for key in names:
        with pytest.raises(ValueError, match=f"{key}: has a line break"):
            validate(StartConfig, names | {key: "a\ntouch b"}, "the command line")
    monkeypatch.chdir(tmp_path)
    made = Plan(tmp_path / "$(touch x)", facts, target="a: b # c")
    last = ["out=" + shlex.quote(str(tmp_path / "$(touch x)" / "mine")), made.script.splitlines()[-1]]
    assert last[0] in made.script.splitlines()
    said = subprocess.run(["bash", "-c", "\n".join(last)], capture_output=True, text=True, check=True).stdout
    assert "/$(touch x)/mine/speed/report.md" in said and not (tmp_path / "x").exists()
    assert made.config("regenerate")["target"] == made.config("speed")["target"]["path"] == "a: b # c"


def test_what_is_there_decides(facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches features written to a disk that they fill, answers of the target that it gives again, a float32 target
    that does not fit, and steps that leave GPUs idle."""
    made = Plan(tmp_path, replace(facts, disk=10**6))
    assert "features" not in made.seconds and made.trained.features == "online"
    assert "training computes them" in capsys.readouterr().out
    made = Plan(tmp_path, replace(facts, own=True, disk=10**6, dialogues=10**6))
    assert made.trained.data is not None and made.trained.data.limit == int(0.1 * 7200 * 5000 / 200)
    made = Plan(tmp_path, replace(facts, own=True, dialogues=10**6), minutes=30)
    assert "regenerate" not in made.seconds
    assert made.config("features")["limit"] == int(0.1 * 1800 * 5000 / 200)
    made = Plan(tmp_path, facts, method="kangaroo", hub="you/it")
    assert list(made.seconds)[-3:] == ["speed", "lossless", "push"] and "you/it --report" in made.script
    assert [row.get("grid") for row in made.config("speed")["drafters"]] == [None, None, {"eta": [0.2, 0.4, 0.6]}]
    made = Plan(tmp_path, replace(facts, memory=0))
    assert "lossless" not in made.seconds and "--certificate" not in made.script
    made = Plan(tmp_path, replace(facts, gpus=2))
    assert len(re.findall("^  deepspeed ", made.script, re.M)) == 1
    assert made.script.count("torchrun --standalone --nproc-per-node 2 -m data_prep.") == 3


def other(facts: Facts, **changes: Any) -> Facts:
    """The facts of a model with another configuration."""
    return replace(facts, config=type(facts.config)(**{**facts.config.to_dict(), **changes}))


@pytest.mark.parametrize(("method", "hidden"), [("eagle", 64), *((method, 4096) for method in started_methods())])
def test_every_method_has_a_plan(method: str, hidden: int, facts: Facts, tmp_path: Path) -> None:
    """Catches features without the states that the head reads, a key or an option that it does not have, a key that
    stands under the wrong one, and a vocabulary of its LM head that decoding would change."""
    own, whole = schema_of(method).sizes_lm_head, method == "dflash2"  # the latter drafts with all tokens
    shape = {"hidden_size": hidden, "num_hidden_layers": 8}
    for vocabulary, frequent in (96, None), (100_000, None if whole else 16_384):
        made = Plan(tmp_path, other(facts, vocab_size=vocabulary, **shape), method=method)
        config = made.trained.settled(lambda: 8)
        assert made.config("features")["exit_layers"] == list(config.taps)
        assert (config.draft_vocab, config.loss_vocab) == (frequent, 8192 if frequent and not own else None)
        assert config.learning_rate == 2e-3 if hidden == 64 else config.learning_rate < 1e-3
        rows = made.config("speed")["drafters"]
        options = {*drafter_class(method).options.model_fields, "label", "drafter", "checkpoint", "grid"}
        assert all({*row} <= options for row in rows[2:4] if row["drafter"] == method)
        drafted = [row.get("draft_vocab") for row in (rows[2], made.config("lossless")["drafter"])]
        assert drafted == [2048 if frequent and not own else None] * 2
        assert rows[2]["draft_dtype"] == "int8"
        made = Plan(tmp_path, replace(other(facts, vocab_size=100_000, **shape), gpus=1), method=method, minutes=20)
        sizes = made.trained.draft_vocab, made.trained.loss_vocab
        assert sizes == ((None if whole else 4096, None) if own else (16_384, 8192 if method == "kangaroo" else 2048))
        assert made.trained.batch_tokens == 1024


NORMED = {"kind": "deepseek", "layers": 2, "feeds_back_normed": True}


@pytest.mark.parametrize(("keys", "rate"), [({}, 2e-3), ({"kind": "mimo", "layers": 1}, 5e-5), (NORMED, 5e-5)])
def test_an_mtp_layer_is_tuned_gently(keys: dict[str, Any], rate: float, facts: Facts, tmp_path: Path) -> None:
    """Catches the rate of new weights for a small target's own layer, which unlearns what it knows, a training of fewer
    layers than it has, and a report that does not measure the layer as shipped."""
    plan = Plan(tmp_path, replace(other(facts, hidden_size=64), mtp_keys=keys), method="mtp")
    made: Any = plan.trained
    assert (made.learning_rate, made.start) == (rate, "target" if keys else "regression")
    assert made.head == MTPShape(**keys) and made.unroll == (2 if keys == NORMED else 3)
    shipped = {"label": "mtp as shipped, auto", "drafter": "mtp", "tree": "auto"}
    assert (shipped in plan.config("speed")["drafters"]) == bool(keys)


def test_the_mask_token_is_one_that_texts_lack(facts: Facts) -> None:
    """Catches a mask token that ends turns, or that the dialogues have: blocks would be trained to take it for text."""
    tokenizer = facts.chat.tokenizer
    larger, full = (other(facts, vocab_size=len(tokenizer) + more) for more in (3, 0))
    assert mask_token(larger) == len(tokenizer)
    special = tokenizer.convert_tokens_to_ids(sorted(facts.chat.special_tokens))
    lacked = next(token for token in special if token != tokenizer.eos_token_id)
    others = np.array([token for token in special if token != lacked])
    assert mask_token(replace(full, sample=[MaskedTokens(others, others > 0)])) == lacked
    every = np.array(special)
    with pytest.raises(ValueError, match="give --method eagle3"):
        mask_token(replace(full, sample=[MaskedTokens(every, every > 0)]))


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
    shutil.copy(target_folder / "chat_template.jinja", bare)
    shutil.copy(bare / "model.safetensors", bare / "more.safetensors")
    (bare / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"lm_head.weight": "more.safetensors"}}'
    )
    with pytest.raises(ValueError, match="holds two sets of weights"):
        train.start.main([*given, "--target", str(bare)])
    assert not out.exists()
    out.mkdir()
    (out / "start.json").write_text(json.dumps({"settings": {"minutes": 60}}))
    with pytest.raises(ValueError, match="holds another start: .*minutes was 60, is 120"):
        train.start.main(given)
