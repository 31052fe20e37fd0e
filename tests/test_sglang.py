"""Our export in SGLang's own classes, where that is installed (make .venv-sglang/.installed)."""

import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import test_block_layouts
import test_eagle3_layouts
import torch
from by_keys import new_head
from published import assert_equal
from safetensors.torch import load_file, save_file
from test_eagle3_layouts import FORMS
from test_export import save_head, save_target

from drafters import TargetModel
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.export import check, export
from drafters.methods.eagle import Eagle3Drafter, EagleDrafter
from drafters.model.draft_head import draft_ids
from drafters.model.layers import default_layer

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"SGLang is not installed: there is no {PYTHON}")
# What SGLang takes from the target, and a checkpoint of a head does not hold.
ENDS = ["model.embed_tokens.weight", "lm_head.weight"]


def in_sglang(
    folder: Path, target: TargetModel, heads: Sequence[Path], states: int = 1
) -> list[tuple[list[str], list[int]]]:
    """Each head loaded by SGLang, what it computes in ``out.safetensors`` beside it; of each, what it did not get, and
    the target's states that it is given."""
    inputs = {"features": torch.randn(9, states * target.hidden_size), "embeddings": torch.randn(9, target.hidden_size)}
    save_file(inputs, folder / "inputs.safetensors")
    cases = [
        {"folder": str(head), "target": target.name, "inputs": str(folder / "inputs.safetensors")}
        | {"out": str(head / "out.safetensors")}
        for head in heads
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    told = lines_of("sglang_class.py", folder / "cases.json")
    return [([name for name in each["left"] if name not in ENDS], each["states"]) for each in told]


def lines_of(program: str, file: Path) -> list[dict[str, Any]]:
    """What a program of this folder says in SGLang's Python."""
    run = subprocess.run(
        [PYTHON, Path(__file__).with_name(program), file],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"')]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3"])
def test_its_class_loads_all_of_our_head_and_computes_our_features(family: str, tmp_path: Path) -> None:
    """Catches a name that it does not know, a bias where it has none, another layout of q, k and v, another rotation:
    what it loads without a word and drafts nonsense with."""
    target = save_target(tmp_path / "target", family)
    folders = []
    layer = {"layer": default_layer(target.config)}
    for name, options in (("plain", {}), ("biased", {"fc_bias": True})):
        folders.append(tmp_path / f"sglang-{name}")
        export(save_head(tmp_path / name, target, **layer, **options), "sglang", folders[-1])
    for folder, (left, _) in zip(folders, in_sglang(tmp_path, target, folders), strict=True):
        assert left == []
        config, weights = load_checkpoint(tmp_path / folder.name.removeprefix("sglang-"))
        ours = new_head(EagleDrafter, target.config, **config["drafter"])
        ours.load_state_dict(weights)
        given = load_file(tmp_path / "inputs.safetensors")
        with torch.no_grad():
            features = ours(given["features"][None], given["embeddings"][None], torch.arange(9)[None])[0]
        assert_equal(load_file(folder / "out.safetensors")["features"], features)


EAGLE3 = {
    "draft vocabulary": FORMS["sglang"],
    "before fc": {"norm_before_fc": True},
    "the target's LM head": {"own_lm_head": False, "taps": [0, 2, 5]},
}


def test_its_eagle3_class_reads_the_same_states_and_computes_what_our_head_does(tmp_path: Path) -> None:
    """Catches states of the target one layer apart, a norm or feedback at another place, draft ids without offsets."""
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    heads, folders = [], []
    for number, options in enumerate(EAGLE3.values()):
        heads.append(test_eagle3_layouts.save_head(tmp_path / f"head-{number}", target, **options))
        folders.append(tmp_path / f"sglang-{number}")
        export(heads[-1], "sglang", folders[-1])
    for head, folder, (left, states) in zip(heads, folders, in_sglang(tmp_path, target, folders, 3), strict=True):
        config, weights = load_checkpoint(head)
        given: Any = Eagle3Shape(**config["drafter"])
        assert (left, states) == ([], given.taps)
        ours: Any = new_head(Eagle3Drafter, target.config, **config["drafter"])
        ours.load_state_dict(weights)
        inputs, found = load_file(tmp_path / "inputs.safetensors"), load_file(folder / "out.safetensors")
        with torch.no_grad():
            fed_back = ours(ours.fused(inputs["features"])[None], inputs["embeddings"][None], torch.arange(9)[None])[0]
            assert_equal(found["features"], fed_back)
            if given.own_lm_head:
                assert_equal(found["logits"], ours.lm_head(ours.scored(fed_back)))
        if given.draft_vocab_size is not None:
            assert torch.equal(found["ids"], draft_ids(weights["d2t"], target.vocab_size))


def test_what_it_swallows_is_what_our_check_refuses(tmp_path: Path) -> None:
    """Catches a check that lets pass what SGLang serves without a word: a tensor that is missing."""
    target = save_target(tmp_path / "target")
    export(save_head(tmp_path / "head", target), "sglang", tmp_path / "sglang")
    file = tmp_path / "sglang" / "model.safetensors"
    weights: dict[str, Any] = load_file(file)
    del weights["layers.0.mlp.down_proj.weight"], weights["fc.bias"]
    save_file(weights, file)
    left, _ = in_sglang(tmp_path, target, [tmp_path / "sglang"])[0]
    assert left == ["model.layers.0.mlp.down_proj.weight", "model.fc.bias"]
    with pytest.raises(ValueError, match=r"missing tensors: fc\.bias, layers\.0\.mlp\.down_proj\.weight"):
        check(tmp_path / "sglang", "sglang")


def test_it_reads_how_a_block_attends_and_the_temperatures(tmp_path: Path) -> None:
    """Catches a causal head that it serves in both directions, and a file of temperatures in another format."""
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    folders, expected = [], []
    for method, causal, temperatures in itertools.product(
        ("dflash", "dspark"), (False, True), (None, [1.5, 2, 1, 1, 3])
    ):
        if method == "dflash" and temperatures:
            continue
        layout = "anchor-first" if method == "dspark" else "fill-in"
        options = {"layout": layout, "causal": causal, "confidence_temperatures": temperatures}
        folders.append(str(tmp_path / f"sglang-{len(folders)}"))
        head = test_block_layouts.save_head(tmp_path / f"head-{len(folders)}", method, target, **options)
        export(head, "sglang", Path(folders[-1]))
        expected.append({"causal": causal, "temperatures": temperatures})
    (tmp_path / "folders.json").write_text(json.dumps(folders))
    assert lines_of("sglang_block.py", tmp_path / "folders.json") == expected


def test_it_takes_the_arguments_of_our_worker(tmp_path: Path) -> None:
    """Catches an argument that it does not know, drafts of another length, and a tree instead of a chain."""
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    heads = {
        "eagle": save_head(tmp_path / "eagle", target, layer=default_layer(target.config)),
        "eagle3": test_eagle3_layouts.save_head(tmp_path / "eagle3", target, **FORMS["sglang"]),
        "dflash": test_block_layouts.save_head(tmp_path / "dflash", "dflash", target, taps=[2, 4]),
        "dspark": test_block_layouts.save_head(tmp_path / "dspark", "dspark", target, layout="anchor-first"),
    }
    job = {"target": target.name, "revision": None, "dtype": "bfloat16", "max_context": 64}
    job |= {"eos": [1], "top_k": 0, "top_p": 1.0, "gamma": 4}
    jobs = [job | {"method": "plain", "drafter": None}, job | {"method": "draft_model", "drafter": target.name}]
    for method, head in heads.items():
        export(head, "sglang", tmp_path / f"sglang-{method}")
        jobs.append(job | {"method": method, "drafter": str(tmp_path / f"sglang-{method}")})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    plain, *drafted = lines_of("sglang_arguments.py", tmp_path / "jobs.json")
    assert plain["algorithm"] is None
    assert [found["algorithm"] for found in drafted] == ["STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK"]
    for found, asked in zip(drafted, jobs[1:], strict=True):
        assert found["draft_model_path"] == asked["drafter"]
        assert (found["num_draft_tokens"], found["eagle_topk"]) == (5, 1)
