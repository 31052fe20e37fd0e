"""A killed `python -m eval.speed` goes on where it stopped, and mixes nothing that does not belong together."""

import copy
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
import tiny_run
import yaml
from test_eval_prompts import sharegpt

import eval.speed
from drafters.methods.papers.ouroboros import OuroborosDrafter
from drafters.methods.speculative import SpeculativeDrafter
from eval.measure import identity
from eval.measure import run_journal as journal
from eval.measure.runs import Run
from eval.prompts.prompts import Prompt

METHODS = ["autoregressive", "draft model", "Ouroboros", "stock generate"]
PROMPTS = 3


run = partial(programs.run, eval.speed.main)


class Killed(BaseException):
    """Ends a run at once, as kill -9 does: no handler catches it."""


def run_of(method: str, prompt: int = 0) -> Run:
    """Of two tokens, in the first round."""
    return Run([1, 2], 0.1, 0.1, method=method, temperature=0.0, round=0, prompt=prompt, wall_seconds=0.2)


@pytest.fixture
def config(
    tiny_checkpoint: Callable[..., Path], speed_config: Callable[..., dict[str, Any]], no_picture: None
) -> dict[str, Any]:
    """Plain decoding, a draft model and Ouroboros, which remembers, at two temperatures."""
    # Prompts with much in common, so that a pool of phrases serves the next one.
    records = [sharegpt(f"w1 w2 w3 w{10 + i}", "w1") for i in range(PROMPTS + 1)]
    draft = {"draft_model": str(tiny_checkpoint("llama", 1)), "gamma": 2}
    drafters = [{"drafter": "speculative", "label": "draft model"}, {"drafter": "ouroboros", "label": "Ouroboros"}]
    return speed_config(records, {"count": PROMPTS}, drafters=[one | draft for one in drafters], max_new_tokens=12)


def killed_after(
    runs: int,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    by: type[BaseException] = Killed,
) -> BaseException:
    """Run until the journal has ``runs`` runs. Return the exception that ended it."""
    left = runs

    def count(self: journal.RunJournal, run: Run, *prompts: Any) -> None:
        nonlocal left
        if left == 0:
            raise by
        left -= 1
        written(self, run, *prompts)

    written = journal.RunJournal.write
    with monkeypatch.context() as patch:
        patch.setattr(journal.RunJournal, "write", count)
        with pytest.raises(by) as raised:
            run(config, *overrides)
    return raised.value


def report(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config["out"]) / "report.json").read_text())
    return found


def journalled(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in the finished journal."""
    lines = (Path(config["out"]) / "measurements.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "method" in line]


def decoded(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What does not depend on the clock, in order: who decoded what, with which steps."""
    return [
        (line["temperature"], line["round"], line["index"], line["method"], line["tokens"], line.get("accepted"))
        for line in lines
    ]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches runs lost, repeated or out of order, a pool that forgot the prompts before, and files left behind."""
    whole = copy.deepcopy(config) | {"out": str(tmp_path / "whole")}
    assert run(whole) == 0
    expected = decoded(journalled(whole))
    assert len(expected) == 2 * PROMPTS * len(METHODS)
    killed_after(len(METHODS) + 3, config, monkeypatch)  # prompt 1 is not whole
    killed_after(2, config, monkeypatch)  # nor is it now
    killed_after(3 * len(METHODS) + 1, config, monkeypatch)  # prompts 1 and 2, and the first of T = 1
    capsys.readouterr()
    assert run(config) == 0
    assert "resuming after 16 runs" in capsys.readouterr().out
    assert decoded(journalled(config)) == expected
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    parts = report(config)["environment"]["parts"]
    assert [part.get("runs") for part in parts] == [4, 12, None]
    assert "interrupted and resumed 2 time(s): 4 runs from 2" in (tmp_path / "out" / "report.md").read_text()
    timeless = ("drafter", "temperature", "tau", "exact_match", "prompts", "new_tokens", "perplexity", "steps")
    both = [[{name: row[name] for name in timeless} for row in report(one)["rows"]] for one in (whole, config)]
    assert both[0] == both[1]
    assert "interrupted" not in (tmp_path / "whole" / "report.md").read_text()


def test_processes_share_the_prompts_and_write_one_report(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a prompt that two processes measure or none, a report of one share alone, other tokens than a single
    process's, and a share lost when its process is killed."""
    config["prompts"]["count"] = None
    config["drafters"] = config["drafters"][:1]
    alone = copy.deepcopy(config) | {"out": str(tmp_path / "alone")}
    assert run(alone) == 0
    assert run(config, "--rank", "0", "--ranks", "2") == 0
    assert "the last process writes the report" in capsys.readouterr().out
    killed_after(len(METHODS) - 1, config, monkeypatch, "--rank", "1", "--ranks", "2")
    assert run(config, "--rank", "0", "--ranks", "2") == 0
    assert not (tmp_path / "out" / "report.json").exists()
    assert run(config, "--rank", "1", "--ranks", "2") == 0
    both = [decoded(journalled(one)) for one in (alone, config)]
    assert sorted(both[0]) == sorted(both[1]) and len(both[0]) == 2 * PROMPTS * (len(METHODS) - 1)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "alone").iterdir()
    }
    found, whole = report(config), report(alone)
    assert found["environment"]["processes"] == 2
    timeless = ("drafter", "temperature", "tau", "exact_match", "prompts", "new_tokens", "perplexity")
    assert [[row[key] for key in timeless] for row in found["rows"]] == [
        [row[key] for key in timeless] for row in whole["rows"]
    ]
    assert run(config, "--rank", "3", "--ranks", "4") == 1
    assert "4 processes would share 3 prompts, 1 at a time: start at most 3" in capsys.readouterr().err


def test_only_what_remembers_decodes_the_prompts_before_again(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches everything decoded twice, which would make going on worthless."""
    killed_after(2 * len(METHODS), config, monkeypatch, "temperatures=[0.0]")
    begun: list[str] = []
    for drafter in (OuroborosDrafter, SpeculativeDrafter):
        own: Any = drafter.begin

        def counted(self: Any, *arguments: Any, begin: Any = own) -> None:
            begun.append(self.name)
            begin(self, *arguments)

        monkeypatch.setattr(drafter, "begin", counted)
    assert run(config, "temperatures=[0.0]") == 0
    assert (begun.count("speculative"), begun.count("ouroboros")) == (1 + 1, 1 + 2 + 1)  # warm-up, before, the last


def opened(out: Path, identity: dict[str, Any]) -> journal.RunJournal:
    facts = {"date": "2026-01-01T00:00:00", "load_average": 0.5}
    return journal.RunJournal(out, identity, facts, lambda *_: ("a", "b"))


def write_prompts(out: Path, identity: dict[str, Any], *prompts: int) -> Path:
    with opened(out, identity) as opening:
        for index in prompts:
            for method in "ab":
                opening.write(run_of(method, index), Prompt(f"p{index}", None, [3]))
    return opening.path


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:-30]], [0, 1]),  # half a line: what it begins is measured again
        (lambda lines: lines[:-1], [0, 1]),  # a prompt without one of its methods
        (lambda lines: [*lines[:4], b"\0" * 50 + b"\n", *lines[5:]], [0]),  # a line that a power cut damaged
        (lambda lines: [lines[0][:50]], []),
        (lambda lines: lines, [0, 1, 2]),
    ],
)
def test_a_torn_journal_keeps_its_whole_prompts(
    tmp_path: Path, keep: Callable[[list[bytes]], list[bytes]], left: list[int]
) -> None:
    """Catches a journal that cannot be read after a power cut, half a line with the next run glued to it, and a prompt
    with some methods timed before the kill and others after it."""
    path = write_prompts(tmp_path, {"config": {"seed": 0}}, 0, 1, 2)
    path.write_bytes(b"".join(keep(path.read_bytes().splitlines(keepends=True))))
    with opened(tmp_path, {"config": {"seed": 0}}) as again:
        assert [(run.prompt, run.method) for run in again.runs] == [(index, m) for index in left for m in "ab"]
    write_prompts(tmp_path, {"config": {"seed": 0}}, 7)
    with opened(tmp_path, {"config": {"seed": 0}}) as again:
        assert [run.prompt for run in again.runs[::2]] == [*left, 7]


def test_runs_of_another_kind_are_never_mixed(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a report of two configs under one name, and hours thrown away unsaid."""
    quick = ("temperatures=[0.0]", "max_new_tokens=4")
    killed_after(2 * len(METHODS), config, monkeypatch, *quick)
    (before,) = (tmp_path / "out").glob("measurements.unfinished.*.jsonl")
    killed_after(len(METHODS), config, monkeypatch, *quick, "seed=1")
    capsys.readouterr()
    assert run(config, *quick, "seed=1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{before} holds 8 runs of another identity (different: seed)" in said
    assert len(journalled(config)) == PROMPTS * len(METHODS)
    assert [part.get("runs") for part in report(config)["environment"]["parts"]] == [len(METHODS), None]
    assert not list((tmp_path / "out").glob("measurements.unfinished.*"))


@pytest.mark.parametrize("other", ["host", "commit", "code", "files", "cpu_cores", "versions", "threads"])
def test_what_makes_runs_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Catches runs on another machine, of other code or of a head that was trained on since, taken for the same."""
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "model.safetensors").write_text("before")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    monkeypatch.setattr(identity.eval, "__file__", str(tmp_path / "package" / "__init__.py"))
    arguments: list[Any] = [[str(tmp_path / "head"), "org/name"], "cpu", 2]
    before = identity.conditions(*arguments)
    assert identity.conditions(*arguments) == before
    if other == "host":
        monkeypatch.setattr("platform.node", lambda: "another")
    elif other == "commit":
        monkeypatch.setattr("drafters.common.machine.code_state", lambda: ("0" * 40, False))
    elif other == "code":
        (tmp_path / "package" / "new.py").write_text("x = 1")
    elif other == "files":
        (tmp_path / "head" / "model.safetensors").write_text("after!")
        os.utime(tmp_path / "head" / "model.safetensors", ns=(1, 1))
    elif other == "threads":
        arguments[2] = 3
    else:
        name = {"cpu_cores": "cpu_cores", "versions": "library_versions"}[other]
        monkeypatch.setattr(f"drafters.common.machine.{name}", lambda *_: 99)
    after = identity.conditions(*arguments)
    assert identity.differing(before, after) == [other]
    assert identity.digest(before) != identity.digest(after)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    """Catches two processes that write one journal, and one that removes the other's as it finishes."""
    first = write_prompts(tmp_path, {"config": {"seed": 0}}, 0)
    with first.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being written by another process"):
            opened(tmp_path, {"config": {"seed": 0}}).__enter__()
        second = opened(tmp_path, {"config": {"seed": 1}})
        with second:
            second.runs.append(run_of("a"))
            second.finish()
        assert first.exists() and second.path.name == journal.JOURNAL


@pytest.mark.slow
def test_kill_9_loses_no_whole_prompt(config: dict[str, Any], tmp_path: Path) -> None:
    """Catches runs that are still buffered when the process dies: each is written to the journal at once."""
    quick = ("rounds=3", "temperatures=[0.0]")
    path = tmp_path / "speed.yaml"
    path.write_text(yaml.safe_dump(config))
    line = [sys.executable, "-m", "eval.speed", "--config", str(path), *quick]
    process = tiny_run.begin(line, tmp_path / "killed.log")
    deadline = time.monotonic() + 120

    def lines() -> int:
        found = list((tmp_path / "out").glob("measurements.unfinished.*.jsonl"))
        return found[0].read_bytes().count(b"\n") if found else 0

    while lines() < 2 + len(METHODS) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = lines() - 1
    assert run(config, *quick) == 0
    first, _ = report(config)["environment"]["parts"]
    assert first["runs"] == kept - kept % len(METHODS) >= len(METHODS)
    assert len({(line["method"], line["round"], line["index"]) for line in journalled(config)}) == 3 * 4 * PROMPTS
    assert len(journalled(config)) == 3 * 4 * PROMPTS
