"""MTP layers in a target's files in vLLM's own classes, where that is installed (make engines)."""

import json
from pathlib import Path

import pytest
import torch
from mtp_layers import add_copies, with_layer
from published import assert_equal
from safetensors.torch import load_file, save_file
from test_vllm import PYTHON
from test_vllm_eagle3 import LONG, served_by_its_class

from drafters.heads.mtp.own import own_keys
from drafters.model.ends import load_frozen_ends
from drafters.model.weights import stored_tensors

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed: there is no {PYTHON}")
# Keys of released files; vLLM's experts on CPUs are multiples of 32 wide.
RELEASED = {"hidden_size": 64, "moe_intermediate_size": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
CASES = [("qwen", "qwen3_next", 1), ("mimo", "qwen2", 1), ("deepseek", "glm4_moe", 2), ("deepseek", "deepseek_v3", 1)]


def test_its_classes_compute_what_our_layers_do(tmp_path: Path) -> None:
    """Catches inputs of fc in another order, a norm or feedback on the other side, the embedding at position 0, a layer
    or a part of it under another name, and latent attention that is scaled otherwise."""
    cases, heads = [], []
    for number, (kind, family, layers) in enumerate(CASES):
        folder = tmp_path / f"target-{number}"
        heads.append(with_layer(folder, kind, family, layers=layers, num_nextn_predict_layers=layers, **RELEASED))
        if kind == "deepseek":
            add_copies(folder, layers)
        config = json.loads((folder / "config.json").read_text())
        if kind == "mimo":  # a family with code of its own; its layers are Qwen2's
            config["architectures"] = ["MiMoForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))
        given, out = (str(tmp_path / f"{name}-{number}.safetensors") for name in ("inputs", "result"))
        save_file({"states": torch.randn(LONG, 64), "embeddings": torch.randn(LONG, 64)}, given)
        cases.append({"target": str(folder), "inputs": given, "out": out, "layers": str(layers)})
    told = served_by_its_class("vllm_mtp_class.py", tmp_path, cases)
    for case, head, (_, family, layers), found in zip(cases, heads, CASES, told, strict=True):
        assert found["left"] == [], family
        ends = load_frozen_ends(case["target"], "float32")
        keys = own_keys(stored_tensors(case["target"], None), ends.config)
        head.shape = head.shape.model_copy(update=keys)
        inputs, result = load_file(case["inputs"]), load_file(case["out"])
        hidden, embeddings = inputs["states"][None], inputs["embeddings"][None]
        for step in range(layers):
            with torch.no_grad():
                hidden = head(hidden, embeddings, torch.arange(LONG)[None] + step, None, None, step)
                assert_equal(result[f"fed_back_{step}"], hidden[0])
                assert_equal(result[f"logits_{step}"], ends.lm_head(head.parts(step).scored(hidden[0])))
