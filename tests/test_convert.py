"""Released heads become checkpoints of ours: EAGLE-1/2 and Kangaroo, as their authors' files have them."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import assert_equal, eagle_features, kangaroo_states
from safetensors.torch import save_file
from test_export import EXIT, exported, save_head, save_target, written
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.convert import main
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import export
from drafters.methods.eagle import EagleDrafter

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def released_config(target: TargetModel, **changes: Any) -> dict[str, Any]:
    """``config.json`` as the authors wrote it: of an old transformers, with what was the default left out."""
    keys = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads rms_norm_eps hidden_act"
    config = {key: getattr(target.config, key) for key in keys.split()}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, **config, **changes}


def release(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], pickled: bool = False) -> str:
    """A folder as the authors published it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return str(folder)


def eagle_weights(target: TargetModel, bias: float | None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A head's tensors by their published names, with the embedding; ``bias``: the largest of fc's."""
    torch.manual_seed(4)
    module = EagleHead(target.config, EagleShape(fc_bias=bias is not None))
    if bias is not None:
        nn.init.uniform_(module.fc.bias, -bias, bias)
    weights = {name: value.to(dtype) for name, value in module.state_dict().items()}
    return weights | {"embed_tokens.weight": target.body.embed_tokens.weight.to(dtype, copy=True)}


@pytest.mark.parametrize(("said", "pickled"), [({"bias": True}, False), ({}, True)])
def test_a_head_with_a_bias_drafts_as_published(
    said: dict[str, Any], pickled: bool, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a bias lost on the way or by an engine: the head drafts worse than its authors'."""
    weights = eagle_weights(target, 0.5)
    source = release(tmp_path / "released", released_config(target, **said), weights, pickled)
    with pytest.raises(ValueError, match=f"python -m drafters.convert {source} --target MODEL --out FOLDER"):
        load_drafter(source, target)
    main([source, "--target", target.name, "--out", str(tmp_path / "ours")])
    notes = capsys.readouterr().out
    assert "embed_tokens.weight (float32) is the target's, and was left out" in notes and "fc.bias is kept" in notes
    config, kept = load_checkpoint(tmp_path / "ours")
    assert config["drafter"] == {"fc_bias": True} and "embed_tokens.weight" not in kept
    assert all(torch.equal(value, weights[name]) for name, value in kept.items())
    text = torch.tensor([PROMPT])
    features, following = target.features(text).features[:, :-1], text[:, 1:]
    published = eagle_features(weights, target.config, features[0], target.embed(following)[0])
    logits = published @ target.model.get_output_embeddings().weight.double().T
    for engine in ("stock", "fused", "graphs"):
        same = TargetModel.from_pretrained(target.name, "float32", "cpu", engine=engine)
        drafter = load_drafter(str(tmp_path / "ours"), same, tree="chain")
        assert isinstance(drafter, EagleDrafter) and drafter.module.shape.fc_bias
        drafter.head.cache = same.new_cache(1, 32, layers=1)
        assert_equal(same.lm_head(drafter.head.extend(features, following))[0], logits)
    plain = generate(target, make_drafter("autoregressive", target), [PROMPT], max_new_tokens=8).tokens
    assert torch.equal(generate(same, drafter, [PROMPT], max_new_tokens=8).tokens, plain)


def test_an_adapter_drafts_as_published(target: TargetModel, tmp_path: Path) -> None:
    """Catches an adapter behind another layer than it was trained for, and one that is not what was published."""
    weights = written(exported("kangaroo", target, tmp_path))[1]
    source = release(tmp_path / "released", released_config(target), weights, pickled=True)
    with pytest.raises(ValueError, match="does not say its exit layer: give --exit-layer N"):
        convert(source, target.name, tmp_path / "ours")
    with pytest.raises(ValueError, match="--exit-layer must be between 1 and 3 for .*, found 4"):
        convert(source, target.name, tmp_path / "ours", exit_layer=4)
    main([source, "--target", target.name, "--out", str(tmp_path / "ours"), "--exit-layer", str(EXIT)])
    drafter: Any = load_drafter(str(tmp_path / "ours"), target)
    exits = target.features(torch.tensor([PROMPT]), taps=(EXIT,)).taps[EXIT]
    assert drafter.taps == (EXIT,)
    published = kangaroo_states(weights, target.config, exits[0]) @ target.model.lm_head.weight.double().T
    assert_equal(target.lm_head(drafter.module(exits, torch.arange(len(PROMPT))[None]))[0], published)
    head = release(tmp_path / "head", released_config(target, bias=False), eagle_weights(target, None))
    with pytest.raises(ValueError, match="--exit-layer is 2, and .*head is an EAGLE head, .*; leave it out"):
        convert(head, target.name, tmp_path / "no", exit_layer=2)
    with pytest.raises(ValueError, match=r"--taps is \[1\], and .*head is an EAGLE head, .*; leave it out"):
        convert(head, target.name, tmp_path / "no", taps=[1])
    with pytest.raises(ValueError, match=f"--exit-layer is 1, and .* was trained behind layer {EXIT}"):
        convert(str(tmp_path / "kangaroo"), target.name, tmp_path / "again", exit_layer=1)


@pytest.mark.parametrize(
    ("to", "options"), [("vllm", {}), ("sglang", {"fc_bias": True}), ("official", {"exit_layer": EXIT})]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_there_and_back_is_bit_for_bit(
    to: str, options: dict[str, Any], dtype: torch.dtype, target: TargetModel, tmp_path: Path
) -> None:
    """Catches a cast, a renamed tensor or a lost option between an export and its import."""
    head = save_head(tmp_path / "head", target, **options)
    module = load_checkpoint(head)[1]
    tiny_head = {name: value.to(dtype) for name, value in module.items()}
    (tmp_path / "head" / "model.safetensors").unlink()
    save_file(tiny_head, tmp_path / "head" / "model.safetensors")
    export(head, to, tmp_path / "there")
    convert(str(tmp_path / "there"), target.name, tmp_path / "back")
    config, weights = load_checkpoint(tmp_path / "back")
    assert config["drafter"] == options and weights.keys() == tiny_head.keys()
    assert all(weights[name].dtype == dtype and torch.equal(weights[name], tiny_head[name]) for name in tiny_head)


def test_an_embedding_of_its_own(target: TargetModel, tmp_path: Path) -> None:
    """Catches a head for a fine-tune that drafts with the wrong embedding, and one refused for how it was rounded."""
    config = released_config(target, bias=False)
    for dtype in (torch.bfloat16, torch.float16):
        source = release(tmp_path / "released", config, eagle_weights(target, None, dtype))
        convert(source, target.name, tmp_path / str(dtype))
    AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded")
    convert(
        release(tmp_path / "released", config, eagle_weights(target, None)), str(tmp_path / "rounded"), tmp_path / "r"
    )
    other = eagle_weights(target, None)
    other["embed_tokens.weight"][20, 3] += 0.25
    with pytest.raises(ValueError, match=r"up to 0\.25 apart.*--target MODEL\. .* delete embed_tokens.weight"):
        convert(release(tmp_path / "released", config, other), target.name, tmp_path / "out")
    other["embed_tokens.weight"][20, 3] = torch.nan
    with pytest.raises(ValueError, match="up to inf apart"):
        convert(release(tmp_path / "released", config, other), target.name, tmp_path / "out")
    other["embed_tokens.weight"] = other["embed_tokens.weight"][:90].clone()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[90, 48\] in float32, and .* is \[97, 48\]"):
        convert(release(tmp_path / "released", config, other), target.name, tmp_path / "out")


def renamed(weights: dict[str, Tensor], prefix: str) -> None:
    """Put ``prefix`` before every name."""
    found = {f"{prefix}{name}": value for name, value in weights.items()}
    weights.clear()
    weights.update(found)


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
Q = "layers.0.self_attn.q_proj.weight"
REFUSED: dict[str, tuple[Change, str]] = {
    "no bias there": (lambda config, weights: config.pop("bias"), 'bias is absent, which means true.*"bias": false'),
    "missing": (lambda config, weights: weights.pop(Q), f"missing weights: {Q}"),
    "unknown": (
        lambda config, weights: weights.update({"norm.weight": weights[Q][0].clone()}),
        "unexpected weights: norm",
    ),
    "rope": (lambda config, weights: config.update(rope_theta=5e5), "RoPE is .*500000.* Give its own: --target"),
    "a model": (
        lambda config, weights: renamed(weights, "model."),
        "is no head of a known kind .known: a DFlash head, a DFlash2 head, a DSpark head, an EAGLE head",
    ),
}


def test_what_is_no_head_for_the_target(target: TargetModel, tmp_path: Path) -> None:
    """Catches a head that is written as a checkpoint, and drafts nonsense or fails hours later."""
    for what, (change, message) in REFUSED.items():
        config, weights = released_config(target, bias=False), eagle_weights(target, None)
        change(config, weights)
        with pytest.raises(ValueError, match=message):
            convert(release(tmp_path / "released", config, weights), target.name, tmp_path / "out")
        assert not (tmp_path / "out").exists(), what


class Trap:
    """Unpickled, it would make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_files_that_are_no_tensors(target: TargetModel, tmp_path: Path) -> None:
    """Catches a stranger's pickle that runs code, and damaged or divided files that end in a stack trace."""
    folder, marker = tmp_path / "released", tmp_path / "the-code-ran"
    source = release(folder, released_config(target), eagle_weights(target, 0.1), pickled=True)
    file = folder / "pytorch_model.bin"
    whole = file.read_bytes()
    torch.save({"fc.weight": Trap(marker)}, tmp_path / "trap")
    torch.save([torch.zeros(2)], tmp_path / "list")
    contents = [(tmp_path / "trap").read_bytes(), pickle.dumps(Trap(marker), protocol=2), whole[: len(whole) // 2]]
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"pytorch_model.bin holds more than tensors, or is cut off .* safetensors"
        ):
            convert(source, target.name, tmp_path / "out")
    file.write_bytes((tmp_path / "list").read_bytes())
    with pytest.raises(ValueError, match="must hold tensors by name"):
        convert(source, target.name, tmp_path / "out")
    assert not marker.exists()
