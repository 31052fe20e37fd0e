"""Training of the bundled target: schedule, packing, resuming, export."""

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.stdlib_corpus import main as make_corpus
from train.configs import TargetConfig
from train.target import run as target_run
from train.target.data import pack_rows

SHAPE = {"vocab_size": 400, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
SHAPE |= {"intermediate_size": 48, "max_positions": 128}


@pytest.fixture(scope="module")
def corpus(small_stdlib, tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus")
    make_corpus(["--out", str(out), "--stdlib", str(small_stdlib), "--max-dialogues", "120"])
    return out


def tiny(corpus, folder, **changes):
    raw = {"name": "tiny", "corpus": corpus, "run_dir": folder / "run", "final_dir": folder / "final", "model": SHAPE}
    raw |= {"steps": 6, "warmup_steps": 2, "seq_len": 64, "batch_rows": 2, "eval_every": 4, "eval_tokens": 500}
    return TargetConfig.model_validate(raw | changes)


def losses(config):
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


class KilledError(Exception):
    """Replaces kill -9."""


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_killed_run_resumes_bit_for_bit(corpus, tmp_path, monkeypatch, precision):
    """Catches optimiser state, data position, masters or metrics lost between a checkpoint and its resumption."""
    whole = tiny(corpus, tmp_path / "whole", precision=precision)
    target_run.TargetRun(whole, False, []).train()
    cut = tiny(corpus, tmp_path / "cut", precision=precision, save_minutes=0)
    run, step = target_run.TargetRun(cut, False, []), target_run.TargetRun.train_step

    def dies(self, batch):
        if self.progress.step == 3:
            raise KilledError
        return step(self, batch)

    monkeypatch.setattr(target_run.TargetRun, "train_step", dies)
    with pytest.raises(KilledError):
        run.train()
    monkeypatch.undo()
    (cut.run_dir / "checkpoint-00000009.tmp").mkdir()  # half-written when the kill came
    target_run.TargetRun(cut, True, []).train()
    assert losses(cut) == losses(whole)
    assert sorted(losses(cut)) == [1, 2, 3, 4, 5, 6]


def test_a_second_run_does_not_overwrite_the_first(corpus, tmp_path):
    """Catches a long run lost to a forgotten --resume."""
    config = tiny(corpus, tmp_path, steps=1)
    target_run.TargetRun(config, False, []).train()
    with pytest.raises(ValueError, match="--resume"):
        target_run.TargetRun(config, False, [])
    with pytest.raises(ValueError, match="no checkpoint"):
        target_run.TargetRun(tiny(corpus, tmp_path / "other"), True, [])


def test_a_draft_model_takes_its_targets_tokenizer(corpus, tmp_path):
    """Catches a draft model with a tokenizer of its own, whose drafts mean nothing to the target; or too few rows."""
    target = tmp_path / "target"
    target_run.run(tiny(corpus, target, steps=1), False, [])
    shape = SHAPE | {"vocab_size": 410, "layers": 1}
    other = {"tokenizer": str(target / "final"), "steps": 1}
    copy = shutil.copytree(corpus, tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer-*", "manifest.json"))
    config = tiny(copy, tmp_path / "draft", **other, model=shape)
    target_run.run(config, False, [])
    texts = [
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
        for folder in (target / "final", config.final_dir)
    ]
    assert texts[0] == texts[1] and not list(copy.glob("tokenizer-*"))
    drafted = AutoModelForCausalLM.from_pretrained(config.final_dir, trust_remote_code=False)
    assert drafted.config.vocab_size == 410
    card = (config.final_dir / "README.md").read_text()
    assert f"those of {target / 'final'}" in card and "standard library" not in card
    with pytest.raises(ValueError, match=r"has 4\d\d tokens, and model.vocab_size is 300"):
        target_run.TargetRun(tiny(copy, tmp_path / "less", **other, model=shape | {"vocab_size": 300}), False, [])


def test_export_loads_with_stock_classes_and_has_a_card(corpus, tmp_path):
    """Catches an export that only this repository can read, or one that computes something else."""
    config = tiny(corpus, tmp_path, steps=3)
    run = target_run.TargetRun(config, False, [])
    run.train()
    run.finish(new_tokens=5)
    model = AutoModelForCausalLM.from_pretrained(config.final_dir)
    tokenizer = AutoTokenizer.from_pretrained(config.final_dir)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>") == tokenizer.eos_token_id
    rows = run.heldout_rows[:2]
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits.float()
        ours = float(target_run.next_token_loss(run.model, rows, "bf16"))
    stock = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    assert abs(stock - ours) < 0.02
    card = (config.final_dir / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0") and "| 3 |" in card
    assert json.loads((config.run_dir / "run.json").read_text())["config"]["steps"] == 3


def test_chat_template(corpus, tmp_path):
    """Catches a template whose special tokens are split, or that loses a system message."""
    tokenizer = target_run.get_tokenizer(tiny(corpus, tmp_path))
    chat = [{"role": "user", "content": "What is os.walk?"}, {"role": "assistant", "content": "A\n    généra→tor."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>What is os.walk?<|assistant|>A\n    généra→tor.<|end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt) and prompt.endswith("<|assistant|>")
    system = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *chat], tokenize=False)
    assert system.startswith("<|user|>Be brief.\n\nWhat is os.walk?")
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_rows_are_full_and_begin_with_a_dialogue():
    """Catches padding, lost dialogues, and rows that begin in the middle of one."""
    documents = [[i * 100 + j for j in range(random.Random(i).randint(3, 60))] for i in range(200)]
    rows = pack_rows(documents, 40, random.Random(0))
    assert all(len(row) == 40 for row in rows)
    assert {token for row in rows for token in row} == {token for document in documents for token in document}
    short = [document for document in documents if len(document) <= 40]
    starts = sum(row[0] % 100 == 0 for row in rows)
    assert starts >= len(rows) - (len(documents) - len(short))
    assert rows == pack_rows(documents, 40, random.Random(0)) != pack_rows(documents, 40, random.Random(1))
