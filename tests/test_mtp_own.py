"""MTP layers in a target's own files: read as they are, or refused with the reason."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import families
import peft
import pytest
import quantised_folders
import torch
from conformance import NO_EOS, plain_greedy, prompt
from mtp_layers import add_copies, glm, with_layer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.heads.mtp.own import load_own

FAMILIES = [
    ("qwen", "qwen3", 2),
    ("qwen", "qwen3_next", 1),
    ("qwen", "qwen3_5_text", 1),
    ("mimo", "qwen2", 1),
    ("mimo", "qwen2", 2),
    ("deepseek", "glm4_moe", 1),
    ("deepseek", "glm4_moe", 3),
    ("deepseek", "deepseek_v3", 1),
    ("deepseek", "glm4_moe_lite", 2),
]


@pytest.mark.parametrize(("kind", "family", "layers"), FAMILIES)
def test_the_layers_in_a_targets_files(tmp_path: Path, kind: str, family: str, layers: int) -> None:
    """Catches tensors of another name or layer, experts in another order, a layer that transformers' own loading trips
    over, and copies of embedding and LM head taken for the layer's."""
    head = with_layer(tmp_path, kind, family, layers=layers)
    if kind == "deepseek":
        add_copies(tmp_path, layers)
    target = TargetModel.from_pretrained(str(tmp_path), "float32", "cpu")
    drafter: Any = make_drafter("mtp", target, depth=2)
    assert (drafter.module.shape.kind, drafter.module.shape.layers) == (kind, layers)
    assert drafter.module.shape.feeds_back_normed == (kind != "deepseek" or family == "deepseek_v3")
    weights = head.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in drafter.module.state_dict().items())
    result = generate(target, drafter, [prompt(9)], max_new_tokens=12, eos_token_id=NO_EOS)
    assert result.tokens[0].tolist() == plain_greedy(target, prompt(9), 12)
    drafter.save_pretrained(tmp_path / "saved")
    again: Any = load_drafter(str(tmp_path / "saved"), target)
    assert again.module.shape == drafter.module.shape


def test_copies_that_are_none(tmp_path: Path) -> None:
    """Catches an MTP layer with its own LM head that drafts with the target's without a warning."""
    with_layer(tmp_path, "deepseek", "glm4_moe")
    add_copies(tmp_path)
    file = tmp_path / "model.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_own(str(tmp_path))
    save_file(load_file(file) | {"model.layers.3.shared_head.head.weight": torch.ones(97, 48)}, file, {"format": "pt"})
    with pytest.warns(UserWarning, match="model.layers.3.shared_head.head.weight differs from lm_head.weight. The MTP"):
        load_own(str(tmp_path))


def test_a_layer_behind_dense_ones_has_experts(tmp_path: Path) -> None:
    """Catches a dense layer for GLM-4.5, whose first layers are dense and whose MTP layer has experts, and experts in
    another order than the files'."""
    model = glm(tmp_path)
    drafter: Any = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path), "float32", "cpu"))
    theirs, ours = model.model.layers[2].state_dict(), drafter.module.layers[0].state_dict()
    assert any("experts" in name for name in ours)
    assert theirs.keys() == ours.keys() and all(torch.equal(value, ours[key]) for key, value in theirs.items())


def test_the_layer_of_a_named_model_and_of_an_adapter(tmp_path: Path) -> None:
    """Catches a layer that is looked for under the name that reports give a model, and a LoRA without a config.json."""
    with_layer(tmp_path / "own", "qwen")
    named = TargetModel(AutoModelForCausalLM.from_pretrained(tmp_path / "own"), name="mine")
    assert make_drafter("mtp", named).name == "mtp"
    options = peft.LoraConfig(r=2, target_modules="all-linear")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "own"), options).save_pretrained(
        tmp_path / "lora"
    )
    target = TargetModel.from_pretrained(str(tmp_path / "lora"), "float32", "cpu")
    with pytest.raises(ValueError, match="lora is a LoRA adapter of .*own, which may have an MTP layer; merge it"):
        make_drafter("mtp", target)


def test_quantised_targets(tmp_path: Path) -> None:
    """Catches a layer in 16 bits that is refused because the target is quantised, and a quantised one that is read."""
    with_layer(tmp_path / "both", "qwen")
    plain = load_file(tmp_path / "both" / "model.safetensors")
    shutil.copytree(tmp_path / "both", tmp_path / "target")
    for name in ("both", "target"):
        quantised_folders.fp8(tmp_path / name)
    file = tmp_path / "target" / "model.safetensors"
    whole = {key: value for key, value in load_file(file).items() if not key.startswith("mtp.")}
    save_file(whole | {key: value for key, value in plain.items() if key.startswith("mtp.")}, file, {"format": "pt"})
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    drafter: Any = make_drafter("mtp", target)
    assert torch.equal(drafter.module.fc.weight, plain["mtp.fc.weight"])
    assert generate(target, drafter, [prompt(9)], max_new_tokens=4).tokens.shape == (1, 4)
    with pytest.raises(ValueError, match=r"its MTP layer is quantised \(mtp.layers.0.mlp.down_proj"):
        load_own(str(tmp_path / "both"))


def test_a_routers_bias_stays_exact(tmp_path: Path) -> None:
    """Catches a bias in 16 bits, which sends tokens to other experts than the target's own layers do."""
    glm(tmp_path / "target", torch.bfloat16)
    bias = load_file(tmp_path / "target" / "model.safetensors")["model.layers.3.mlp.gate.e_score_correction_bias"]
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "bfloat16", "cpu")
    drafter: Any = make_drafter("mtp", target)
    drafter.save_pretrained(tmp_path / "saved")
    for each in (drafter, load_drafter(str(tmp_path / "saved"), target)):
        assert torch.equal(each.module.layers[0].mlp.gate.e_score_correction_bias, bias)
    generate(target, drafter, [prompt(9)], max_new_tokens=4)


@pytest.mark.parametrize("there", ["model.mtp.layers.0.eh_proj", "model.mtp_linear_proj.0", "model.layers.3.mixer"])
def test_layers_of_an_unknown_kind(tmp_path: Path, there: str) -> None:
    """Catches a layer whose inputs have an unknown order, and that is called missing from the files."""
    families.saved("llama", {"num_nextn_predict_layers": 1}, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{there}.weight": torch.zeros(48, 96)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"no known kind \({there}.weight\), so the order of its inputs is unknown"):
        load_own(str(tmp_path))


def test_what_is_no_layer_is_refused(tmp_path: Path) -> None:
    """Catches a draft from random weights where the layer is missing, lacks tensors, or is half of a second one."""
    families.saved("llama", {"num_nextn_predict_layers": 1}, tmp_path / "none")
    target = TargetModel.from_pretrained(str(tmp_path / "none"), "float32", "cpu")
    with pytest.raises(
        ValueError, match="has no MTP layer; its config.json says num_nextn_predict_layers: the layer is"
    ):
        make_drafter("mtp", target)
    with_layer(tmp_path / "shards", "qwen", shards=2)
    (tmp_path / "shards" / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match="model-2.safetensors does not exist"):
        load_own(str(tmp_path / "shards"))
    with_layer(tmp_path / "some", "qwen")
    target = TargetModel.from_pretrained(str(tmp_path / "some"), "float32", "cpu")
    with pytest.raises(ValueError, match="kind is mimo, but the MTP layers of .* have qwen; leave it out"):
        make_drafter("mtp", target, kind="mimo")
    for options, message in (
        ({"tree": "chain", "paths": [[0]]}, "paths is given, and tree=chain does not read it"),
        ({"adapter": "runs/law"}, "adapter is given, and no checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter("mtp", target, **options)
    with pytest.raises(ValueError, match="TargetModel"):
        make_drafter("mtp", target.model)  # type: ignore[arg-type]
    file = tmp_path / "some" / "model.safetensors"
    whole = load_file(file)
    for change, message in (
        ({"mtp.norm.weight": None}, "are not those of a layer of llama: missing: mtp.norm.weight. Download"),
        ({"mtp.fc.weight": None}, "missing: mtp.fc.weight"),
        ({"mtp.fc.weight": torch.zeros(3, 2)}, r"of another shape: mtp.fc.weight \[3, 2\], not \[48, 96\]"),
        ({"mtp.embed_tokens.weight": torch.zeros(97, 48)}, "unexpected: mtp.embed_tokens.weight"),
        ({"mtp.fc.weight": torch.zeros(48, 48, dtype=torch.int8)}, r"its MTP layer is quantised \(mtp.fc.weight\)"),
        ({"mtp.layers.1.mlp.down_proj.weight": torch.zeros(48, 96)}, "missing: mtp.layers.1.input_layernorm.weight, "),
        ({"mtp.fc.weight_scale": torch.ones(1)}, r"its MTP layer is quantised \(mtp.fc.weight_scale\)"),
    ):
        changed = {key: value for key, value in (whole | change).items() if value is not None}
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            make_drafter("mtp", target)
