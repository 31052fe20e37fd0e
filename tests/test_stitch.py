"""Stitching: a trained MTP layer in a copy of its target's files, of any form, and nothing else changed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import quantised_folders
import tiny
import tiny_run
import torch
from by_keys import new_drafter
from mtp_layers import glm, mtp, with_layer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlavaConfig
from transformers.modeling_layers import MtpModel

from drafters import TargetModel, load_drafter, make_drafter
from drafters import stitch as program
from drafters.heads.mtp.own import own_names
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.export import export
from drafters.model.draft_head import DRAFT_IDS
from drafters.model.weights import stored_tensors


@pytest.mark.parametrize(("shards", "written"), [(1, "model.safetensors"), (2, "model-2.safetensors")])
def test_stitching_changes_the_layer_alone(tmp_path: Path, shards: int, written: str) -> None:
    """Catches a tensor of the target that changes, a target that is written into, a stale index, a layer that is
    read from another place than it was written to, and a file of settings whose edit changes the target's."""
    with_layer(tmp_path / "target", "qwen", shards=shards)
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    drafter: Any = make_drafter("mtp", target)
    for weights in drafter.module.parameters():
        weights.data.mul_(1.25)
    drafter.module.register_buffer(
        DRAFT_IDS, torch.arange(97, dtype=torch.int32)
    )  # as train.tools.draft_vocab writes it
    drafter.save_pretrained(tmp_path / "trained")
    before = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new"), "--target", str(tmp_path / "target")])
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == before
    links = {path.name for path in (tmp_path / "new").iterdir() if path.stat().st_nlink > 1}
    assert links == ({"model-1.safetensors"} if shards > 1 else set())
    changed = {path.name for path in (tmp_path / "new").iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed - {"config.json", "model.safetensors.index.json"} == {written}
    stitched = TargetModel.from_pretrained(str(tmp_path / "new"), "float32", "cpu")
    assert stitched.fingerprint() == target.fingerprint()
    state = make_drafter("mtp", stitched).module.state_dict()  # type: ignore[attr-defined]
    trained = load_checkpoint(tmp_path / "trained")[1]
    assert trained.pop(DRAFT_IDS) is not None
    assert trained.keys() == state.keys() and all(
        torch.equal(value.float(), state[key]) for key, value in trained.items()
    )


def test_stitching_a_layer_into_a_target_without_any(tmp_path: Path) -> None:
    """Catches an index without the new file, and a config.json that says that there is no layer."""
    model = families.saved("qwen3", {}, tmp_path / "target")
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    for name in ("target", "shards"):
        target = TargetModel.from_pretrained(str(tmp_path / name), "float32", "cpu")
        drafter = mtp(target, "chain")
        drafter.save_pretrained(tmp_path / "trained")
        program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new" / name)])
        folder = tmp_path / "new" / name
        assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
        assert (folder / "model-mtp.safetensors").is_file() == (name == "shards")
        stitched: Any = make_drafter("mtp", TargetModel.from_pretrained(str(folder), "float32", "cpu"))
        assert torch.equal(stitched.module.fc.weight, drafter.module.fc.weight.bfloat16().float())


def test_stitching_keeps_dtypes_and_what_was_not_trained(tmp_path: Path) -> None:
    """Catches a layer in float32 because the target has a few such tensors, and a router's bias rounded to 16 bits."""
    glm(tmp_path / "target", torch.bfloat16)
    drafter: Any = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path / "target"), "bfloat16", "cpu"))
    drafter.module.fc.weight.data.mul_(2)
    drafter.save_pretrained(tmp_path / "trained")
    program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new")])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "new"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key].dtype == value.dtype
        assert torch.equal(after[key], value) == (key != "model.layers.3.eh_proj.weight")


@pytest.mark.parametrize(
    ("kind", "family", "layers", "written"),
    [
        ("qwen", "llama", 2, {"mtp.layers.1.mlp.up_proj.weight"}),
        ("deepseek", "glm4_moe", 2, {"model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.weight"}),
        ("deepseek", "deepseek_v3", 1, {"model.layers.3.self_attn.kv_b_proj.weight"}),
    ],
)
def test_stitching_several_layers_and_copies(
    tmp_path: Path, kind: str, family: str, layers: int, written: set[str]
) -> None:
    """Catches a later layer under the first one's names, and copies of embedding and LM head that are left out."""
    with_layer(tmp_path / "target", kind, family, shards=2, layers=layers)
    if kind == "deepseek":
        parts = [load_file(tmp_path / "target" / f"model-{number}.safetensors") for number in (1, 2)]
        copies = {f"model.layers.{2 + layers}.shared_head.head.weight": parts[0]["lm_head.weight"].clone()}
        save_file(parts[1] | copies, tmp_path / "target" / "model-2.safetensors", {"format": "pt"})
        index = tmp_path / "target" / "model.safetensors.index.json"
        names = json.loads(index.read_text())
        names["weight_map"] |= dict.fromkeys(copies, "model-2.safetensors")
        index.write_text(json.dumps(names))
    drafter: Any = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu"))
    names = own_names(stored_tensors(str(tmp_path / "target"), None), kind, 3)  # type: ignore[arg-type]
    for name in written:
        drafter.module.get_parameter(names[name]).data.fill_(0.25)
    drafter.save_pretrained(tmp_path / "trained")
    program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new")])
    before, after = (load_file(tmp_path / name / "model-2.safetensors") for name in ("target", "new"))
    assert before.keys() == after.keys()
    assert {key for key, value in before.items() if not torch.equal(after[key], value)} == written
    assert all((after[key] == 0.25).all() for key in written)
    assert (tmp_path / "new" / "model-1.safetensors").stat().st_nlink == 2
    stitched: Any = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path / "new"), "float32", "cpu"))
    assert stitched.module.shape == drafter.module.shape


def test_stitching_new_layers(tmp_path: Path) -> None:
    """Catches a config.json with another number of layers, so that engines would load only one, and tensors that
    transformers does not find. Its patterns of names are those of released numbers of layers."""
    families.saved("glm4_moe", {}, tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    drafter = mtp(target, "chain", kind="deepseek", layers=3)
    drafter.save_pretrained(tmp_path / "trained")
    program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new")])
    assert json.loads((tmp_path / "new" / "config.json").read_text())["num_nextn_predict_layers"] == 3
    stitched: Any = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path / "new"), "float32", "cpu"))
    assert torch.equal(stitched.module.others[1].fc.weight, drafter.module.others[1].fc.weight.bfloat16().float())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\." for number in (3, 4, 5)]
    theirs: Any = MtpModel.from_pretrained(model)
    for number, layer in enumerate(theirs.layers):
        assert torch.equal(layer.eh_proj.weight, stitched.module.parts(number).fc.weight)
        block, ours = layer.mtp_block.state_dict(), stitched.module.layers[number].state_dict()
        assert all(torch.equal(block[name], value) for name, value in ours.items())


@pytest.mark.parametrize("kind", ["qwen", "deepseek"])
def test_stitching_into_a_multimodal_target(tmp_path: Path, kind: str) -> None:
    """Catches a layer under the text model's names, which the files of the whole model do not have."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=tiny.tiny_config("llama").to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "target")
    name = str(tmp_path / "target")
    for number in range(2):  # a new layer, then one in its place
        target = TargetModel.from_pretrained(name, "float32", "cpu")
        drafter = mtp(target, "chain", kind=kind)
        drafter.module.fc.weight.data.fill_(number)
        drafter.save_pretrained(tmp_path / "trained")
        program.main([str(tmp_path / "trained"), "--out", str(tmp_path / f"new{number}"), "--target", name])
        before, after = (
            load_file(Path(folder) / "model.safetensors") for folder in (name, str(tmp_path / f"new{number}"))
        )
        assert len(after) == (len(before) if number else len(before) + len(drafter.module.state_dict()))
        name = str(tmp_path / f"new{number}")
        stitched: Any = make_drafter("mtp", TargetModel.from_pretrained(name, "float32", "cpu"))
        assert (stitched.module.fc.weight == number).all()


def test_stitching_joined_experts(tmp_path: Path) -> None:
    """Catches experts that are written one by one where the files have them in one tensor."""
    with_layer(tmp_path / "target", "qwen", "qwen3_moe", joined=True)
    drafter: Any = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu"))
    drafter.module.layers[0].mlp.experts.down_proj.data.fill_(0.5)
    drafter.save_pretrained(tmp_path / "trained")
    program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new")])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "new"))
    assert before.keys() == after.keys() and (after["mtp.layers.0.mlp.experts.down_proj"] == 0.5).all()


def test_stitching_an_adapter(target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches a LoRA whose matrices are taken for the layer's, or that is left out."""
    settings = tiny_run.settings(target.name, features, tmp_path / "run", head={"kind": "qwen"}, start="random")
    tiny_run.train_here("mtp", settings | {"steps": 1})
    settings |= {"init_from": str(tmp_path / "run"), "out": str(tmp_path / "lora"), "lora": {"r": 2}}
    tiny_run.train_here("mtp", settings | {"steps": 2, "warmup_steps": 0, "learning_rate": 0.1})
    program.main([str(tmp_path / "lora"), "--out", str(tmp_path / "new")])
    merged, base = (load_drafter(str(tmp_path / name), target).module for name in ("lora", "run"))
    stitched = make_drafter("mtp", TargetModel.from_pretrained(str(tmp_path / "new"), "float32", "cpu"))
    found = stitched.module.fc.weight  # type: ignore[attr-defined]
    assert torch.equal(found, merged.fc.weight.to(found.dtype)) and not torch.equal(found, base.fc.weight)


def test_stitching_what_does_not_belong_together(tmp_path: Path) -> None:
    """Catches a layer in another target, one of another kind, another method's head, and a target that is no folder."""
    with_layer(tmp_path / "target", "qwen")
    families.saved("llama", {"vocab_size": 99}, tmp_path / "other")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    mtp(target, "chain", kind="mimo").save_pretrained(tmp_path / "mimo")
    mtp(target, "chain").save_pretrained(tmp_path / "qwen")
    new_drafter("eagle", target).save_pretrained(tmp_path / "eagle")
    for checkpoint, name, message in (
        ("qwen", str(tmp_path / "other"), "was trained for .* and .*other has the fingerprint"),
        ("mimo", str(tmp_path / "target"), "is of kind mimo, and the MTP layer of .* of kind qwen"),
        ("eagle", str(tmp_path / "target"), "holds a drafter of type 'eagle', and only mtp is stitched"),
    ):
        with pytest.raises(ValueError, match=message):
            program.main([str(tmp_path / checkpoint), "--out", str(tmp_path / "new"), "--target", name])
    with pytest.raises(ValueError, match="for vLLM: engines load it from its target's files; .* drafters.stitch"):
        export(str(tmp_path / "qwen"), "vllm", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_stitching_writes_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a layer in 16 bits in a quantised target, a target that is overwritten, and a read-only folder that is
    found out after the files were read."""
    with_layer(tmp_path / "target", "qwen")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    mtp(target, "chain").save_pretrained(tmp_path / "trained")
    shutil.copytree(tmp_path / "target", tmp_path / "fp8")
    quantised_folders.fp8(tmp_path / "fp8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for out, name, message in (
        ("new", "fp8", r"fp8 is quantised \(fp8\), and the layer is not; give the target in bf16"),
        ("target", "target", "--out .*target is not empty; give another folder"),
        ("fp8", "fp8", "--out .*fp8 is not empty; give another folder"),
    ):
        given = [str(tmp_path / "trained"), "--out", str(tmp_path / out), "--target", str(tmp_path / name)]
        with pytest.raises(ValueError, match=message):
            program.main(given)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ValueError, match="may not be written to; choose another folder"):
        program.main([str(tmp_path / "trained"), "--out", str(tmp_path / "new")])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
