"""Boost-tuning: what is covered, what is left for the next draft model, and train.tools.boost from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_run
import torch
import yaml

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from drafters.model.ends import FrozenEnds
from train.core.lm_heads import LMHeads
from train.core.task import make_task
from train.data.packing import Batch, collate
from train.draft.coverage import covered_rows, right_rows
from train.run import boosting
from train.tools import boost

DRAFT = {"num_hidden_layers": 1, "hidden_size": 16, "tie_word_embeddings": True}


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> dict[str, Any]:
    tiny.build("llama", seed=1, **DRAFT).save_pretrained(tmp_path / "draft")
    values = tiny_run.settings(str(folder / "target"), folder / "features", tmp_path / "run")
    return values | {"draft_model": str(tmp_path / "draft")}


def test_covered_rows_worked_by_hand() -> None:
    """A speculation that is right at its first token alone, or one that an answer's end cuts short."""
    # one dialogue of eight tokens, tokens 2 to 6 its answer: rows 1 to 5 are about them
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]]).bool()
    empty = torch.zeros(1, 8, 1)
    batch = Batch(torch.zeros(1, 8).long(), mask, empty, {}, torch.arange(8)[None], torch.zeros(1, 8).long(), [])
    right = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0]]).bool()
    assert covered_rows(right, batch, 1)[0, 1:6].tolist() == [True, True, False, True, True]
    assert covered_rows(right, batch, 2)[0, 1:6].tolist() == [True, False, False, True, True]
    assert covered_rows(right, batch, 3)[0, 1:6].tolist() == [False, False, False, True, True]


def test_right_rows_are_the_targets_first_choices(
    folder: Path, store: FeatureStore, ends: FrozenEnds, target: TargetModel
) -> None:
    """A draft model compared with the text, or a token further; one that sees a neighbour in the packed row."""
    batch = collate(store, [3, 0, 1])
    answers = batch.shifted(batch.loss_mask, 1)
    settings = tiny_run.settings("t", Path("f"), Path("o"), draft_model="d", loss_chunk_rows=5)
    heads = LMHeads(tiny_run.read("draft_model", settings), ends.lm_head)
    assert right_rows(target, batch, heads)[answers].all()
    other = TargetModel(tiny.build("llama", seed=5))
    found = right_rows(other, batch, heads)
    for span in batch.spans:
        ids = batch.input_ids[:, span.start : span.start + span.length]
        expected = other.model(ids).logits[0].argmax(-1) == target.model(ids).logits[0].argmax(-1)
        assert torch.equal(found[0, span.start : span.start + span.length], expected)


def test_only_what_is_missed_is_trained(
    settings: dict[str, Any], folder: Path, store: FeatureStore, ends: FrozenEnds
) -> None:
    """Rows that an earlier draft model covers trained again, or the wrong ones left; a held-out dialogue that is taken
    for a training one of the same number."""
    task = make_task(tiny_run.read("draft_model", settings), ends)
    heldout = FeatureStore.open(folder / "features" / "heldout")
    batches = [collate(store, [0, 1, 2]), collate(heldout, [0, 1, 2])]
    after = {"after": [settings["draft_model"]]}
    model = TargetModel.from_pretrained(settings["draft_model"], "float32", "cpu")
    options = {"plain": after, "none kept": after | {"keep": 0.0}, "some": after | {"keep": 0.5}}
    for name, boosted in options.items():
        other = make_task(tiny_run.read("draft_model", settings | {"boost": boosted}), ends)
        for batch in (*batches, batches[0]):
            rows, left = task.rows(batch).tolist(), other.rows(batch).tolist()
            covered = covered_rows(right_rows(model, batch, task.heads), batch, 1).flatten()
            missed = [row for row in rows if not covered[row]]
            assert set(missed) <= set(left) <= set(rows)
            assert (left == missed) == (name != "some" or len(missed) == len(rows))
    target = make_task(tiny_run.read("draft_model", settings | {"boost": {"after": [settings["target"]]}}), ends)
    assert not len(target.rows(batches[0]))


def test_two_boosted_cover_more_than_two_alike(
    settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second model trained on all of the text, or judged alone; a finished training done again; a wrong table."""
    values = settings | {"steps": 60, "learning_rate": 0.02, "heldout_tokens": 1000}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    draft = settings["draft_model"]
    config = {"run": str(tmp_path / "run.yaml"), "draft_models": [draft, draft], "out": str(tmp_path / "boosted")}
    (tmp_path / "boost.yaml").write_text(yaml.safe_dump(config))
    lines: list[list[str]] = []

    def here(line: list[str], check: bool) -> Any:
        lines.append(line)
        overrides = dict(part.split("=", 1) for part in line if "=" in part)
        given = {key: yaml.safe_load(value) for key, value in overrides.items()}
        tiny_run.train_here("draft_model", values | given, resume="--resume" in line)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(boosting, "subprocess", SimpleNamespace(run=here))
    # Judged on what it was trained on: the held-out store has random dialogues, which cannot be learnt.
    opened = boosting.open_inputs
    monkeypatch.setattr(boosting, "open_inputs", lambda run: replace(opened(run), heldout=opened(run).train))
    boost.main(["--config", str(tmp_path / "boost.yaml")])
    assert len(lines) == 3 and not any("--resume" in line for line in lines)
    found = json.loads((tmp_path / "boosted" / "coverage.json").read_text())["coverage"]
    assert found["boosted"][0] == found["seeds"][0] > found["as they were"][0]
    assert found["boosted"][1] > found["seeds"][1] >= found["seeds"][0]
    assert found["as they were"][0] == found["as they were"][1]
    said = capfd.readouterr().out
    assert f"{found['boosted'][1]:.2%}" in said
    assert json.dumps([str(tmp_path / "boosted" / name) for name in ("1", "boosted-2")]) in said
