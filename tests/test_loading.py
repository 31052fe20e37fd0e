"""Loading a target: memory counted before weights are read, layers over several devices."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, checked_commits, prompt, rows_of
from quantised_folders import fp8
from rigged import eagle
from safetensors.torch import load_file, save_file

from drafters import TargetModel, generate, load_frozen_ends, make_drafter
from drafters.model import loading
from drafters.model.cache import KVCache, cache_bytes, config_shapes
from drafters.model.graphs import Captured, GraphRunner, differs_from_layers

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)  # not equal, and yet the same memory
READERS: dict[str, Callable[[str], object]] = {
    "decoding": lambda name: TargetModel.from_pretrained(name, "float32", "cpu"),
    "training": lambda name: load_frozen_ends(name, "float32"),
    "features and export": lambda name: load_frozen_ends(name, device="meta"),
}
reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
HEAD, EMBEDDING, OF_A_LAYER = "lm_head.weight", "model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def saved(tmp_path: Path) -> str:
    tiny.build("llama").save_pretrained(tmp_path)
    return str(tmp_path)


def test_bytes_are_those_of_the_model_and_its_cache() -> None:
    """Catches tied weights counted twice, one of keys and values forgotten, and heads for key heads."""
    for changes in ({}, {"tie_word_embeddings": True}):
        model = tiny.build("llama", **changes)
        counted = sum(weights.numel() for weights in model.parameters())
        assert loading.weight_bytes(model.config, torch.bfloat16) == 2 * counted
    shapes = config_shapes(model.config)
    cache = KVCache(shapes, 3, 17, torch.bfloat16, "cpu")
    assert cache_bytes(shapes, 3, 17, torch.bfloat16) == sum(part.nbytes for part in cache.keys + cache.values)


def test_too_little_memory_is_said_before_weights_are_read(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an hour of downloading, or a process killed, where a message could say what to lower."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loading, "SMALL", 0)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)
    weights = loading.weight_bytes(tiny.tiny_config("llama"), torch.float32)
    monkeypatch.setattr(loading, "free_memory", lambda _: weights - 1)
    with pytest.raises(ValueError, match=r"its weights need [0-9.]+ kB in float32, and cpu has .* device_map='auto'"):
        TargetModel.from_pretrained(saved, "float32", "cpu")
    monkeypatch.setattr(loading, "free_memory", lambda _: weights + 1000)
    with pytest.raises(ValueError, match=r"a cache of 4 x 2000 tokens .* lower max_new_tokens"):
        TargetModel.from_pretrained(saved, "float32", "cpu", cache_tokens=(4, 2000))
    with pytest.raises(AssertionError, match="were read"):
        TargetModel.from_pretrained(saved, "float32", "cpu")


def test_device_maps(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a map that is ignored, and layers left where every step would fetch them."""
    target = TargetModel.from_pretrained(saved, "float32", device_map={"": "cpu"})
    assert target.engine == "fused" and target._devices is None
    with pytest.raises(ValueError, match="both given"):
        TargetModel.from_pretrained(saved, "float32", "cpu", device_map="auto")
    load = loading.AutoModelForCausalLM.from_pretrained

    def spread(*arguments: Any, **options: Any) -> Any:
        del options["device_map"]
        model, info = load(*arguments, **options)
        model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "disk"}
        return model, info

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", spread)
    with pytest.raises(ValueError, match="leaves layers of .* on disk"):
        TargetModel.from_pretrained(saved, "float32", device_map="auto")


def over_two_devices(family: str, engine: Any) -> TargetModel:
    """A target that believes its last two layers to lie elsewhere."""
    target = TargetModel(tiny.build(family), engine=engine)
    target._devices = [FIRST, FIRST, SECOND, SECOND]
    return target


@pytest.mark.parametrize("engine", ["fused", "stock"])
@pytest.mark.parametrize("method", ["autoregressive", "static"])
def test_over_several_devices(method: str, engine: Any) -> None:
    """Catches a cache of one device for layers of two, and rows of an accepted path moved in the first part alone."""
    rows = []
    for target in (TargetModel(tiny.build("llama"), engine=engine), over_two_devices("llama", engine)):
        drafter = eagle(target, 0.4, "static") if method == "static" else make_drafter(method, target)
        assert len(target.new_cache(1, 8)._parts) == (1 if target._devices is None else 2)
        prompts = [prompt(9), prompt(5, 1)]
        with checked_commits():
            found = generate(target, drafter, prompts, max_new_tokens=16, eos_token_id=NO_EOS)
        rows.append((rows_of(found), found.trace.tau))
    assert rows[0] == rows[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here: layers cannot be spread over them")
def test_over_two_gpus(saved: str) -> None:
    """Catches what pretended devices do not show: tensors of two real ones in one operation."""
    rows = []
    for options in ({"device": "cuda:0"}, {"device_map": "balanced"}):
        target = TargetModel.from_pretrained(saved, "float32", **options)  # type: ignore[arg-type]
        assert (target._devices is None) == ("device" in options)
        rows.append(rows_of(generate(target, eagle(target, 0.4, "static"), [prompt(9)], max_new_tokens=16)))
    assert rows[0] == rows[1]


def test_graphs_that_give_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches garbage decoded where a driver replays wrongly, or where a replay keeps the values of its capture."""
    target = TargetModel(tiny.build("llama"), engine="fused")
    assert differs_from_layers(target, GraphRunner(target.model)) is None
    run = GraphRunner.run

    def stale(self: GraphRunner, *arguments: Any, **options: Any) -> Any:
        key = arguments[1][0].shape[1]
        kept, found = self.__dict__.setdefault("kept", {}), run(self, *arguments, **options)
        return kept.setdefault(key, found)

    monkeypatch.setattr(GraphRunner, "run", stale)
    assert "captured trial" in (differs_from_layers(target, GraphRunner(target.model)) or "")
    with pytest.raises(ValueError, match="engine 'graphs' cannot run .* captured trial"):
        TargetModel(tiny.build("llama"), engine="graphs")
    monkeypatch.undo()

    def refused(self: GraphRunner, captured: Captured, device: torch.device) -> None:
        captured.part.uncaptured = "no capturing here"

    monkeypatch.setattr(GraphRunner, "_capture", refused)
    assert differs_from_layers(target, GraphRunner(target.model)) == "no capturing here"


def change(folder: str, tensors: Callable[[Tensors], object] | None = None, **config: Any) -> None:
    """Change the tensors of a saved model in place, or keys of its config.json."""
    weights, file = Path(folder) / "model.safetensors", Path(folder) / "config.json"
    if tensors is not None:
        found = load_file(weights)
        tensors(found)
        save_file(found, weights, {"format": "pt"})
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@reader
def test_tensors_are_those_of_the_config(read: Callable[[str], object], saved: str) -> None:
    """Catches random numbers instead of a missing tensor, another set in each process, and layers left out."""
    tensors = load_file(Path(saved) / "model.safetensors")
    wrong: list[tuple[Callable[[Tensors], object] | None, dict[str, Any], str]] = [
        (lambda found: found.pop(OF_A_LAYER), {}, f"missing: {OF_A_LAYER}"),
        (
            lambda found: found.update({"model.layers.1.mlp.extra": torch.ones(2)}),
            {},
            "unexpected: .*layers.1.mlp.extra",
        ),
        (lambda found: found.update({OF_A_LAYER: torch.ones(3, 3)}), {}, f"of another shape: {OF_A_LAYER}"),
        (None, {"num_hidden_layers": 5}, r"\(5 layers of llama\): missing: model.layers.4.* and 5 more"),
        (None, {"num_hidden_layers": 3}, r"\(3 layers of llama\): unexpected: model.layers.3.* and 5 more"),
        (lambda found: found.pop(HEAD), {}, f"missing: {HEAD}"),
    ]
    config = json.loads((Path(saved) / "config.json").read_text())
    for tensor, keys, message in wrong:
        change(saved, tensor, **keys)
        with pytest.raises(ValueError, match=f"{saved}: its tensors are not those .*{message}"):
            read(saved)
        save_file(tensors, Path(saved) / "model.safetensors", {"format": "pt"})
        change(saved, **config)
    change(saved, lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    read(saved)  # old checkpoints hold this one, which transformers computes


@reader
def test_tied_ends_are_one_tensor(read: Callable[[str], object], tmp_path: Path) -> None:
    """Catches an LM head that decoding takes from the file, and training from the embedding."""
    tiny.build("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(str(tmp_path), lambda found: found.update({HEAD: found[EMBEDDING].clone()}))
    read(str(tmp_path))  # the same twice
    change(str(tmp_path), lambda found: found[HEAD][0].add_(1))
    with pytest.raises(ValueError, match=f"{tmp_path}: tie_word_embeddings is true .*, but {HEAD} differs"):
        read(str(tmp_path))
    change(str(tmp_path), tie_word_embeddings=False)
    read(str(tmp_path))


def test_tied_ends_under_the_other_name(tmp_path: Path) -> None:
    """Catches a tied model that decodes, but whose training looks for the name that the file does not use."""
    tiny.build("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(str(tmp_path), lambda found: found.update({HEAD: found.pop(EMBEDDING)}))
    target, ends = (
        TargetModel.from_pretrained(str(tmp_path), "float32", "cpu"),
        load_frozen_ends(str(tmp_path), "float32"),
    )
    assert torch.equal(ends.embed.weight, target.body.embed_tokens.weight)
    assert ends.fingerprint == target.fingerprint()


@reader
@pytest.mark.parametrize("stale", ["model.safetensors", "shard-00001-model-00001-of-00002.safetensors"])
def test_one_set_of_weights(stale: str, read: Callable[[str], object], tmp_path: Path) -> None:
    """Catches a stale file beside newer shards: decoding reads the file and training the shards."""
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    read(str(tmp_path))
    tiny.build("llama", seed=1).save_pretrained(tmp_path / "older")
    (tmp_path / "older" / "model.safetensors").rename(tmp_path / stale)
    with pytest.raises(ValueError, match=f"{tmp_path} holds two sets of weights, {stale} and model-00001-of"):
        read(str(tmp_path))
    (tmp_path / stale).unlink()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shutil.copy(tmp_path / index["weight_map"][HEAD], tmp_path / "copy.safetensors")
    index["weight_map"]["model.copy"] = "copy.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=f"{HEAD} is in copy.safetensors and in model-.*; remove the file that is stale"
    ):
        read(str(tmp_path))


def test_an_adapter_beside_a_model(saved: str) -> None:
    """Catches a folder that is decoded with the adapter's merged weights and trained on without them."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (Path(saved) / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match=f"{saved} is a LoRA adapter of owner/base, .* merge it with peft"):
        load_frozen_ends(saved)


def test_fp8_has_one_fingerprint(saved: str) -> None:
    """Catches features of a target "trained for X, not for X": its bytes on one side, their meaning on the other."""
    fp8(Path(saved))
    target, ends = TargetModel.from_pretrained(saved, "float32", "cpu"), load_frozen_ends(saved, device="meta")
    assert ends.fingerprint == target.fingerprint()
    change(saved, lambda found: found.pop(OF_A_LAYER))
    for read in READERS.values():
        with pytest.raises(ValueError, match=f"missing: {OF_A_LAYER}"):
            read(saved)


def test_ends_in_fp8(saved: str) -> None:
    """Catches an LM head whose FP8 values are taken for its weights, without their scale."""
    fp8(Path(saved))
    change(saved, lambda found: found.update({HEAD: found[HEAD].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"{HEAD} is stored as F8_E4M3"):
        load_frozen_ends(saved)
