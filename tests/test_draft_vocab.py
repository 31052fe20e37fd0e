"""Which tokens are drafted with: counted in training, exported, measured on held-out text, and added afterwards."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.store.reader import FeatureStore
from drafters import TargetModel, load_drafter, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.hub.checkpoint import make_config, save_checkpoint
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.model.draft_head import DRAFT_IDS, DRAFT_IDS_FILE
from train.core.losses import Pairs
from train.core.task import make_task
from train.data.draft_vocab import count_answers, most_frequent
from train.run.files import read_metrics
from train.tools import draft_vocab
from train.watch.flops import training_cost


def test_frequency_by_hand() -> None:
    """Catches prompts that are counted, and an order of equals that depends on the machine."""
    first = torch.tensor([4, 4, 2, 1, 1, 1]), torch.tensor([False, False, True, True, True, False])
    second = torch.tensor([3, 2]), torch.tensor([True, True])
    counts = count_answers([first, second], vocab=6)
    assert counts.tolist() == [0, 2, 2, 1, 0, 0]
    assert most_frequent(counts, 6).tolist() == [1, 2, 3, 0, 4, 5] and most_frequent(counts, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"draft_vocab is 7, more than the vocabulary's 6 tokens"):
        most_frequent(counts, 7)


def test_training_exports_what_it_counted(target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches ids of other text, a held-out coverage of all tokens or of the head's, and a tau of the whole LM head."""
    values = tiny_run.settings(target.name, features, tmp_path / "run", steps=2, draft_vocab=30, heldout_tokens=10**6)
    run = tiny_run.train_here("eagle", values)
    counts: Counter[int] = Counter()
    for one in FeatureStore.open(features / "train"):
        counts.update(one.input_ids[one.loss_mask].tolist())
    kept = sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))[:30]
    drafter: Any = load_drafter(str(tmp_path / "run"), target, draft_text=0)
    assert drafter.lm_head.ids.tolist() == kept and drafter.module.draft_ids.dtype == torch.int32
    covered = total = 0
    for one in FeatureStore.open(features / "heldout"):
        answered = one.loss_mask[2:].nonzero()[:, 0] + 1  # the features that give the answers' tokens
        chosen = target.lm_head(one.features[answered].float()).argmax(-1)
        covered, total = covered + sum(token in kept for token in chosen.tolist()), total + len(chosen)
    row = [row for row in read_metrics(tmp_path / "run") if "heldout_loss" in row][-1]
    assert row["heldout_draft_vocab_coverage"] == pytest.approx(covered / total, abs=1e-9) and 0 < covered < total
    made = run.task.drafters(target, run.engine.weights())
    assert all(one.lm_head.width - one.lm_head.text == 30 for one in made.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_further_training_keeps_the_tokens(
    target: TargetModel, features: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    """Catches tokens that are counted again in the new data, and so published with its frequencies, that a resumed run
    loses, or that tau is not measured with."""
    options = {"draft_vocab": 30, "draft_dtype": "int8"}
    listed = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))[:50].int()
    head = EagleHead(target.config).state_dict() | {"draft_ids": listed}
    save_checkpoint(tmp_path / "head", head, make_config("eagle", options, target))
    values = tiny_run.settings(target.name, features, tmp_path / "run", init_from=str(tmp_path / "head"), lora=lora)
    for steps in (2, 4):
        run = tiny_run.train_here("eagle", values | {"steps": steps, "save_every": 2}, resume=steps > 2)
        drafter: Any = load_drafter(str(tmp_path / "run"), target, draft_text=0)
        measured = run.task.drafters(target, run.engine.weights())
        for one in (drafter, *measured.values()):
            assert one.lm_head.ids[:30].tolist() == listed[:30].tolist()
            assert (one.settings.draft_vocab, one.settings.draft_dtype) == (30, "int8")


@pytest.mark.parametrize("method", ["eagle", "kangaroo"])
def test_loss_vocab_by_hand(target: TargetModel, features: Path, tmp_path: Path, method: str) -> None:
    """Catches distributions over other tokens, over all of them, or not renormalised over those that are left; a
    gradient through other rows of the LM head; FLOPs that are not saved; and a resumed run with another loss."""
    more = {"loss_vocab": 30} | ({"exit_layer": tiny_run.TAP} if method == "kangaroo" else {})
    values = tiny_run.settings(target.name, features, tmp_path / "run", **{"steps": 2, "save_every": 2, **more})
    task = tiny_run.train_here(method, values).task
    counts: Counter[int] = Counter()
    for one in FeatureStore.open(features / "train"):
        counts.update(one.input_ids[one.loss_mask].tolist())
    kept = sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))[:30]
    predicted, known = torch.randn(2, 5, target.hidden_size).unbind()
    predicted.requires_grad_()
    q, p = (task.ends.lm_head(rows)[:, kept].float() for rows in (predicted, known))
    expected = -(p.softmax(-1) * q.log_softmax(-1)).sum()
    loss = task.heads.classification(Pairs(predicted[None], known)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(value, [predicted]) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    whole = make_task(task.config.model_copy(update={"loss_vocab": None}), task.ends)
    assert training_cost(task).row * target.vocab_size == training_cost(whole).row * 30
    with pytest.raises(ValueError, match="loss_vocab"):
        tiny_run.train_here(method, {**values, "steps": 4, "loss_vocab": 31}, resume=True)
    with pytest.raises(ValueError, match="loss_vocab is 98, more than the vocabulary's 97 tokens"):
        tiny_run.train_here(method, {**values, "out": str(tmp_path / "other"), "loss_vocab": 98})


@pytest.fixture
def dialogues(tmp_path: Path) -> Path:
    """A ShareGPT file of three dialogues."""
    turns = [("one", "two two"), ("three", "a longer answer, with two words more"), ("two", "two")]
    both = [[{"from": "human", "value": said}, {"from": "gpt", "value": answer}] for said, answer in turns]
    (tmp_path / "data.json").write_text(json.dumps([{"conversations": conversation} for conversation in both]))
    return tmp_path / "data.json"


def eagle_of(folder: Path, out: Path) -> TargetModel:
    """An EAGLE checkpoint without ids in ``out``; its target."""
    target = TargetModel.from_pretrained(str(folder), "float32", "cpu")
    EagleDrafter(target, EagleHead(target.config), EagleOptions(top_k=3)).save_pretrained(out)
    return target


def test_ids_are_added_to_a_drafter(
    target_folder: Path, dialogues: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a command that changes weights or options, counts prompts, or leaves the drafter as it was."""
    target = eagle_of(target_folder, tmp_path / "eagle")
    before = load_file(tmp_path / "eagle" / "model.safetensors")
    for size in (40, 12):  # again, over the first ones
        draft_vocab.main([str(tmp_path / "eagle"), "--data", str(dialogues), "--size", str(size)])
    after = load_file(tmp_path / "eagle" / "model.safetensors")
    split = encode_split(str(dialogues), load_tokenizer(str(target_folder)), 1000)
    counts = Counter(int(token) for one in split.dialogues for token in one.input_ids[one.loss_mask])
    kept = sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))[:12]
    assert after.pop(DRAFT_IDS).tolist() == kept
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    drafter: Any = load_drafter(str(tmp_path / "eagle"), target, draft_text=0)
    assert drafter.lm_head.ids.tolist() == kept and drafter.settings.top_k == 3
    share = sum(counts[token] for token in kept) / counts.total()
    assert f"draft_vocab=12      covers {share:.2%} of the {counts.total()} tokens" in capsys.readouterr().out


def test_ids_are_added_to_a_draft_model(target_folder: Path, tmp_path: Path) -> None:
    """Catches a file that the methods with a draft model do not find, and a text whose end is never drafted."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in target_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (tmp_path / "text.txt").write_text("some words\n" * 5000)
    draft_vocab.main([str(folder), "--data", str(tmp_path / "text.txt"), "--size", "6"])
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]  # what engines load as weights
    assert len(json.loads((folder / DRAFT_IDS_FILE).read_text())) == 6
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    drafter: Any = make_drafter("speculative", target, draft_model=str(folder), draft_vocab=5)
    tokenizer = load_tokenizer(str(target_folder)).tokenizer
    assert tokenizer.eos_token_id in drafter.lm_head.ids
    assert tokenizer("some words\n")["input_ids"][0] in drafter.lm_head.ids
