"""Checkpoints in another engine's form."""

import json
from pathlib import Path

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from drafters import TargetModel
from drafters.checkpoint import make_config, save_checkpoint
from drafters.eagle import EagleHead
from drafters.export import export, llama_config


def save_head(folder: Path, target: TargetModel, method: str = "eagle") -> str:
    save_checkpoint(folder, EagleHead(target.config), make_config(method, {}, target))
    return str(folder)


def test_a_head_becomes_a_llama_of_one_layer(tmp_path: Path) -> None:
    """Catches "bias": true, with which vLLM accepts nothing and says nothing; a layer count or a width of the target's;
    tensors renamed or cast on the way."""
    target = tiny_run.save_target(tmp_path / "target")
    head = save_head(tmp_path / "head", target)
    export(head, "vllm", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    config = LlamaConfig.from_pretrained(tmp_path / "out")
    assert written["bias"] is False
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert config.num_hidden_layers == 1
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rope_parameters"):
        assert getattr(config, name) == getattr(target.config, name), name
    assert (written["rope_theta"], written["rope_scaling"]) == (target.config.rope_parameters["rope_theta"], None)
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(head), tmp_path / "out"))
    assert before.keys() == after.keys() == {*EagleHead(target.config).state_dict()}
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_rope_that_old_readers_do_not_know_is_not_told_as_the_default() -> None:
    """Catches Llama 3.1's scaling dropped for readers of the old keys, which then draft with other positions."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert "rope_scaling" not in llama_config(LlamaConfig(rope_parameters=rope))


def test_what_vllm_would_load_wrongly_is_refused(tmp_path: Path) -> None:
    """Catches heads served beside another target, of another method or family, or with a weight left random."""
    target = tiny_run.save_target(tmp_path / "target")
    head = save_head(tmp_path / "head", target)
    torch.manual_seed(1)
    other = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    other.model.model.norm.weight.mul_(2)
    other.model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="was trained for .*target.* is another model"):
        export(head, "vllm", tmp_path / "out", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="of the method 'kangaroo'; vLLM loads EAGLE heads"):
        export(save_head(tmp_path / "kangaroo", target, "kangaroo"), "vllm", tmp_path / "out")
    mistral = tiny_run.save_target(tmp_path / "mistral", "mistral")
    with pytest.raises(ValueError, match="a head for the family 'mistral'"):
        export(save_head(tmp_path / "mistral-head", mistral), "vllm", tmp_path / "out")
    tokens = make_config("eagle", {"inputs": "token"}, target)
    save_checkpoint(tmp_path / "tokens", EagleHead(target.config, "token"), tokens)
    with pytest.raises(ValueError, match=r"reads 'token', and vLLM .* train one with inputs=feature\+shifted_token"):
        export(str(tmp_path / "tokens"), "vllm", tmp_path / "out")
    lacking = {name: value for name, value in EagleHead(target.config).state_dict().items() if name != "fc.weight"}
    save_checkpoint(tmp_path / "lacking", lacking, make_config("eagle", {}, target))
    with pytest.raises(ValueError, match="missing weights: fc.weight"):
        export(str(tmp_path / "lacking"), "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="target is not empty"):
        export(head, "vllm", tmp_path / "target")
