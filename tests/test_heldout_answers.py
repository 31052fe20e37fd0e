"""The held-out store holds the target's own answers, and training says where it does not."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from test_features import run, write_config

from data_prep.answers.finished import whose
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.store.lock import LOCK
from data_prep.store.manifest import MANIFEST, read_manifest
from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from train.run.files import read_metrics
from train.run.summary import OWN_SHARE

OWN = {"heldout_answers": "own", "heldout_new_tokens": 12, "exit_layers": [], "max_length": 192, "batch_tokens": 2048}


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def first_choices(store: FeatureStore, target: TargetModel) -> float:
    """The share of the answers' tokens that are the target's greedy choice, one dialogue after the other."""
    hits = []
    for dialogue in store:
        guesses = target.lm_head(dialogue.features.float()).argmax(-1)[:-1]
        hits.append((guesses == dialogue.input_ids[1:])[dialogue.loss_mask[1:]])
    return float(torch.cat(hits).float().mean())


@pytest.fixture(scope="module")
def speaker(target_folder, tmp_path_factory):
    """The tiny target, of whose tokens only those are ever first that its tokenizer reads as it writes them."""
    folder = tmp_path_factory.mktemp("speaker") / "llama"
    shutil.copytree(target_folder, folder)
    vocab = load_tokenizer(str(folder)).tokenizer.get_vocab()
    merged = "".join(token for token in vocab if len(token) > 1)
    said = [index for token, index in vocab.items() if token.isascii() and token.isalnum() and token not in merged]
    weights = load_file(folder / "model.safetensors")
    kept = torch.zeros(len(weights["lm_head.weight"]), 1)
    kept[[*said, vocab["<|im_end|>"]]] = 1
    weights["lm_head.weight"] *= kept
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, speaker):
    """The folder of a config whose stores are made, the held-out one of the target's own answers."""
    folder = tmp_path_factory.mktemp("made")
    run(write_config(folder, speaker, **OWN))
    return folder


@pytest.fixture(scope="module")
def tiny_target(speaker):
    return TargetModel.from_pretrained(str(speaker), "float32", "cpu")


def test_by_default_held_out_answers_are_the_targets_own(made, tiny_target):
    """Catches held-out features of somebody else's answers, or training features of replaced ones."""
    out = made / "out"
    heldout, train = FeatureStore.open(out / "heldout"), FeatureStore.open(out / "train")
    assert (heldout.manifest.answers, train.manifest.answers) == ("own", "given")
    assert heldout.manifest.source == str(out / "heldout-answers.jsonl")
    assert first_choices(heldout, tiny_target) > 0.9 and first_choices(train, tiny_target) < 0.5
    given, own = records(made / "heldout.jsonl"), records(out / "heldout-answers.jsonl")
    assert [one["conversations"][0] for one in own] == [one["conversations"][0] for one in given][: len(own)]
    assert own[0]["conversations"][1] != given[0]["conversations"][1]


def test_one_rank_answers_and_the_next_goes_on_when_it_dies(tmp_path, speaker, made, capsys):
    """Catches two ranks that write the same file, and ranks that wait for a dead one."""
    config = write_config(tmp_path, speaker, **OWN)
    out = tmp_path / "out"
    out.mkdir()
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold, str(out / LOCK)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()  # it has the lock
        waiting = threading.Thread(target=run, args=(config, "--rank", "0", "--ranks", "2"))
        waiting.start()
        said = ""
        while waiting.is_alive() and "waiting for the process that writes it" not in said:
            said += capsys.readouterr().out
            time.sleep(0.02)
        time.sleep(0.2)
        assert waiting.is_alive() and not list(out.glob("heldout-answers*"))
        writer.kill()
        waiting.join(120)
    answers = out / "heldout-answers.jsonl"
    assert records(answers) == records(made / "out" / answers.name)
    written = answers.stat().st_mtime_ns
    run(config, "--rank", "1", "--ranks", "2")
    assert answers.stat().st_mtime_ns == written
    assert read_manifest(out / "heldout").complete and read_manifest(out / "train").complete


def test_a_store_holds_one_kind_of_answers(tmp_path, speaker, made):
    """Catches a store of given answers continued as one of own, or the other way round, or an old one refused."""
    given = write_config(tmp_path, speaker, **OWN | {"heldout_answers": "given"})
    run(given)
    manifest = tmp_path / "out" / "heldout" / MANIFEST
    facts = json.loads(manifest.read_text())
    assert facts["answers"] == "given"
    for answers in ("given", None):  # None: of a version that did not write it down
        manifest.write_text(json.dumps({**facts, "answers": answers}))
        run(given)
        with pytest.raises(ValueError, match=r"keep that store with heldout_answers=given, or delete it"):
            run(given, "heldout_answers=own")
    assert not list((tmp_path / "out").glob("heldout-answers*"))  # refused before an answer is written
    with pytest.raises(ValueError, match="answers 'own' there, 'given' here"):
        run(made / "features.yaml", "heldout_answers=given")


def test_answers_that_are_its_own_already_are_taken_as_they_are(tmp_path, speaker, made, tiny_target):
    """Catches minutes spent on answers that are there; a sidecar that vouches for another target or another file."""
    source = tmp_path / "own.jsonl"
    for suffix in ("", ".json"):  # as data_prep.regenerate leaves them
        shutil.copy(f"{made / 'out' / 'heldout-answers.jsonl'}{suffix}", f"{source}{suffix}")
    config = write_config(tmp_path, speaker, **OWN, splits={"heldout": str(source)})
    run(config)
    found = read_manifest(tmp_path / "out" / "heldout")
    assert (found.answers, found.source) == ("own", str(source))
    assert not list((tmp_path / "out").glob("heldout-answers*"))
    assert whose(found.model_copy(update={"source_digest": "of another file"})) == "given"  # replaced since
    sidecar, header = Path(f"{source}.json"), found.model_copy()
    facts = json.loads(sidecar.read_text())
    for key, other in (("target_fingerprint", "x"), ("tokenizer_hash", "x"), ("chat_template", "x")):
        sidecar.write_text(json.dumps({**facts, "identity": {**facts["identity"], key: other}}))
        assert whose(header) == "given", key
    for changed, expected in (
        ({"identity": {**facts["identity"], "temperature": 0.7}}, "sampled"),
        ({"digest": "of another file"}, "given"),
        ({"identity": {"endpoint.model": "gpt"}}, "given"),
        ({}, "own"),
    ):
        sidecar.write_text(json.dumps({**facts, **changed}))
        assert whose(header) == expected, changed
    for text in ("[]", "not json"):
        sidecar.write_text(text)
        assert whose(header) == "given"


def train(features: Path, target: Path, out: Path) -> dict[str, Any]:
    """A step of training, and its summary."""
    values = tiny_run.settings(str(target), features, out, steps=1, batch_tokens=512)
    tiny_run.train_here("eagle", values)
    return json.loads((out / "summary.json").read_text())["heldout_answers"]


def test_training_says_whose_answers_it_is_judged_on(tmp_path, speaker, made, tiny_target, capsys):
    """Catches fine figures on somebody else's answers without a word; a command in the warning that does not help."""
    found = train(made / "out", speaker, tmp_path / "own")
    store = FeatureStore.open(made / "out" / "heldout")
    assert found["answers"] == "own" and found["warning"] is None
    assert found["own_share"] == pytest.approx(first_choices(store, tiny_target))
    # The same dialogues with the answers that came with them.
    folder = tmp_path / "my data"
    folder.mkdir()
    run(write_config(folder, speaker, **OWN | {"heldout_answers": "given", "exit_layers": [2]}))
    capsys.readouterr()
    found = train(folder / "out", speaker, tmp_path / "given")
    assert found["answers"] == "given" and found["own_share"] < 0.5
    said = capsys.readouterr().out
    assert said.count(f"warning: {found['warning']}") == 2  # at the start, and where a run of hours ends
    assert [OWN_SHARE in row for row in read_metrics(tmp_path / "given")].count(True) == 1
    store_there = folder / "out" / "heldout"
    how = f"To measure on its own answers: delete {store_there}, then run data_prep.features with heldout_answers=own"
    assert found["warning"].endswith(how)
    shutil.rmtree(store_there)  # as the warning says
    run(folder / "features.yaml", "heldout_answers=own")
    assert train(folder / "out", speaker, tmp_path / "again")["warning"] is None
