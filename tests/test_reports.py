"""Reports and certificates: with any content, their readers refuse them by name or read them."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import status
from rich.console import Console
from test_eval_compare import report
from test_hub import CONFIG, evidence
from torch import nn

import drafters.hub.__main__
from drafters.hub.checkpoint import save_checkpoint
from drafters.hub.model_card import Card, model_card
from drafters.hub.reports import Certificate, Part, Report, read
from eval import compare, leaderboard, seeds
from eval.figures import paired
from eval.report.compare import compare_and_write
from eval.report.leaderboard import collect, page
from eval.report.pairs import read as read_pair

ROOT = Path(__file__).parents[1]
NO_REPORTS = {
    "empty": b"", "text": b"not json", "list": b"[1]", "null": b"null", "number": b"5", "cut off": b'{"rows": [',
    "no utf-8": b'{"\xff": 1}', "nan": b'{"rows": NaN}', "infinity": b'{"rows": -Infinity}', "no keys": b"{}",
    "deep": b"[" * 200_000, "digits": b'{"a": ' + b"1" * 5000 + b"}",
}  # fmt: skip
WRONG: list[Any] = [None, "x", -1, 0.5, True, [], {"x": 1}, float("nan")]
GONE = object()
SCHEMAS: dict[str, type[Part]] = {"report.json": Report, "lossless.json": Certificate}


@pytest.mark.parametrize(("name", "schema"), [*SCHEMAS.items()])
def test_committed_results_are_read(name: str, schema: type[Part]) -> None:
    """Catches a schema that refuses the reports of an earlier version, or changes what it read."""
    found = [*(ROOT / "docs" / "results").rglob(name)]
    assert found
    for file in found:
        assert read(file, schema) == json.loads(file.read_text()) == read(file.parent, schema)


def test_large_counts_are_read(tmp_path: Path) -> None:
    """Catches a report that every program refuses because its drafter was trained on more than 1e8 tokens."""
    written(tmp_path)
    changes: dict[str, list[tuple[Any, ...]]] = {
        "report.json": [("rows", 0, "trained", 0, "tokens"), ("environment", "prompt_set", "prompts")],
        "lossless.json": [("greedy", 0, "tokens"), ("sampled", "tokens")],
    }
    for name, places in changes.items():
        for place in places:
            content = with_value(json.loads((tmp_path / name).read_text()), place, 3 * 10**9)
            (tmp_path / name).write_text(json.dumps(content))
        read_all(tmp_path, name)


def written(folder: Path) -> Path:
    """A folder with a report, its journal and a certificate."""
    found, lines = report(0, prompts=4)
    facts = found["environment"]
    facts["config"]["drafters"][0] |= {"checkpoint": "runs/x", "label": "eagle"}
    for row in found["rows"]:
        row |= {"entry": row["drafter"], "trained": [{"minutes": 1.0, "tokens": 5, "joules": None, "data": "a/b"}]}
        row |= {"stock": False, "engine": None, "drafted_per_step": 1.0, "grid": None, "speedup_ci": [0.5, 1.5]}
    (folder / "report.json").write_text(json.dumps(found))
    (folder / "measurements.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "lossless.json").write_text(json.dumps(evidence(fingerprint="t")["certificate"]))
    return folder


def read_all(folder: Path, name: str) -> None:
    """What reads the file ``name``, in this process."""
    page(collect(folder, folder))
    config = CONFIG | {"target": CONFIG["target"] | {"fingerprint": "t"}}  # type: ignore[operator]
    if name == "lossless.json":
        model_card(config, "user/d", 1, Card(certificate=folder))
    if name == "report.json":
        model_card(config, "user/d", 1, Card(report=folder))
        with pytest.raises(ValueError, match=r"grid: \{checkpoint"):
            seeds.compare(read(folder), [])
        compare_and_write(read_pair(folder), read_pair(folder), [str(folder)] * 2, folder, [], Console(quiet=True))


def altered(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of some JSON, in its place, replaced by each wrong one, or gone; of lists, the first element."""
    for value in (GONE, *WRONG) if place else WRONG:
        yield place, value
    inner = (
        content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    )
    for key, value in inner:
        yield from altered(value, (*place, key))


def with_value(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of ``content`` that has ``value`` in ``place``."""
    if not place:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return content


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


@pytest.mark.parametrize("name", [*SCHEMAS])
def test_any_content_is_read_or_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, or an error without the file's name, for a value of the wrong kind or a missing key."""
    monkeypatch.setattr(paired, "SAMPLES", 20)
    monkeypatch.setattr(paired, "BLOCK", 20)
    file = written(tmp_path) / name
    read_all(tmp_path, name)
    content, refused = json.loads(file.read_text()), 0
    for place, value in altered(content):
        file.write_text(json.dumps(with_value(content, place, value)))
        try:
            read(file, SCHEMAS[name])
        except ValueError as error:
            assert str(file) in str(error) and "\n" not in str(error) and len(str(error)) < 1000
            refused += 1
            continue
        try:
            read_all(tmp_path, name)
        except ValueError as error:  # a figure of another method, say
            assert "\n" not in str(error)
        except Exception as error:
            pytest.fail(f"{'.'.join(map(str, place))} as {value!r}: {type(error).__name__}: {error}")
    assert refused > 50
