"""Our DFlash and DSpark exports in vLLM's own classes, where that is installed (make engines)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from by_keys import new_head
from overfitted_block import trained
from programs import status
from published import assert_equal
from rigged import BLOCK
from safetensors.torch import load_file
from test_block_layouts import FIRST, FORMS, save_head
from test_eagle3_layouts import save_target
from test_vllm import PYTHON, ROOT
from test_vllm_eagle3 import case, served_by_its_class
from torch import Tensor

import eval.parity
from drafters import TargetModel, generate, make_drafter
from drafters.heads.block.shape import BlockShape
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.export import export
from drafters.methods import drafter_class
from drafters.model.draft_head import draft_ids
from eval.figures.certificate import begun

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed: there is no {PYTHON}")
CONTEXT, ROWS = 9, BLOCK["block_size"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: FORMS[name]
    for name in (
        "z-lab", "vllm dflash", "vllm dflash, all tokens", "sglang dflash", "speculators dflash", "vllm dspark",
        "vllm dspark, fill in", "speculators dspark, fill in", "llama.cpp dspark",
    )
} | {"speculators dspark": ("speculators", "dspark", FIRST | {"draft_vocab_size": 60})}  # fmt: skip


def test_its_classes_load_all_of_our_heads_and_compute_what_they_do(tmp_path: Path) -> None:
    """Catches a name that it leaves random, states of the target one layer apart, the other layout, a causal block,
    another mask, draft ids mapped otherwise, context keys without a norm or RoPE, a Markov head of other tokens."""
    target, cases = save_target(tmp_path / "target"), []
    for number, (form, method, options) in enumerate(CASES.values()):
        # vLLM's norms on a CPU take heads whose width is a multiple of 8.
        options = options | {"shape": options.get("shape", {}) | {"head_dim": 16}}
        export(save_head(tmp_path / f"head-{number}", method, target, **options), form, tmp_path / f"out-{number}")
        count = len(options.get("taps", BLOCK["taps"]))
        inputs = {"states": torch.randn(CONTEXT, count * target.hidden_size)}
        inputs |= {"embeddings": torch.randn(ROWS, target.hidden_size)}
        inputs |= {"previous": torch.randint(target.vocab_size, (ROWS,))}
        cases.append(case(tmp_path, number, target.name, inputs, method=method))
    told = served_by_its_class("vllm_block_class.py", tmp_path, cases)
    for number, (name, found) in enumerate(zip(CASES, told, strict=True)):
        config, weights = load_checkpoint(tmp_path / f"head-{number}")
        kind: Any = drafter_class(config["drafter_type"])
        given = kind.options(**config["drafter"])
        assert (found["states"], found["mask"], found["causal"]) == (given.taps, given.mask_token_id, given.causal), (
            name
        )
        assert found["anchor_first"] is (given.layout == "anchor-first"), name
        shared = ["model.embed_tokens.weight", *([] if given.draft_vocab_size else ["lm_head.weight"])]
        assert sorted(name for name in found["left"] if name != "model.mask_embedding") == sorted(shared), name
        head = new_head(kind, target.config, **config["drafter"])
        head.load_state_dict(weights)
        inputs, result = (load_file(tmp_path / f"{kind}-{number}.safetensors") for kind in ("inputs", "result"))
        with torch.no_grad():
            compare(head, given, weights, inputs, result)


def compare(
    head: Any, given: Any, weights: dict[str, Tensor], inputs: dict[str, Tensor], result: dict[str, Tensor]
) -> None:
    """Our module's block pass and heads beside what vLLM's class computed."""
    see = torch.ones(1, 1, ROWS, CONTEXT + ROWS, dtype=torch.bool)
    mask = see.tril(CONTEXT) if given.causal else see
    positions = torch.arange(CONTEXT + ROWS)[None]
    states = head(inputs["states"][None], inputs["embeddings"][None], positions, mask)[0]
    assert_equal(result["states"], states)
    if given.draft_vocab_size is not None:
        ids = draft_ids(weights["d2t"], result["logits"].shape[1]) if "bias" not in result else None
        assert_equal(result["logits"] if ids is None else result["logits"][:, ids], head.lm_head(states))
    if "bias" in result:
        assert_equal(result["bias"], head.markov_head.markov_w2(head.markov_head.markov_w1(inputs["previous"])))
        assert ("confidence" in result) == given.confidence_head
        if given.confidence_head:
            assert_equal(result["confidence"], head.confidence(states, inputs["previous"]).sigmoid())


def test_the_acceptance_trained_is_the_acceptance_served(tmp_path: Path) -> None:
    """Catches positions or slots of its runner that its classes do not show. It takes minutes: vLLM compiles."""
    path = ROOT / "checkpoints" / "stdlib-target"
    target = TargetModel.from_pretrained(str(path), "float32", "cpu")
    starts = torch.tensor(begun(target, 8, 16, seed=0))  # those that the program begins with
    new = generate(target, make_drafter("autoregressive", target), starts, max_new_tokens=40, eos_token_id=[]).tokens
    options = {"block_size": 8, "mask_token_id": 0, "taps": [2, 3, 6, 9], "layers": 1, "layout": "fill-in"}
    ids = new.unique()
    options |= {"draft_vocab_size": len(ids)}
    given: Any = BlockShape(**options)
    head = trained(target, given, torch.cat([starts, new], dim=1), 16, ids, steps=40)
    save_checkpoint(tmp_path / "head", head, make_config("dflash", options, target))
    line = ["--checkpoint", tmp_path / "head", "--target", path, "--engine", "vllm", f"python={PYTHON}"]
    line += ["target.dtype=float32", "target.device=cpu", "count=8", "max_new_tokens=32", f"out={tmp_path / 'out'}"]
    assert status(eval.parity.main, *line) == 0
    as_loaded = json.loads((tmp_path / "out" / "parity.json").read_text())["readings"][0]
    assert as_loaded["tau"]["value"] > 1.5  # so that there is something to compare
    assert as_loaded["alike"]["value"] > 0.9
