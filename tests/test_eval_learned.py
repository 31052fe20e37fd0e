"""`python -m eval.learned`: the table of drafters that were trained from one store."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import status
from safetensors.torch import save_file
from test_eval_seeds import FACTS

from drafters.config import load_config
from eval import learned
from eval.configs import SpeedConfig

SEEN = {"lossless": True, "temperature": 0.0, "speedup_ci": [1.0, 1.5], "draft_ms": 1.25, "verify_ms": 9.0}
LEARNED = Path("configs/learned")


def report(folder: Path, labels: list[str]) -> dict[str, Any]:
    """As eval.speed writes it, of a head in ``folder`` that reads three states of 8 numbers beside the features."""
    config = {"drafter": {"taps": [1, 2, 3]}, "target": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc": torch.zeros(500, 1000), "norm": torch.zeros(8)}, folder / "model.safetensors")
    trained = [{"tokens": 2_500_000, "minutes": 30.0}]
    rows = [
        SEEN | {"drafter": label, "tau": 2 + place, "speedup": 1.2, "trained": trained, "n_alpha": [0.75, 0.5]}
        | {"categories": {"qa": {"tau": 3 + place}}}
        for place, label in enumerate(labels)
    ]  # fmt: skip
    entries = [{"label": label, "checkpoint": str(folder)} for label in labels]
    more = {"threads": 2, "load_average": 0.1, "load_average_after": 0.2, "config": {"drafters": entries}}
    return {"environment": FACTS | more, "baseline": {}, "rows": rows}


def test_forms_of_a_drafter_share_a_row(tmp_path: Path) -> None:
    """Catches a chain's figures in the tree's column, other bytes than those of the states that a head reads, and
    acceptance that is not the chain's."""
    (tmp_path / "report.json").write_text(json.dumps(report(tmp_path, ["EAGLE-3, wide; tree", "EAGLE-3, wide; chain"])))
    assert status(learned.main, tmp_path) == 0
    text = (tmp_path / "learned.md").read_text()
    line = "| EAGLE-3, wide | 0.5M | 0.1 | 30.0 | 2.50M | 0.75 0.50 | 3.00 | 2.00 | - | 1.2 | 9.0 |"
    assert line + " 1.20x [1.00, 1.50] | 1.20x [1.00, 1.50] | - |" in text
    assert "| EAGLE-3, wide | 4.00 / 3.00 |" in text
    (row,) = json.loads((tmp_path / "learned.json").read_text())["rows"]
    assert row["parameters"] == 500_008 and row["bytes_per_token"] == 2 * 8 * 4


def test_labels_without_a_form_are_refused(tmp_path: Path) -> None:
    """Catches an empty table of a report that was made for something else."""
    with pytest.raises(ValueError, match="no label is 'drafter; form'.*EAGLE"):
        learned.collect(report(tmp_path, ["EAGLE, chain"]))


def test_the_makefile_trains_what_is_measured() -> None:
    """Catches a row whose checkpoint no training of the Makefile writes."""
    made = (LEARNED / "Makefile").read_text()
    for file in ("speed.yaml", "seeds.yaml"):
        for entry in load_config(SpeedConfig, LEARNED / file).drafters:
            given = entry.model_extra or {}
            folders = (entry.grid or {}).get("checkpoint", [given.get("checkpoint", given.get("draft_model"))])
            for name in [Path(folder).name for folder in folders if folder]:
                name = name.rsplit("-", 1)[0] if file == "seeds.yaml" else name
                assert f"\nTRAIN_{name} := " in made, f"{file} measures {name}"
