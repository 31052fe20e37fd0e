"""What users have keeps working: names, commands, keys and files of commit 83d0a72, before files and modules moved.

The programs of that commit made tests/before/: a target (Llama, 8k parameters), a trained head of each kind, two
feature stores, a run that can be resumed, a report, a certificate, a datastore and a phrase pool. `recorded.json` holds
what these gave, `commands.json` the options and YAML keys of each program. The tests use names of `drafters`, command
lines and files, and no module behind them. A deliberate new default is edited in `commands.json`.
"""

import inspect
import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from commands import REQUIRED, run

import drafters
from drafters import TargetModel, generate, load_drafter, make_drafter

ROOT = Path(__file__).parents[1]
BEFORE = ROOT / "tests" / "before"
RECORDED = json.loads((BEFORE / "recorded.json").read_text())
COMMANDS = json.loads((BEFORE / "commands.json").read_text())
GONE = {"drafter: llmcad": {"overlap"}}  # keys that are refused on purpose


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``commands.json`` would hold now."""
    folder = tmp_path_factory.mktemp("commands")
    run(folder, *COMMANDS, name="describe")
    return dict(json.loads((folder / "commands.json").read_text()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was made before, in which this process and its programs work."""
    monkeypatch.chdir(shutil.copytree(BEFORE, tmp_path / "before"))
    return tmp_path / "before"


def signature(name: str) -> dict[str, str]:
    """(parameter, default) of what ``drafters`` calls ``name``."""
    parts = inspect.signature(reduce(getattr, name.split("."), drafters)).parameters.values()  # type: ignore[arg-type]
    return {part.name: REQUIRED if part.default is part.empty else str(part.default) for part in parts}


@pytest.mark.parametrize("name", RECORDED["names"])
def test_public_names_take_what_they_took(name: str) -> None:
    """Catches a name or a parameter that was renamed, another order or default, and a new parameter without one."""
    before, now = RECORDED["names"][name], signature(name)
    assert {part: now[part] for part in now if part in before} == before
    assert [part for part in now if part in before] == [*before]
    assert REQUIRED not in [default for part, default in now.items() if part not in before]
    assert name.partition(".")[0] in drafters.__all__


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_take_what_they_took(name: str, commands: dict[str, Any]) -> None:
    """Catches a program, an option, a YAML key or a word for it that is gone, a new default, a new required key, and a
    file in configs/ that its program refuses."""
    before, now = COMMANDS[name], commands[name]
    assert {*before["options"]} <= {*now["options"]}
    assert {file for file in before["configs"] if (ROOT / file).is_file()} <= {*now["configs"]}
    kept = {key: default for key, default in before["keys"].items() if key not in GONE.get(name, ())}
    assert {key: now["keys"].get(key, "(gone)") for key in kept} == kept
    new = now["keys"].keys() - before["keys"].keys()
    inside = {key for key in new if key.rpartition(".")[0] in new}  # of a group that is new itself
    assert not [key for key in new - inside if now["keys"][key] == REQUIRED]


@pytest.mark.parametrize("made", RECORDED["decoding"], ids=lambda made: made["drafter"])
def test_what_was_trained_still_drafts(folder: Path, made: dict[str, Any]) -> None:
    """Catches a checkpoint, adapter, draft model, datastore or pool that is refused, or loaded into the wrong places:
    then the target rejects nearly every draft."""
    target = TargetModel.from_pretrained("target", dtype="float32", device="cpu")
    method, options, taus = made["drafter"], made["options"], []
    for prompt, tokens in zip(RECORDED["prompts"], RECORDED["tokens"], strict=True):
        drafter = make_drafter(method, target, **options)
        result = generate(target, drafter, [prompt], max_new_tokens=len(tokens), eos_token_id=[])
        assert result.tokens[0].tolist() == tokens
        taus.append(result.trace.tau)
    assert sum(taus) == pytest.approx(sum(made["tau"]), rel=0.1)  # rounding may cost a token
    if checkpoint := options.get("checkpoint"):
        assert type(load_drafter(checkpoint, target)) is type(drafter)


def losses(run: Path, first: int) -> list[float]:
    """Those logged from step ``first`` on."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row and row["step"] >= first]


def test_a_run_is_resumed(folder: Path) -> None:
    """Catches a state that is not read, or whose weights, moments or data position are not those it was left with."""
    run(folder, "train/eagle.py", "--config", "run.yaml", "out=eagle", "steps=302", "log_every=1", "--resume")
    assert losses(Path("eagle"), 301) == pytest.approx(RECORDED["resumed_losses"], rel=1e-3)


def test_a_store_in_int8_is_trained_on(folder: Path) -> None:
    """Catches states without their scales or of another layer or token, and a head that training cannot start from."""
    changes = ["exit_layer=1", "features=features-int8", "init_from=kangaroo", "steps=2", "log_every=1"]
    run(folder, "train/kangaroo.py", "--config", "run.yaml", "out=more", *changes)
    assert losses(Path("more"), 1) == pytest.approx(RECORDED["int8_losses"], rel=1e-3)


def test_stores_are_whole(folder: Path) -> None:
    """Catches a manifest or a shard that is no longer read, and checksums of something else."""
    for store in ("features", "features-int8"):
        run(folder, "data_prep.inspect", store, "--verify")


def keys(value: Any, place: str = "") -> set[str]:
    """The dotted keys of a report; elements of a list share theirs."""
    if isinstance(value, list):
        return {key for each in value for key in keys(each, place)}
    if not isinstance(value, dict):
        return {place}
    return {key for name, each in value.items() for key in keys(each, f"{place}.{name}")} | {place}


def test_a_report_is_read_again(folder: Path) -> None:
    """Catches a report that is refused, keys that a new one no longer has, and a tau that became another."""
    run(folder, "eval.speed", "--config", "speed.yaml", "out=again")
    now, before = (json.loads(Path(name, "report.json").read_text()) for name in ("again", "speed"))
    gone = {".rows.host_joules_per_token"}  # the CPU's counters are not read any more
    assert {key for key in keys(before) if not key.startswith(".environment.config.")} - gone <= keys(now)
    run(folder, "eval.compare", "speed", "again", "--out", "compared")
    rows = json.loads(Path("compared/compare.json").read_text())["rows"]
    greedy = [row["ratio"] for row in rows if row["figure"] == "tau" and row["temperature"] == 0]
    assert greedy == [pytest.approx(1.0, rel=0.1)]  # rounding may cost a token


def test_a_card_quotes_report_and_certificate(folder: Path) -> None:
    """Catches a checkpoint, report.json or lossless.json of before that publishing refuses."""
    evidence = ["--report", "speed", "--certificate", "lossless"]
    run(folder, "drafters.hub", "push", "eagle", "user/drafter", *evidence, "--card", "card.md")
    rows, card = json.loads(Path("speed/report.json").read_text())["rows"], Path("card.md").read_text()
    assert all(f"{row['tau']:.2f}" in card for row in rows if row["drafter"] == "eagle")
    assert json.loads(Path("lossless/lossless.json").read_text())["verdict"] in card
