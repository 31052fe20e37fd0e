"""speculators' own DFlash, DFlash2 and P-EAGLE classes on our exports: windows, what rows see, the selector."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_block_layouts
import test_eagle3_layouts
import test_peagle
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


def export_beside_target(head: str, folder: Path) -> None:
    """Export the head into ``folder/out``, for the target in ``folder/target``: exports name no folders."""
    export(head, "speculators", folder / "out")
    config = json.loads((folder / "out/config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
    (folder / "out/config.json").write_text(json.dumps(config))


def computed(script: str, given: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """What ``script`` computes with the export in ``folder/out``."""
    save_file(given, folder / "inputs.safetensors")
    files = [str(folder / name) for name in ("out", "inputs.safetensors", "theirs.safetensors")]
    subprocess.run([str(PYTHON), str(ROOT / "tests" / script), *files], check=True, cwd=folder)
    return load_file(files[-1])


@pytest.mark.parametrize("case", CASES)
def test_its_class_computes_what_our_head_does(case: str, tmp_path: Path) -> None:
    """Catches a window that is one token longer or shorter there, one that moves, another causality, convolutions with
    other channels or rows, and a selector that scores otherwise."""
    method, options = CASES[case]
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    head = test_block_layouts.save_head(tmp_path / "head", method, target, **options)
    export_beside_target(head, tmp_path)
    drafter: Any = load_drafter(head, target)
    ids = torch.randint(5, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    taps = target.features(ids, taps=drafter.taps).taps
    states = torch.cat([taps[tap] for tap in drafter.taps], dim=-1)
    given = {"states": states, "ids": ids, "loss_mask": torch.ones(1, TOKENS)}
    theirs, shape = computed("speculators_block.py", given, tmp_path), drafter.module.shape
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


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"layer": "qwen3", "fc_norm": True}])
def test_its_peagle_class_computes_our_slots(options: dict[str, Any], tmp_path: Path) -> None:
    """Catches a row of a depth at another position, a window with another edge, a mask token or a learned state that
    another row reads."""
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    head = test_peagle.save_head(tmp_path / "head", target, draft_vocab_size=60, **options)
    export_beside_target(head, tmp_path)
    drafter: Any = load_drafter(head, target, tree="chain")
    ids = torch.randint(5, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    taps = target.features(ids, taps=drafter.taps).taps
    states = torch.cat([taps[tap] for tap in drafter.taps], dim=-1)
    rows, depths = TOKENS - 1, drafter.module.shape.depths
    anchors, depth = torch.arange(rows).repeat(depths), torch.arange(depths).repeat_interleave(rows)
    kept = anchors + depth < rows
    given = {"states": states[:, :-1].contiguous(), "ids": ids[:, 1:].contiguous(), "anchors": anchors[kept]}
    given |= {"depths": depth[kept], "embedding": target.model.get_input_embeddings().weight.detach().clone()}
    hidden = computed("speculators_peagle.py", given, tmp_path)["hidden"]
    weights = drafter.module.state_dict()
    columns = torch.arange(60) + weights["d2t"]
    for anchor in (0, 3, 10, 30):
        theirs = hidden[given["anchors"] == anchor] @ weights["lm_head.weight"].T
        ours = test_peagle.slots(drafter, ids[0, : anchor + 2].tolist())[:, columns]
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
