"""speculators' own DFlash and DFlash2 classes on our exports: windows, what rows of a block see, the selector."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_block_layouts
import test_eagle3_layouts
import torch
from block_reference import block_states
from safetensors.torch import load_file, save_file
from test_block_windows import ANCHORED

from drafters import load_drafter
from drafters.layouts.export import export

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-speculators/bin/python"
TOKENS = 40
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "its default": ("dflash", ANCHORED),
    "some full layers": ("dflash", ANCHORED | {"full_layers": [1]}),
    "both ways": ("dflash", ANCHORED | {"causal": False}),
    "no windows": ("dflash", {}),
    "dflash2": ("dflash2", ANCHORED | {"causal": False}),
    "dflash2, three rows, no windows": ("dflash2", {"conv_kernel_size": 3}),
}
pytestmark = pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-speculators: make .venv-speculators/.installed")


@pytest.mark.parametrize("case", CASES)
def test_its_class_computes_what_our_head_does(case: str, tmp_path: Path) -> None:
    """Catches a window that is one token longer or shorter there, one that moves, another causality, convolutions with
    other channels or rows, and a selector that scores otherwise."""
    method, options = CASES[case]
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    head = test_block_layouts.save_head(tmp_path / "head", method, target, **options)
    export(head, "speculators", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")  # exports name no folders
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    drafter: Any = load_drafter(head, target)
    ids = torch.randint(5, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    taps = target.features(ids, taps=drafter.taps).taps
    states = torch.cat([taps[tap] for tap in drafter.taps], dim=-1)
    save_file({"states": states, "ids": ids, "loss_mask": torch.ones(1, TOKENS)}, tmp_path / "inputs.safetensors")
    files = [str(tmp_path / name) for name in ("out", "inputs.safetensors", "theirs.safetensors")]
    subprocess.run([str(PYTHON), str(ROOT / "tests/speculators_block.py"), *files], check=True, cwd=tmp_path)
    theirs, shape = load_file(files[-1]), drafter.module.shape
    anchors = theirs["places"].view(-1, shape.rows)[:, 0].tolist()
    assert max(anchors) > 2 * 8  # beyond the window
    for anchor, rows in zip(anchors, theirs["hidden"][0].split(shape.rows), strict=True):
        block = target.embed(torch.tensor([int(ids[0, anchor])] + [shape.mask_token_id] * (shape.rows - 1)))
        weights, context = drafter.module.state_dict(), states[0, :anchor]
        expected = block_states(weights, drafter.module.config, context, block, shape)
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
    if "scores" in theirs:
        hidden, tokens, candidates = (theirs[name][0] for name in ("hidden", "previous", "candidates"))
        logits = hidden @ target.model.get_output_embeddings().weight.T
        found = drafter.module.candidate_selector(logits.gather(-1, candidates), candidates, hidden, tokens)
        torch.testing.assert_close(found, theirs["scores"][0], atol=1e-4, rtol=1e-4)
