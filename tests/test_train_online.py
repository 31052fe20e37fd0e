"""features: online: the losses of a run from a store, without one."""

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tiny
import tiny_run
import torch
from chat_formats import DATED, dialogue, pretend_today
from families import DECODED, build
from transformers import PreTrainedModel

from data_prep import features
from data_prep.dialogues.encoding import EncodedSplit
from data_prep.dialogues.loss_mask import MaskedTokens
from data_prep.store.reader import FeatureStore
from drafters import TargetModel, load_drafter
from drafters.config import validate
from train.core import engine
from train.data.online import OnlineFeatures
from train.data.packing import collate
from train.eagle import EagleConfig
from train.kangaroo import KangarooConfig
from train.preflight.dry_run import dry_run
from train.run.files import read_metrics
from train.run.inputs import open_inputs
from train.watch import tau


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Path:
    return target_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The ``data:`` section: dialogues of 40 to 150 tokens, some beyond max_length, some records unusable."""
    folder = tmp_path_factory.mktemp("dialogues")
    lines = ["not json", *(json.dumps(dialogue(index)) for index in range(20)), json.dumps({"conversations": []})]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "heldout.jsonl").write_text("\n".join(json.dumps(dialogue(index)) for index in range(100, 104)))
    sources = {split: str(folder / f"{split}.jsonl") for split in ("train", "heldout")}
    return {**sources, "max_length": 120, "limit": 18, "target_dtype": "float32", "target_batch_tokens": 256}


@pytest.fixture(scope="module")
def store(target: Path, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What data_prep.features makes of the same section."""
    folder = tmp_path_factory.mktemp("store")
    values = {
        "target": str(target),
        "dtype": "float32",
        "splits": {split: data[split] for split in ("train", "heldout")},
        "out": str(folder / "features"),
        "for": ["eagle", "eagle3"],
        "exit_layers": [tiny_run.TAP],
        "max_length": data["max_length"],
        "limit": data["limit"],
        "heldout_answers": "given",  # as online
    }
    (folder / "features.yaml").write_text(json.dumps(values))
    features.main(["--config", str(folder / "features.yaml")])
    return folder / "features"


def settings(target: Path, out: Path, **changes: Any) -> dict[str, Any]:
    # Adam makes a step of every gradient, also of one that is nothing but rounding: a small rate keeps those small.
    common = {"batch_tokens": 400, "eval_every": 3, "learning_rate": 0.001}
    return tiny_run.settings(str(target), Path("online"), out, **{**common, **changes})


def figures(out: Path, *names: str) -> dict[str, list[float]]:
    rows = read_metrics(out)
    found = {name for row in rows for name in row if name == "loss" or name.startswith("heldout_")}
    return {name: [row[name] for row in rows if name in row] for name in names or sorted(found)}


def assert_same_figures(out: Path, reference: Path, tolerance: float = 5e-5) -> None:
    ours, theirs = figures(out), figures(reference)
    assert ours.keys() == theirs.keys()
    assert len(theirs["loss"]) >= 4 and len(theirs["heldout_loss"]) >= 2
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=tolerance), name


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("eagle", {}, marks=pytest.mark.long),
        ("eagle", {"gradient_accumulation": 2, "noise": "code"}),
        ("eagle", {"start": "regression"}),
        pytest.param("eagle3", {"tap_layers": [1, 2, 3]}, marks=pytest.mark.long),
        ("eagle3", {"tap_layers": [1, 3]}),
        pytest.param("kangaroo", {"exit_layer": tiny_run.TAP}, marks=pytest.mark.long),
        ("kangaroo", {"exit_layer": tiny_run.TAP, "gradient_accumulation": 3}),
    ],
)
def test_losses_are_those_of_a_store(
    kind: str, changes: dict[str, Any], target: Path, data: dict[str, Any], store: Path, tmp_path: Path
) -> None:
    """Another order, mask, truncation, limit or tap than the store's; a dialogue that sees its neighbour in the row."""
    stored = {**settings(target, tmp_path / "store", **changes), "features": str(store)}
    tiny_run.train_here(kind, stored)
    tiny_run.train_here(kind, {**settings(target, tmp_path / "online", **changes), "data": data})
    assert_same_figures(tmp_path / "online", tmp_path / "store")
    saved = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("online", "store")}
    assert saved["online"]["training"]["features"] == "online"
    assert saved["online"]["training"]["data"] == data["train"]
    for key in ("dialogues", "feature_dtype", "data", "tokens"):
        assert saved["online"]["training"][key] == saved["store"]["training"][key], key
    assert saved["online"]["target"] == saved["store"]["target"]
    load_drafter(str(tmp_path / "online"), TargetModel.from_pretrained(str(target), "float32"))


def test_features_equal_the_targets_own(target: Path, data: dict[str, Any], store: Path) -> None:
    """Rows written to the wrong place, positions that run on, padding that is not zero, a chunk of rows forgotten."""
    values = settings(target, Path("unused"), exit_layer=tiny_run.TAP)
    config = validate(KangarooConfig, {**values, "data": data}, source="test")
    inputs = open_inputs(config)
    inputs.load_target(config, torch.device("cpu"))
    live, stored = inputs.train, FeatureStore.open(store / "train")
    assert live.lengths.tolist() == stored.lengths.tolist()
    chosen = list(range(len(stored)))
    expected = collate(stored, chosen, (tiny_run.TAP,))
    for at_once in (1, 300, 100_000):
        live.batch_tokens = at_once
        batch = live.complete(collate(live, chosen, (tiny_run.TAP,)), (tiny_run.TAP,))
        assert torch.equal(batch.input_ids, expected.input_ids)
        assert torch.equal(batch.loss_mask, expected.loss_mask)
        torch.testing.assert_close(batch.features, expected.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.taps[tiny_run.TAP], expected.taps[tiny_run.TAP], rtol=1e-4, atol=1e-4)
        assert not batch.features.requires_grad and not batch.features.is_inference()


@pytest.mark.parametrize("family", ["qwen3", "mistral-sliding", "mixtral", "qwen3_5_text", "bamba"])
def test_every_kind_of_target(family: str, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """A sliding window measured across dialogues of a row, positions that run on from one to the next, or a running
    state that has read the dialogue before."""
    usual = family in tiny.FAMILIES
    model = TargetModel(tiny_model(family) if usual else build(family, DECODED[family]), engine="stock")
    generator = torch.Generator().manual_seed(0)
    lengths = [40, 9, 17, 23, 5, 31]
    tokens = [torch.randint(3, model.vocab_size, (length,), generator=generator) for length in lengths]
    split = EncodedSplit(
        ids=[str(length) for length in lengths],
        dialogues=[MaskedTokens(ids.numpy(), np.ones(len(ids), dtype=bool)) for ids in tokens],
    )
    live = OnlineFeatures(split, tiny_run.header(model), batch_tokens=64)
    live.target = model
    batch = live.complete(collate(live, [5, 0, 3, 1, 2, 4]), (tiny_run.TAP,))
    assert len(batch.spans) == 6
    for span in batch.spans:
        alone = model.features(tokens[span.dialogue][None], taps=(tiny_run.TAP,))
        torch.testing.assert_close(span.of(batch.features), alone.features[0], rtol=1e-4, atol=1e-4)
        tap = span.of(batch.taps[tiny_run.TAP])
        torch.testing.assert_close(tap, alone.taps[tiny_run.TAP][0], rtol=1e-4, atol=1e-4)


def test_two_ranks_equal_one(target: Path, data: dict[str, Any], store: Path, tmp_path: Path) -> None:
    """Ranks that compute features of the same dialogues, or a rank without its own target."""
    values = settings(target, tmp_path / "store", schedule="constant")
    tiny_run.train_here("eagle", {**values, "features": str(store)})
    online_values = {**values, "out": str(tmp_path / "online"), "data": data}
    tiny_run.train_on_ranks(2, tmp_path, [{"kind": "eagle", "values": online_values}])
    assert json.loads((tmp_path / "online" / "run.json").read_text())["ranks"] == 2
    assert_same_figures(tmp_path / "online", tmp_path / "store")


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(target: Path, data: dict[str, Any], tmp_path: Path) -> None:
    """Features of a resumed run that differ in a bit, or belong to another position in the data."""
    values = {**settings(target, tmp_path / "whole", steps=20, save_every=5), "data": data}
    tiny_run.train_here("eagle", values)
    out = tmp_path / "killed"
    tiny_run.killed_and_resumed([{"kind": "eagle", "values": {**values, "out": str(out)}, "point": "file:9"}], tmp_path)
    assert json.loads((out / "run.json").read_text())["resumed_at_step"] == 10
    assert figures(out) == figures(tmp_path / "whole")  # bit for bit


def test_resume_refuses_other_dialogues(target: Path, data: dict[str, Any], tmp_path: Path) -> None:
    """A data file that grew: the position in the data would skip dialogues and repeat others."""
    own = tmp_path / "train.jsonl"
    shutil.copy(data["train"], own)
    values = {**settings(target, tmp_path / "run", steps=2), "data": {**data, "train": str(own), "limit": None}}
    tiny_run.train_here("eagle", values)
    with own.open("a") as file:
        file.write("\n" + json.dumps(dialogue(50)))
    with pytest.raises(ValueError, match=r"the train dialogues changed since the run .*'dialogues': 20.*: 21"):
        tiny_run.train_here("eagle", {**values, "steps": 4}, resume=True)


def test_a_resumed_run_keeps_its_templates_date(
    target: Path, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that prints the day: a run resumed on another one would go on with other dialogues."""
    (tmp_path / "dated.jinja").write_text(DATED)
    values = settings(target, tmp_path / "run", steps=2)
    values |= {"data": {**data, "chat_template": str(tmp_path / "dated.jinja")}}
    pretend_today(monkeypatch, datetime.date(2024, 2, 9))
    tiny_run.train_here("eagle", values)
    pretend_today(monkeypatch, datetime.date(2024, 11, 28))
    tiny_run.train_here("eagle", {**values, "steps": 4}, resume=True)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["resumed_at_step"] == 2 and info["data"]["train"]["template_date"] == "2024-02-09"


def test_features_that_are_not_finite_are_left_out(
    target: Path, data: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN of one dialogue that reaches its neighbours in the row, the loss, or that is not reported."""
    values = settings(target, Path("unused"))
    config = validate(EagleConfig, {**values, "data": data}, source="test")
    inputs = open_inputs(config)
    inputs.load_target(config, torch.device("cpu"))
    live = inputs.train
    chosen = list(range(6))
    sound = live.complete(collate(live, chosen), ())
    shared = [span for span in sound.spans if span.start]
    assert shared
    row, start, length, poisoned = shared[0]
    marker = int(sound.input_ids[row, start + length - 1])
    embed = live.target.body.embed_tokens
    token = 299
    assert not (sound.input_ids == token).any()
    live.split.dialogues[poisoned].input_ids[3] = token
    with torch.no_grad():
        before = embed.weight[token].clone()
        embed.weight[token] = float("nan")
    batch = live.complete(collate(live, chosen), ())
    assert marker >= 0 and batch.features.isfinite().all()
    for span in batch.spans:
        cut = slice(span.start, span.start + span.length)
        if span.dialogue == poisoned:
            assert not batch.loss_mask[span.row, cut].any() and not batch.features[span.row, cut].any()
        else:
            assert torch.equal(batch.loss_mask[span.row, cut], sound.loss_mask[span.row, cut])
            torch.testing.assert_close(batch.features[span.row, cut], sound.features[span.row, cut])
    live.complete(collate(live, chosen), ())
    assert capsys.readouterr().err.count(f"NaN or infinite: dialogue {live.split.ids[poisoned]} (1 of 18 so far)") == 1
    with torch.no_grad():
        embed.weight[token] = before


def test_a_store_for_another_method(target: Path, data: dict[str, Any], tmp_path: Path, store: Path) -> None:
    """A KeyError in the first step, or advice that names a store without the missing state."""
    bare = tmp_path / "bare"
    tiny_run.write_stores(bare, TargetModel.from_pretrained(str(target), "float32"))
    values = {**settings(target, tmp_path / "run", tap_layers=[1, 2, 3]), "features": str(bare)}
    lacking = r"train lacks output of layer 0 = hidden_states\[1\] \(tap 1\); output of layer 2 .*it has the taps \[2\]"
    with pytest.raises(ValueError, match=lacking) as refused:
        open_inputs(tiny_run.read("eagle3", values))
    assert "python -m data_prep.features --config F 'for=[eagle3]' 'exit_layers=[2]' out=NEW" in str(refused.value)
    for where in ({"features": str(store)}, {"data": data, "features": "online"}):
        with pytest.raises(ValueError, match=r"eagle3 reads tap 7, the state after 7 layers, and .* has 4 layers"):
            open_inputs(tiny_run.read("eagle3", {**values, "tap_layers": [1, 7], **where}))


def test_wrong_configs_are_refused(target: Path, data: dict[str, Any], tmp_path: Path) -> None:
    """An hour of tokenizing, or a traceback, before what the config lacks is said."""
    values = settings(target, tmp_path / "run")
    with pytest.raises(ValueError, match=r"features: online .* set data.train and data.heldout"):
        tiny_run.train_here("eagle", values)
    with pytest.raises(ValueError, match=r"data is only read with features: online, and features is 'stores'"):
        tiny_run.train_here("eagle", {**values, "features": "stores", "data": data})
    with pytest.raises(ValueError, match=r"splits 'train' and 'heldout' are the same data"):
        tiny_run.train_here("eagle", {**values, "data": {**data, "heldout": data["train"]}})
    assert not Path(values["out"]).exists()


def test_overfit_and_dry_run(
    target: Path, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two checks before a run that know of feature folders alone."""
    monkeypatch.setattr(engine, "stop", lambda: None)  # other tests train in this process, too
    values = settings(target, tmp_path / "run", learning_rate=0.003, noise="none", data=data)
    config = validate(EagleConfig, values, source="test")
    report = dry_run(config, tiny_run.arguments())
    assert not report.problems and "features computed while it trains" in report.text()
    weights = sum(weights.numel() for weights in TargetModel.from_pretrained(str(target)).model.parameters())
    assert report.memory["target, for features"] == 4 * weights
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    arguments = ["--config", str(tmp_path / "run.yaml"), "--overfit", "3", "steps=250", "tau_every=null"]
    assert tiny_run.main("eagle", arguments) == 0
    found = json.loads((tmp_path / "run-overfit" / "overfit.json").read_text())
    assert [finding["sound"] for finding in found] == [True, True]
    missing = validate(EagleConfig, {**values, "data": {**data, "train": "no.jsonl"}}, source="test")
    assert any("no.jsonl" in problem for problem in dry_run(missing, tiny_run.arguments()).problems)


def test_tau_is_the_online_targets(target: Path, data: dict[str, Any], tmp_path: Path) -> None:
    """A second copy of the target loaded for tau, though one computes the features already."""
    values = settings(target, tmp_path / "run", data=data, tau_every=2, tau_prompts=2, tau_new_tokens=8, steps=2)
    with mock.patch.object(tau.TargetModel, "from_pretrained", wraps=TargetModel.from_pretrained) as load:
        tiny_run.train_here("eagle", values)
    assert load.call_count == 1
    assert len(figures(tmp_path / "run", "heldout_tau")["heldout_tau"]) >= 2
