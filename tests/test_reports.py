"""Reports and certificates: with any content, their readers refuse them by name or read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from changed import check_refusals
from rich.console import Console

from drafters.hub.model_card import eval_results, losslessness, measured
from drafters.hub.reports import Certificate, Part, Report, read
from eval.figures import paired
from eval.report import pairs
from eval.report.by_prompt import as_csv
from eval.report.changes import compare as compared
from eval.report.changes import page
from eval.report.trainings import write_trainings

ROOT = Path(__file__).parents[1]
SCHEMAS: dict[str, type[Part]] = {"report.json": Report, "lossless.json": Certificate}


@pytest.mark.parametrize(("name", "schema"), [*SCHEMAS.items()])
def test_committed_results_are_read(name: str, schema: type[Part]) -> None:
    """Catches a schema that refuses the reports of an earlier version, or changes what it read."""
    found = [*(ROOT / "docs" / "results").rglob(name)]
    assert found
    for file in found:
        assert read(file, schema) == json.loads(file.read_text()) == read(file.parent, schema)


ROW = (
    "drafter", "temperature", "batch", "entry", "lossless", "stock", "tau", "speedup", "speedup_ci", "n_alpha",
    "tokens_per_second", "trained",
)  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A report of two methods, with its table of prompts, and its content."""
    found = json.loads((ROOT / "docs/results/2-core-cpu/speed-bf16/report.json").read_text())
    names = {row["drafter"]: row for row in found["rows"] if row["drafter"] == "autoregressive" or row.get("trained")}
    labels = [*names][:2]
    found["rows"] = [{key: names[label][key] for key in ROW if key in names[label]} for label in labels]
    facts = found["environment"]
    drafters = [one for one in facts["config"]["drafters"] if (one["label"] or one["drafter"]) in labels]
    facts["config"] = {"drafters": drafters}
    for name in ("energy", "divergence_tolerance", "peak_memory_bytes", "parts", "versions"):
        facts.pop(name)
    lines = [
        {"drafter": label, "temperature": 1.0, "batch": 1, "prompt": f"p{index}", "prompt_tokens": 9}
        | dict.fromkeys(pairs.COLUMNS, 2.0 + index)
        for label in labels
        for index in range(3)
    ]
    (tmp_path / pairs.PROMPTS).write_text(as_csv(lines))
    (tmp_path / "report.json").write_text(json.dumps(found))
    return tmp_path / "report.json", found


def head_of(found: dict[str, Any]) -> dict[str, Any]:
    """config.json of the trained head that a report or certificate is of."""
    facts = found["environment"]
    kinds = [entry["drafter"] for entry in facts["config"].get("drafters", [found.get("drafter")]) if entry]
    return {"drafter_type": kinds[-1], "target": facts["target"]}


def test_a_changed_report_is_refused_by_file_and_key(
    small: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stack trace for a part of a report that is missing or of another type, and a message without its key:
    in a model card, in a comparison of two reports and in a table of trainings."""
    file, found = small
    monkeypatch.setattr(paired, "SAMPLES", 10)
    monkeypatch.setattr(paired, "BLOCK", 10)
    quiet, config = Console(quiet=True), head_of(found)
    right = pairs.read(file)

    def compare() -> None:
        page(compared(right, pairs.read(file), ["a", "b"]), [])

    def card() -> None:
        report = read(file)
        measured(config, report)
        eval_results(config, report)

    labels = ("label", "entry", "tau", "trained")
    assert check_refusals(found, file, card, labels) > 100
    assert check_refusals(found, file, compare, labels) > 100
    assert check_refusals(found, file, lambda: write_trainings(file, [], file.parent / "out", [], quiet), labels) > 100


def test_a_changed_certificate_is_refused_by_file_and_key(tmp_path: Path) -> None:
    """Catches a stack trace of a model card for a part of a certificate that is missing or of another type."""
    source = next((ROOT / "docs/results").rglob("stdlib-eagle/lossless.json"))
    found = json.loads(source.read_text())
    found["environment"] = {
        name: found["environment"][name] for name in ("target", "dtype", "date", "argv", "commit", "dirty")
    }
    config = {"drafter_type": found["drafter"]["drafter"], "target": found["environment"]["target"]}
    file = tmp_path / "lossless.json"
    assert check_refusals(found, file, lambda: losslessness(config, read(file, Certificate))) > 100
