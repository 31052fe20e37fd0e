"""Reports and certificates: with any content, their readers refuse them by name or read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import status
from test_eval_compare import report, tabled
from test_hub import CONFIG, evidence
from torch import nn

import drafters.hub.__main__
from drafters.hub.checkpoint import save_checkpoint
from drafters.hub.reports import Certificate, Part, Report, read
from eval import compare, leaderboard, seeds
from eval.report.by_prompt import as_csv

ROOT = Path(__file__).parents[1]
NO_REPORTS = {
    "text": b"not json", "list": b"[1]", "cut off": b'{"rows": [', "nan": b'{"rows": NaN}', "no keys": b"{}",
    "deep": b"[" * 200_000,
}  # fmt: skip
SCHEMAS: dict[str, type[Part]] = {"report.json": Report, "lossless.json": Certificate}


@pytest.mark.parametrize(("name", "schema"), [*SCHEMAS.items()])
def test_committed_results_are_read(name: str, schema: type[Part]) -> None:
    """Catches a schema that refuses the reports of an earlier version, or changes what it read."""
    found = [*(ROOT / "docs" / "results").rglob(name)]
    assert found
    for file in found:
        assert read(file, schema) == json.loads(file.read_text()) == read(file.parent, schema)


def written(folder: Path) -> Path:
    """A folder with a report, its table of prompts and a certificate."""
    found, lines = report(0, prompts=4)
    facts = found["environment"]
    facts["config"]["drafters"][0] |= {"checkpoint": "runs/x", "label": "eagle"}
    for row in found["rows"]:
        row |= {"entry": row["drafter"], "trained": [{"minutes": 1.0, "tokens": 5, "joules": None, "data": "a/b"}]}
        row |= {"stock": False, "engine": None, "drafted_per_step": 1.0, "grid": None, "speedup_ci": [0.5, 1.5]}
    (folder / "report.json").write_text(json.dumps(found))
    (folder / "prompts.csv").write_text(as_csv(tabled((found, lines))[1]))
    (folder / "lossless.json").write_text(json.dumps(evidence(fingerprint="t")["certificate"]))
    return folder


@pytest.mark.parametrize("content", [*NO_REPORTS.values()], ids=[*NO_REPORTS])
def test_what_is_no_report_is_named_by_every_program(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback of a program for a file that is cut off, another program's, or no JSON at all."""
    saved = tmp_path / "drafter"
    save_checkpoint(saved, nn.Linear(16, 8, bias=False), CONFIG)
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        written(folder)
    programs: list[tuple[str, Callable[..., int | None], list[Any]]] = [
        ("report.json", compare.main, [good, bad]),
        ("report.json", compare.main, [bad, good]),
        ("report.json", seeds.main, [bad]),
        ("report.json", drafters.hub.__main__.main, ["push", saved, "user/d", "--dry-run", "--report", bad]),
        ("lossless.json", drafters.hub.__main__.main, ["push", saved, "user/d", "--dry-run", "--certificate", bad]),
        *((name, leaderboard.main, ["--results", bad, "--out", tmp_path / "out"]) for name in SCHEMAS),
    ]
    for name, main, arguments in programs:
        before = (bad / name).read_bytes()
        (bad / name).write_bytes(content)
        assert status(main, *arguments) == 1
        message = capsys.readouterr().err
        assert message.startswith(f"error: {bad / name} is not what ") and message.count("\n") == 1
        assert len(message) < 1000
        (bad / name).write_bytes(before)
