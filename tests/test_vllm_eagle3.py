"""Our EAGLE-3 exports in vLLM's own classes, where that is installed (make engines)."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from by_keys import new_head
from published import assert_equal
from safetensors.torch import load_file, save_file
from test_eagle3_layouts import FORMS, USUAL, V31, save_head, save_target
from test_vllm import PYTHON, ROOT
from torch import Tensor

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.hub.checkpoint import load_checkpoint, save_checkpoint
from drafters.layouts.export import export
from drafters.methods.eagle import Eagle3Drafter
from drafters.model.draft_head import draft_ids
from eval.configs import ParityConfig
from eval.figures.certificate import begun
from eval.figures.diagnosis import FAULT, PASS, compared, decoded, served
from eval.figures.readings import AS_LOADED
from eval.report.tables import make_console

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed: there is no {PYTHON}")
LONG = 9
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "official": ("official", FORMS["official"]),
    "qwen3, two layers, four states": ("vllm", FORMS["vllm"]),
    "3.1": ("vllm", {"taps": [1, 3, 6], "draft_vocab_size": 60, **V31}),
    "the target's LM head": ("llama.cpp", FORMS["llama.cpp"]),
    "speculators": ("speculators", FORMS["speculators"]),
    "a window": ("vllm", {"sliding_window": 4}),
    "a window, qwen3, two layers": ("vllm", {"sliding_window": 4, "layers": 2, "layer": "qwen3"}),
    "a window, speculators": ("speculators", {"sliding_window": 4}),
    "another shape": ("vllm", {"shape": {"intermediate_size": 40, "head_dim": 16, "num_key_value_heads": 1}}),
}


def served_by_its_class(program: str, folder: Path, cases: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What a program for vLLM's Python tells of each case; their ``out`` files are written."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run = subprocess.run(
        [PYTHON, Path(__file__).with_name(program), folder / "cases.json"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"states"')]
    assert len(told) == len(cases)
    return told


def case(folder: Path, number: int, target: str, inputs: dict[str, Tensor], **more: str) -> dict[str, str]:
    """A case of that program, with its inputs written: the head exported to ``out-<number>``."""
    given, out = (str(folder / f"{kind}-{number}.safetensors") for kind in ("inputs", "result"))
    save_file(inputs, given)
    return {"folder": str(folder / f"out-{number}"), "target": target, "inputs": given, "out": out, **more}


def test_its_classes_load_all_of_our_heads_and_compute_what_they_do(tmp_path: Path) -> None:
    """Catches a name that it leaves random, a window that it does not see, a norm, a residual or feedback at another
    place, draft ids mapped otherwise, and states of the target one layer apart: it serves all of these without a word.
    """
    target, cases = save_target(tmp_path / "target"), []
    for number, (form, options) in enumerate(CASES.values()):
        head = save_head(tmp_path / f"head-{number}", target, **options)
        export(head, form, tmp_path / f"out-{number}")
        count = len(options.get("taps", USUAL))
        inputs = {"states": torch.randn(LONG, count * target.hidden_size)}
        inputs |= {"embeddings": torch.randn(LONG, target.hidden_size)}
        cases.append(case(tmp_path, number, target.name, inputs))
    told = served_by_its_class("vllm_class.py", tmp_path, cases)
    for number, (name, found) in enumerate(zip(CASES, told, strict=True)):
        config, weights = load_checkpoint(tmp_path / f"head-{number}")
        given = Eagle3Shape(**config["drafter"])
        assert found["states"] == given.taps, name
        unread = [f"model.layers.{layer}.hidden_norm.weight" for layer in range(1, given.layers)]  # made, and not used
        shared = ["model.embed_tokens.weight", *([] if given.own_lm_head else ["lm_head.weight"])]
        assert sorted(found["left"]) == sorted(unread + shared), name
        head: Any = new_head(Eagle3Drafter, target.config, **config["drafter"])
        head.load_state_dict(weights)
        inputs, result = (load_file(tmp_path / f"{kind}-{number}.safetensors") for kind in ("inputs", "result"))
        with torch.no_grad():
            features = head.fused(inputs["states"])[None]
            fed_back = head(features, inputs["embeddings"][None], torch.arange(LONG)[None])[0]
            assert_equal(result["fed_back"], fed_back)
            if given.own_lm_head:
                logits, ids = head.lm_head(head.scored(fed_back)), draft_ids(weights.get("d2t"), target.vocab_size)
                assert_equal(result["logits"] if ids is None else result["logits"][:, ids], logits)
                assert ids is None or result["logits"].isinf().sum() == LONG * (target.vocab_size - len(ids))


def swapped(weights: dict[str, Tensor]) -> None:
    """Let the layer read the feature where the embedding was."""
    for part in ("q", "k", "v"):
        name = f"layers.0.self_attn.{part}_proj.weight"
        weights[name] = weights[name].roll(weights[name].shape[1] // 2, dims=1)


# The name that eval.parity gives the mistake, and what makes it of the right head. Neighbouring states of this target
# are so alike that a head accepts as much with either; the states that vLLM reads are tested above.
FAULTS: dict[str, tuple[dict[str, Any], Any]] = {
    AS_LOADED: ({}, None),
    "feedback on the wrong side of the final norm": ({"norm_output": False}, None),
    "embedding and feature swapped": ({}, swapped),
    "d2t ignored": ({}, lambda weights: weights["d2t"].zero_()),
}


def test_faults_that_vllm_serves_are_named(tmp_path: Path) -> None:
    """Catches conventions of its runner that its classes do not show, and a wrong head that passes or is misnamed."""
    path, bare = str(ROOT / "checkpoints" / "stdlib-target"), str(tmp_path / "bare")
    shutil.copytree(path, bare, ignore=shutil.ignore_patterns("*token*", "*.jinja"))  # the store has no hash of them
    target = TargetModel.from_pretrained(path, "float32", "cpu")
    prompts = begun(target, 32, 16, seed=0)
    plain = make_drafter("autoregressive", target)
    new = generate(target, plain, torch.tensor(prompts), max_new_tokens=48, eos_token_id=[]).tokens
    texts = torch.cat([torch.tensor(prompts), new], dim=1)
    features = tiny_run.write_texts(tmp_path / "f", target, [*texts], [torch.arange(64) >= 16] * len(texts))
    keys = {"steps": 150, "batch_tokens": 1024, "learning_rate": 2e-3, "eval_every": 1000, "lm_head_start": "target"}
    keys |= {"tap_layers": [tiny_run.TAP], "ttt_steps": 3, "draft_vocab": len(texts.unique())}
    right = tmp_path / "right"
    tiny_run.train_here("eagle3", tiny_run.settings(bare, features, right, fc_norm=True, norm_output=True, **keys))
    drafter: Any = load_drafter(str(right), target, tree="chain", depth=3)
    given = {"target": {"path": path, "dtype": "float32", "device": "cpu"}, "engine": "vllm", "python": str(PYTHON)}
    given |= {"count": len(prompts), "max_new_tokens": 32, "depth": 3}
    for number, (name, (options, change)) in enumerate(FAULTS.items()):
        config, weights = load_checkpoint(right)
        config["drafter"] |= options
        if change is not None:
            change(weights)
        wrong = tmp_path / f"head-{number}"
        save_checkpoint(wrong, weights, config, dtype=None)
        asked = ParityConfig.model_validate(given | {"checkpoint": str(wrong)})
        theirs, _ = served(drafter, prompts, asked, make_console())
        found = compared(drafter, decoded(drafter, prompts, asked, AS_LOADED), theirs, prompts, asked)
        assert found["readings"][0]["tau"]["value"] > 1.5  # so that there is something to compare
        if change is None and not options:
            assert found["verdict"] == PASS, found
        else:
            assert found["verdict"] == FAULT and name in found["named"], (name, found["named"])
