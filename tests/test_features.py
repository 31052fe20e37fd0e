"""python -m data_prep.features: what is stored is what the target computes, also after a kill -9."""

import datetime
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_run
import torch
import yaml
from chat_formats import CHAT_VOCAB, CHATML, CHATML_SPECIALS, DATED, byte_level, chatml, dialogue, pretend_today
from programs import refused

from data_prep import features
from data_prep.common import disk
from data_prep.common import target as loading
from data_prep.dialogues.encoding import encode_split, template_hash, tokenizer_hash
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.extraction import headers
from data_prep.extraction.dump import FORWARD_COST, plan_batches
from data_prep.store.manifest import MANIFEST, plan_shards, read_manifest
from data_prep.store.reader import FeatureStore
from drafters.common.wording import size_text
from drafters.model.target import TargetModel


def write_data(path: Path, count: int, first: int = 0, extra: list[str] | None = None) -> Path:
    lines = [json.dumps(dialogue(index)) for index in range(first, first + count)]
    path.write_text("\n".join([*(extra or []), *lines]))
    return path


def write_config(folder: Path, target: Path, count: int = 12, **changes: Any) -> Path:
    write_data(folder / "train.jsonl", count, extra=["not json", json.dumps({"conversations": []})])
    write_data(folder / "heldout.jsonl", 3, first=1000)
    settings = {
        "target": str(target),
        "dtype": "float32",
        "device": "cpu",
        "splits": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
        "out": str(folder / "out"),
        "exit_layers": [2],
        "max_length": 128,
        "batch_tokens": 256,
        "shard_tokens": 200,
        "heldout_answers": "given",  # own ones: tests/test_heldout_answers.py
    }
    file = folder / "features.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def run(config: Path, *overrides: str) -> None:
    features.main(["--config", str(config), *overrides])


def test_the_store_holds_what_the_target_computes(tmp_path, target_folder, capsys):
    """Catches padding that leaks into features, rows in the wrong order, taps off by a layer, a mask off its tokens."""
    run(write_config(tmp_path, target_folder, exit_layers=[2, 4]))
    store = FeatureStore.open(tmp_path / "out" / "train")
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    chat = ChatTokenizer(chatml())
    expected = encode_split(str(tmp_path / "train.jsonl"), chat, 128)
    assert len(store) == len(expected.dialogues) == 12
    assert len(store.manifest.shards) > 2
    for stored, tokens in zip(store, expected.dialogues, strict=True):
        assert stored.input_ids.tolist() == tokens.input_ids.tolist()
        assert stored.loss_mask.tolist() == tokens.loss_mask.tolist()
        output = target.model(input_ids=stored.input_ids[None], output_hidden_states=True)
        torch.testing.assert_close(stored.features, output.hidden_states[-1][0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(target.lm_head(stored.features), output.logits[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(stored.taps[2], output.hidden_states[2][0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(target.body.norm(stored.taps[4]), stored.features, atol=1e-4, rtol=1e-3)
    manifest = store.manifest
    assert manifest.dropped == {"broken_json": 1, "empty_dialogue": 1}
    assert manifest.target_fingerprint == target.fingerprint()
    assert (manifest.hidden_size, manifest.vocab_size, manifest.taps) == (target.hidden_size, CHAT_VOCAB, [2, 4])
    assert manifest.response_tokens == sum(int(tokens.loss_mask.sum()) for tokens in expected.dialogues)
    assert len(FeatureStore.open(tmp_path / "out" / "heldout")) == 3
    printed = capsys.readouterr().out
    assert "train: " in printed and "12 kept, dropped 2 (" in printed and "broken_json 1" in printed


@pytest.mark.parametrize(("family", "taps"), [("qwen3_5_text", [2]), ("bamba", [])])
def test_a_target_with_a_running_state(tmp_path: Path, family: str, taps: list[int]) -> None:
    """Catches a state that has read the padding of a batch or the dialogue before, and states that are one layer off.

    The reference reads each dialogue alone, token by token, over the cache that decoding uses.
    """
    families.saved(family, families.DECODED[family] | {"vocab_size": CHAT_VOCAB}, tmp_path / "target")
    byte_level(CHATML, CHATML_SPECIALS, None, "<|im_end|>", vocab_size=CHAT_VOCAB).save_pretrained(tmp_path / "target")
    run(write_config(tmp_path, tmp_path / "target", count=6, exit_layers=taps))
    store = FeatureStore.open(tmp_path / "out" / "train")
    assert len(store) == 6 and len({len(stored.input_ids) for stored in store}) > 1
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    for stored in list(store)[:2]:
        cache, outputs = target.new_cache(1, len(stored.input_ids)), []
        for token in stored.input_ids[None].split(1, dim=1):
            outputs.append(target.run(token, cache, taps=tuple(taps)))
            cache.commit_first([1])
        features = torch.cat([output.features[0] for output in outputs])
        torch.testing.assert_close(stored.features, features, atol=1e-4, rtol=1e-3)
        for tap in taps:
            states = torch.cat([output.taps[tap][0] for output in outputs])
            torch.testing.assert_close(stored.taps[tap], states, atol=1e-4, rtol=1e-3)


def test_a_finished_store_is_skipped(tmp_path, target_folder, monkeypatch, capsys):
    """Catches a second run that loads the target or writes again when all is there, or mixes in another template."""
    config = write_config(tmp_path, target_folder)
    run(config)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.safetensors")}
    capsys.readouterr()

    def never(*arguments, **options):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(TargetModel, "from_pretrained", never)
    run(config)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("is finished already: " in line for line in lines)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.safetensors")} == before
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    template = CHATML.replace("user", "human") + " "
    (other / "chat_template.jinja").write_text(template)
    with refused(rf"template_hash '{template_hash(CHATML)}' there, '{template_hash(template)}' here"):
        run(config, f"target={other}")


def test_long_dialogues_are_cut_and_counted(tmp_path, target_folder):
    """Catches dialogues above max_length kept whole, dropped, or kept with no answer left in them."""
    config = write_config(tmp_path, target_folder, exit_layers=[])
    question = {"from": "human", "value": "Why? " * 40}
    records = [
        {"id": "cut", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes " * 90}]},
        {"id": "nothing left", "conversations": [question, {"from": "gpt", "value": "No."}]},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    run(config, "max_length=64")
    store = FeatureStore.open(tmp_path / "out" / "train")
    assert store.lengths.tolist() == [64] and bool(store[0].loss_mask[-1])
    assert store.manifest.changed == {"truncated": 1} and store.manifest.dropped == {"no_response_left": 1}
    (tmp_path / "train.jsonl").write_text(json.dumps(records[1]))
    with refused("no dialogue is left for training: 0 kept, dropped 1 \\(no_response_left 1\\)"):
        run(config, "max_length=64", f"out={tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("exit_layers=[5]", r"exit_layers \[5\]: .* has 4 layers; choose from 1 to 4"),
        ("exit_layers=[2,2]", "each layer at most once"),
        ("for=[eagle2]", r"for\.?.*: unknown method eagle2; known: dflash, dflash2, dspark, eagle, eagle3"),
        ("for=[eagle, dflash]", r"dflash: the target has 4 layers, and 5 different taps need at least 6"),
        ("fro=[eagle3]", "unknown key 'fro'; did you mean 'for'"),
        ("max_length=512", r"max_length is 512, .* made for 256 tokens; set max_length=256"),
        ("batch_tokens=20", r"batch_tokens is 20, and the longest .* has (\d+) tokens; set batch"),
        ("splits.trian=TRAIN", "training reads splits named train and heldout, found trian"),
        ('splits={"../up": "x.jsonl"}', "a split's name becomes a folder"),
        ("chat_template=none.jinja", r"chat_template: no file none\.jinja"),
        ("splits.heldout=TRAIN", "splits '.*' and '.*' are the same data"),
    ],
)
def test_mistakes_are_found_before_the_target_is_loaded(tmp_path, target_folder, monkeypatch, override, message):
    """Catches an hour of loading and tokenizing before a message that could have come at once."""
    config = write_config(tmp_path, target_folder)
    override = override.replace("TRAIN", str(tmp_path / "train.jsonl"))
    monkeypatch.setattr(loading, "TargetModel", None)
    with refused(message):
        run(config, override)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_model(tmp_path, target_folder):
    """Catches an index error inside the embedding after an hour."""
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    big = byte_level(CHATML, [*CHATML_SPECIALS, *(f"<{i}>" for i in range(60))], None, "<|im_end|>", vocab_size=330)
    big.save_pretrained(other)
    with refused(rf"has {len(big)} tokens, the model {CHAT_VOCAB}"):
        run(write_config(tmp_path, other))


def test_a_template_that_hangs_on_an_answers_end(tmp_path):
    """Catches a long answer cut before the template saw where the thoughts end that it leaves out: they are trained."""
    template = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    chat = ChatTokenizer(byte_level(template, CHATML_SPECIALS, None, "<|im_end|>", vocab_size=CHAT_VOCAB))
    splits = []
    for number, thoughts in enumerate(("", "<think>" + "on and on " * 10_000 + "</think>")):
        turns = [{"from": "human", "value": "Go on."}, {"from": "gpt", "value": f"{thoughts}It is four."}]
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"conversations": turns}))
        splits.append(encode_split(str(file), chat, 64))
    (plain,), (thought,) = (split.dialogues for split in splits)
    assert thought.input_ids.tolist() == plain.input_ids.tolist()
    assert thought.loss_mask.tolist() == plain.loss_mask.tolist()


def test_one_pass_for_many_drafters(tmp_path, target_folder):
    """Catches a method's layers left out of the union, or named by the neighbour's name in the manifest."""
    config = write_config(tmp_path, target_folder, exit_layers=[])
    with refused("for: kangaroo has no default layer; name its exit layer"):
        run(config, "for=[eagle3, kangaroo]")
    run(config, "for=[eagle, eagle3, kangaroo, medusa]", "exit_layers=[2]")
    store = FeatureStore.open(tmp_path / "out" / "train")
    assert store.manifest.taps == [1, 2, 3] == list(store[0].taps)
    assert store.manifest.states == {
        "features": "output of the final norm = hidden_states[-1]",
        "tap_1": "output of layer 0 = hidden_states[1]",
        "tap_2": "output of layer 1 = hidden_states[2]",
        "tap_3": "output of layer 2 = hidden_states[3]",
    }
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    recorded = target.model(input_ids=store[1].input_ids[None], output_hidden_states=True).hidden_states
    for tap, values in store[1].taps.items():
        torch.testing.assert_close(values, recorded[tap][0], atol=1e-4, rtol=1e-3)
    # A store from before the names is complete and readable, and the same command leaves it as it is.
    file = tmp_path / "out" / "train" / MANIFEST
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "states"}))
    assert FeatureStore.open(file.parent).manifest.states == {}
    run(config, "exit_layers=[1, 2, 3]")


def test_a_head_of_the_targets_layers_is_asked_for_alone(tmp_path, target_folder, monkeypatch):
    """Catches a target refused for the head of another method: EAGLE-3's layer does not depend on the family."""

    def none(*arguments, **options):
        raise ValueError("no head of these layers")

    monkeypatch.setattr(headers, "KangarooAdapter", none)
    monkeypatch.setattr(headers, "EagleHead", none)
    config = write_config(tmp_path, target_folder, exit_layers=[])
    features.main(["--config", str(config), "--dry-run", "for=[eagle3, medusa]"])
    for override in ("for=[eagle3, eagle]", "for=[]", "exit_layers=[1]"):
        with refused("no head of these layers"):
            features.main(["--config", str(config), "--dry-run", override])


@pytest.mark.parametrize("answers", ["given", "own"])
def test_sizes_before_the_pass(tmp_path, target_folder, monkeypatch, capsys, answers):
    """Catches a dry run that loads weights or writes, sizes that are not those of the store, and a full disk unseen."""
    config = str(write_config(tmp_path, target_folder, heldout_answers=answers, heldout_new_tokens=8))
    arguments = ["--config", config, "for=[eagle3]"]
    with monkeypatch.context() as patched:
        patched.setattr(loading, "TargetModel", None)
        features.main([*arguments, "--dry-run"])
        printed = capsys.readouterr().out
        assert not (tmp_path / "out").exists()
        usage = namedtuple("usage", "total used free")
        patched.setattr(disk.shutil, "disk_usage", lambda place: usage(10**6, 10**6 - 5_000, 5_000))
        with refused(r"out: .* needs \d+ kB, and 5\.00 kB are free"):
            features.main([*arguments, "--dry-run"])
    hidden = TargetModel.from_pretrained(str(target_folder), "float32", "cpu").hidden_size
    for name in ("output of the final norm = hidden_states[-1]", "output of layer 2 = hidden_states[3]"):
        assert re.search(rf"^{re.escape(name)} +{4 * hidden} +\d.* kB$", printed, flags=re.MULTILINE), printed
    assert ("sized by the file's answers" in printed) == (answers == "own")
    assert re.search(rf"^all, in float32 +{5 + 4 * 4 * hidden:,} ", printed, flags=re.MULTILINE)
    (tokens,) = re.findall(r"bytes per token +([\d,]+) tokens", printed)
    saved = 4 * (3 * hidden - 4)  # four states, each of them with a scale
    assert f"store_dtype int8 saves {size_text(saved * int(tokens.replace(',', '')))} " in printed
    capsys.readouterr()
    run(Path(config), "for=[eagle3]", "heldout_answers=given", "store_dtype=int8")
    printed = capsys.readouterr().out
    assert f"{5 + 4 * (hidden + 4):,} bytes" in printed and "int8 saves" not in printed
    stores = [FeatureStore.open(tmp_path / "out" / split).manifest for split in ("train", "heldout")]
    assert sum(manifest.tokens for manifest in stores) == int(tokens.replace(",", ""))
    assert sum(manifest.size for manifest in stores) == pytest.approx(stores[0].token_bytes * stores[0].tokens
        + stores[1].token_bytes * stores[1].tokens, rel=0.2)  # fmt: skip


def test_a_disk_that_is_too_small(tmp_path, target_folder, monkeypatch):
    """Catches a dump that dies of a full disk after hours though its size was known from the start."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: usage(10**6, 10**6 - 5_000, 5_000))
    with refused(r"out: .* needs \d+ kB, and 5\.00 kB are free at .*store_dtype int8"):
        run(write_config(tmp_path, target_folder))
    config = write_config(tmp_path, target_folder, store_dtype="int8")  # the estimate knows how much smaller that is
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: usage(10**6, 0, 150_000))
    run(config)
    bytes_in_all = sum(FeatureStore.open(tmp_path / "out" / split).manifest.size for split in ("train", "heldout"))
    assert bytes_in_all < 150_000


def test_killed_run_continues_to_the_same_bytes(tmp_path, target_folder, capsys):
    """Catches dialogues lost, doubled or computed otherwise after a kill -9 in the middle of the dump."""
    config = write_config(tmp_path, target_folder, count=80, shard_tokens=40)
    command = [sys.executable, "-m", "data_prep.features", "--config", str(config)]
    store = tmp_path / "out" / "train"
    process = tiny_run.begin(command, tmp_path / "killed.log")
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if len(list(store.glob("shard-*.json"))) >= 3:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL
    state = read_manifest(store)
    assert not state.complete and len(state.shards) >= 3
    first = store / "shard-00000.safetensors"
    written = first.stat().st_mtime_ns
    capsys.readouterr()
    run(config)
    resumed = capsys.readouterr().out
    assert re.search(r"continuing after \d+ shards", resumed)
    assert first.stat().st_mtime_ns == written
    run(config, f"out={tmp_path / 'whole'}")
    for split in ("train", "heldout"):
        whole = sorted((tmp_path / "whole" / split).glob("shard-*"))
        assert [p.name for p in whole] == [p.name for p in sorted((tmp_path / "out" / split).glob("shard-*"))]
        assert all(p.read_bytes() == (tmp_path / "out" / split / p.name).read_bytes() for p in whole)
        stores = [FeatureStore.open(tmp_path / out / split) for out in ("whole", "out")]
        stores[1].verify()
        assert stores[0].manifest.model_copy(update={"commit": stores[1].manifest.commit}) == stores[1].manifest
    assert len(FeatureStore.open(tmp_path / "out" / "train")) == 80


def test_a_chat_template_from_a_file(tmp_path, target_folder):
    """Catches a template file that is ignored, or that changes the store without changing its template_hash."""
    bare = tmp_path / "bare"
    shutil.copytree(target_folder, bare)
    (bare / "chat_template.jinja").unlink()
    config = write_config(tmp_path, bare, exit_layers=[])
    with refused("has no chat template"):
        run(config)
    template = "PREAMBLE " + CHATML
    (tmp_path / "other.jinja").write_text(template)
    for target in (bare, target_folder):  # in place of none, and of the tokenizer's own
        run(config, f"target={target}", f"chat_template={tmp_path / 'other.jinja'}", f"out={tmp_path / target.name}")
        store = FeatureStore.open(tmp_path / target.name / "train")
        assert store.manifest.template_hash == template_hash(template)
        assert store.manifest.chat_template == str(tmp_path / "other.jinja")
        tokenizer = chatml()
        assert tokenizer.decode(store[0].input_ids).startswith("PREAMBLE <|im_start|>user")


@pytest.mark.parametrize("answers", ["given", "own"])
def test_a_dated_template_prints_the_day_on_which_the_store_was_begun(
    tmp_path, target_folder, monkeypatch, capsys, answers
):
    """Catches a store finished on another day refused, with advice about library versions, or mixed of two dates."""
    (tmp_path / "dated.jinja").write_text(DATED)
    changes = {"chat_template": str(tmp_path / "dated.jinja"), "heldout_answers": answers, "heldout_new_tokens": 8}
    config = write_config(tmp_path, target_folder, **changes)
    pretend_today(monkeypatch, datetime.date(2024, 2, 9))
    run(config, f"out={tmp_path / 'whole'}")
    features.main(["--config", str(config), "--rank", "0", "--ranks", "2"])
    assert not read_manifest(tmp_path / "out" / "train").complete
    pretend_today(monkeypatch, datetime.date(2024, 11, 28))
    features.main(["--config", str(config), "--rank", "1", "--ranks", "2"])
    for split in ("train", "heldout"):
        whole, store = (FeatureStore.open(tmp_path / out / split) for out in ("whole", "out"))
        assert store.manifest.template_date == "2024-02-09"
        assert [one.sha256 for one in whole.manifest.shards] == [one.sha256 for one in store.manifest.shards]
    file = tmp_path / "out" / "train" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"template_date": None}))  # as it was written before
    capsys.readouterr()
    run(config)
    assert capsys.readouterr().out.count("is finished already") == (2 if answers == "given" else 3)


def test_plans():
    """Catches dialogues left out, doubled or in oversized batches, and a resumed plan that differs from the first."""
    lengths = [5, 9, 1, 7, 7, 30, 2, 4]
    batches = plan_batches(lengths, 14)
    assert sorted(index for batch in batches for index in batch) == list(range(8))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 14 for batch in batches)
    # A second forward costs FORWARD_COST tokens, and saves the padding of short rows in a long batch.
    assert plan_batches([300, 300, 300 - FORWARD_COST // 2 + 1, 300 - FORWARD_COST // 2 + 1], 10_000) == [[0, 1, 2, 3]]
    assert plan_batches([300, 300, 300 - FORWARD_COST // 2 - 1, 300 - FORWARD_COST // 2 - 1], 10_000) == [
        [0, 1],
        [2, 3],
    ]
    shards = list(plan_shards(lengths, 10))
    assert shards == [(0, 2), (2, 5), (5, 6), (6, 8)]
    assert list(plan_shards([], 10)) == []


def test_tokenizer_hash():
    """Catches a hash that changes between loads, or that two tokenizers of the same vocabulary size share."""
    one = byte_level(CHATML, CHATML_SPECIALS, None, "<|im_end|>")
    assert tokenizer_hash(one) == tokenizer_hash(byte_level(None, CHATML_SPECIALS, None, "<|im_end|>"))
    assert tokenizer_hash(one) != tokenizer_hash(byte_level(CHATML, CHATML_SPECIALS, None, "<|endoftext|>"))
    assert tokenizer_hash(one) != tokenizer_hash(byte_level(CHATML, ["<a>", *CHATML_SPECIALS[1:]], None, "<|im_end|>"))
