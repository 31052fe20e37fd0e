"""Fingerprints of targets: every weight counts, and no dtype, file or name of a tensor does."""

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from families import DECODED, build
from safetensors.torch import load_file, save_file
from test_features import run as make_features
from test_features import write_config
from test_loading import EMBEDDING, HEAD, change
from transformers import PreTrainedModel

from data_prep.answers.journal import WEIGHTS, check_identity
from data_prep.store.reader import FeatureStore
from drafters import TargetModel, load_drafter, load_frozen_ends
from drafters.common import fingerprints
from drafters.common.fingerprints import FORMER, same_weights
from drafters.hub.checkpoint import config_of
from drafters.model import fingerprint
from drafters.model.fingerprint import digest, of_model, samples_of
from train.run.files import check_continues, describe_data
from train.run.inputs import open_inputs


def lora(weights: torch.Tensor) -> torch.Tensor:
    """``weights`` with a matrix of rank 1 merged in."""
    rows, columns = (torch.linspace(-0.1, 0.2, size) for size in weights.shape)
    return weights + torch.outer(rows, columns)


# Tunes that leave the final norm and the last layer's o_proj as they are.
TUNES: dict[str, Callable[[str], bool]] = {
    "lora on q and v": lambda name: "q_proj.weight" in name or "v_proj.weight" in name,
    "all mlps": lambda name: ".mlp." in name,
    "the embedding": lambda name: name == EMBEDDING,
    "one bias": lambda name: name == "model.layers.0.self_attn.q_proj.bias",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of an EAGLE run on a store of a tiny Qwen2, whose projections have biases."""
    folder = tmp_path_factory.mktemp("qwen2")
    build("qwen2", DECODED["qwen2"]).save_pretrained(folder / "target")
    target = TargetModel.from_pretrained(str(folder / "target"), "float32", "cpu")
    features = tiny_run.write_stores(folder / "features", target)
    settings = tiny_run.settings(target.name, features, folder / "run", steps=1)
    tiny_run.train_here("eagle", settings)
    load_drafter(str(folder / "run"), target)
    return settings


def tuned(folder: Path, tune: str) -> None:
    """Replace the weights in ``folder`` by those of a tune."""

    def edit(found: dict[str, torch.Tensor]) -> None:
        names = [name for name in found if TUNES[tune](name)]
        assert names
        found.update({name: lora(found[name]) if found[name].dim() == 2 else found[name] + 0.01 for name in names})

    change(str(folder), edit)


@pytest.mark.parametrize("tune", TUNES)
def test_a_tune_is_another_target(tune: str, trained: dict[str, Any], tmp_path: Path) -> None:
    """Catches a head that is trained on states of the model before its tune, or run beside the tune."""
    folder = tmp_path / "target"
    shutil.copytree(trained["target"], folder)
    tuned(folder, tune)
    target = TargetModel.from_pretrained(str(folder), "float32", "cpu")
    known = load_frozen_ends(trained["target"], device="meta").fingerprint
    assert target.fingerprint()[:FORMER] == known[:FORMER]
    with pytest.raises(ValueError, match=f"fingerprint {known} against .*, so other weights"):
        load_drafter(trained["out"], target)
    with pytest.raises(ValueError, match=f"was made with target .*fingerprint of the weights {known} against"):
        open_inputs(tiny_run.read("eagle", trained | {"target": str(folder), "out": str(tmp_path / "run")}))


def test_a_head_names_the_weights_that_its_store_names(trained: dict[str, Any], tmp_path: Path) -> None:
    """Catches a head that claims more of its target than its store: that may be of the target before a tune."""
    features = tmp_path / "features"
    shutil.copytree(trained["features"], features)
    for manifest in features.glob("*/manifest.json"):
        found = json.loads(manifest.read_text())
        former = found["target_fingerprint"][:FORMER]
        manifest.write_text(json.dumps(found | {"target_fingerprint": former}))
    tiny_run.train_here("eagle", trained | {"features": str(features), "out": str(tmp_path / "run")})
    assert config_of(tmp_path / "run").target.fingerprint == former
    whole = config_of(trained["out"]).target.fingerprint
    assert whole == load_frozen_ends(trained["target"]).fingerprint and whole.startswith(f"{former}-")


def test_a_capture_is_not_continued_with_a_tune(tmp_path: Path, target_folder: Path) -> None:
    """Catches a store whose first shards are of one model and whose other shards of another."""
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    config = write_config(tmp_path, folder)
    make_features(config)
    manifest = tmp_path / "out" / "train" / "manifest.json"
    former = FeatureStore.open(manifest.parent).manifest.target_fingerprint
    change(str(folder), lambda found: found.update({name: lora(found[name]) for name in found if "q_proj" in name}))
    with pytest.raises(ValueError, match=f"other settings: target_fingerprint '{former}' there"):
        make_features(config)


def test_every_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tensor that is left out, one value that is not read, tensors exchanged, and samples of some only."""
    model = build("qwen3_moe", DECODED["qwen3_moe"] | {"num_hidden_layers": 2}).requires_grad_(False)
    for whole in (fingerprint.WHOLE, 0):
        monkeypatch.setattr(fingerprint, "WHOLE", whole)
        known = {of_model(model)}
        for name, weights in model.named_parameters():
            last = weights.view(-1)[-1].clone()
            weights.view(-1)[-1] += 0.5
            assert of_model(model) not in known, name
            weights.view(-1)[-1] = last
        first, second = model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm
        first.weight, second.weight = second.weight, first.weight
        assert of_model(model) not in known
        first.weight, second.weight = second.weight, first.weight
        assert of_model(model) in known


def test_stored_buffers_count() -> None:
    """Catches the bias of DeepSeek's router left out: it chooses the experts, and is no parameter."""
    model = build("deepseek_v3", DECODED["deepseek_v3"])
    known, buffers = of_model(model), dict(model.named_buffers())
    (bias,) = (buffers[name] for name in model.state_dict() if "e_score_correction_bias" in name and ".1." in name)
    bias += 0.5
    assert of_model(model) != known


@pytest.mark.parametrize(
    "family", ["llama", "mixtral", "qwen3_moe", "gpt2", "deepseek_v3", "gemma3_text", "phi3", "apertus"]
)
def test_a_model_has_the_fingerprint_of_its_files(family: str, tmp_path: Path) -> None:
    """Catches a drafter refused beside the model in memory: joined experts, tied ends, buffers, other dtypes."""
    model = build(family, DECODED[family]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    copy.deepcopy(model).float().save_pretrained(tmp_path / "wide")
    marks = {load_frozen_ends(str(tmp_path / each)).fingerprint for each in ("one", "shards", "wide")}
    marks |= {of_model(copy.deepcopy(model).to(dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float16)}
    marks |= {TargetModel.from_pretrained(str(tmp_path / "one"), "float16", "cpu", engine="stock").fingerprint()}
    assert len(marks) == 1 and len(marks.pop()) == 2 * FORMER + 1


def test_names_without_the_prefix(tmp_path: Path) -> None:
    """Catches another fingerprint for files of a model that was saved without its LM head."""
    tiny.build("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    known = load_frozen_ends(str(tmp_path)).fingerprint
    change(str(tmp_path), lambda found: found.update({HEAD: found.pop(EMBEDDING)}))
    assert load_frozen_ends(str(tmp_path)).fingerprint == known
    build("gpt2", DECODED["gpt2"]).save_pretrained(tmp_path / "gpt2")
    known = load_frozen_ends(str(tmp_path / "gpt2")).fingerprint
    file = tmp_path / "gpt2" / "model.safetensors"
    found = {name.removeprefix("transformer."): part for name, part in load_file(file).items()}
    save_file(found, file, {"format": "pt"})
    assert load_frozen_ends(str(tmp_path / "gpt2")).fingerprint[FORMER:] == known[FORMER:]


def test_the_samples_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches samples that overlap, all lie at one end, or grow with the model, and a model read in part too early."""
    monkeypatch.setattr(fingerprint, "SAMPLE", 2)

    def covered(samples: int | None) -> list[int]:
        """The values of ten that change the digest."""
        plain = digest([("a", torch.zeros(10))], samples)
        return [index for index in range(10) if digest([("a", torch.eye(10)[index])], samples) != plain]

    # Starts of samples are at odd multiples of 8 / (2 x samples): 4; 2 and 6; 1, 4 and 6.
    assert covered(1) == [4, 5] and covered(2) == [2, 3, 6, 7] and covered(3) == [1, 2, 4, 5, 6, 7]
    assert covered(5) == covered(None) == list(range(10))
    whole = fingerprint.WHOLE
    assert samples_of([(whole,)]) is None and samples_of([(whole, 1), (1,)]) == 16
    assert samples_of([(whole,)] * 1024) == 8 and samples_of([(whole,)] * 20_000) == 1


def test_numbers_are_rounded_as_loading_rounds_them() -> None:
    """Catches a mark that float16 or bf16 changes, and one that ignores bits of packed weights."""

    def of(values: list[float], dtype: torch.dtype = torch.float32) -> str:
        return digest([("a", torch.tensor(values).to(dtype))], None)

    assert of([1.001, 2**-14, -(2**-15)]) == of([1.0, 0.0, 0.0])
    assert of([1.01]) != of([1.0]) and of([2**-13]) != of([0.0]) and of([-(2**-12)]) != of([2**-12])
    assert of([1.0, 2.0]) != of([2.0, 1.0]) and of([1.0, 0.0]) != of([1.0])
    assert of([1.0, 300.0], torch.int32) != of([1.0, 301.0], torch.int32)
    assert digest([("a", torch.zeros(2, 3))], None) != digest([("a", torch.zeros(3, 2))], None)
    assert digest([("a", torch.zeros(2))], None) != digest([("b", torch.zeros(2))], None)


def test_adapters_have_one_fingerprint(tmp_path: Path) -> None:
    """Catches a merged adapter whose fingerprint changes with the dtype, or that passes for its base."""
    peft = pytest.importorskip("peft")
    tiny.build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model: PreTrainedModel = tiny.build("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, weights in wrapped.named_parameters():
        if "lora_B" in name:
            weights.data.normal_(0, 0.1)
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapter")
    base, *both = (
        TargetModel.from_pretrained(str(tmp_path / name), dtype, "cpu", engine="stock").fingerprint()
        for name, dtype in (
            ("base", "float32"),
            ("adapter", "float32"),
            ("adapter", "float16"),
            ("adapter", "bfloat16"),
        )
    )
    assert len({*both}) == 1 and both[0] != base


FULL, OTHER = "e500116eb63308f6-460af402b00402b1", "e500116eb63308f6-0000000000000000"


def test_former_fingerprints_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Catches shipped heads and stores that no longer load, a silent half of a check, and two halves taken for one."""
    fingerprints._warn.cache_clear()
    assert same_weights(FULL, FULL, "x") and not same_weights(FULL, OTHER, "x")
    assert not same_weights(OTHER[1:FORMER] + "0", FULL, "x") and not same_weights("e5", FULL, "x")
    assert not caplog.records
    for _ in range(2):
        assert same_weights(FULL[:FORMER], FULL, "runs/eagle")
    assert same_weights(FULL, FULL[:FORMER], "runs/store")
    assert [record.levelno for record in caplog.records] == 2 * [logging.WARNING]
    former, missing = (record.message for record in caplog.records)
    assert former.startswith("runs/eagle: of its target, only the shape, the final norm and one row")
    assert "former version" in former and "not downloaded" in missing
    check_identity(tmp_path, {WEIGHTS: FULL[:FORMER]}, {WEIGHTS: FULL})
    with pytest.raises(ValueError, match=f"{WEIGHTS} was '{OTHER}', is '{FULL}'"):
        check_identity(tmp_path, {WEIGHTS: OTHER}, {WEIGHTS: FULL})


def test_a_resumed_run_keeps_its_target(settings: dict[str, Any]) -> None:
    """Catches a run that goes on with states of another model: of a replaced store, or of a target that runs online."""
    run = tiny_run.train_here("eagle", settings | {"steps": 2, "save_every": 2})
    manifest, now = run.inputs.train.manifest, dict(run.info)
    check_continues(run.config.out, now)
    known = manifest.target_fingerprint
    other = manifest.model_copy(update={"target_fingerprint": known[:FORMER] + OTHER[FORMER:]})
    with pytest.raises(ValueError, match=rf"train features are of another target .*now, {known} then"):
        check_continues(run.config.out, now | {"data": {"train": describe_data(other)}})
