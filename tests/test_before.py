"""What users have keeps working: names, commands, keys and files of commit 83d0a72, before files and modules moved.

The programs of that commit made tests/before/: a target (Llama, 8k parameters), a trained head of each kind, two
feature stores, a run that can be resumed, a report, a certificate, a datastore and a phrase pool. `recorded.json` holds what
these gave, `commands.json` the options and YAML keys of each program. The tests know the names in `drafters`, command
lines and files, and no module behind them. A deliberate new default is edited in `commands.json`.
"""

import contextlib
import inspect
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import nursery
import pydantic
import pytest
import tiny_run

import drafters
from drafters import TargetModel, drafter_class, generate, make_drafter

BEFORE = Path(__file__).parent / "before"
RECORDED = json.loads((BEFORE / "recorded.json").read_text())
COMMANDS = json.loads((BEFORE / "commands.json").read_text())
PROBE = "probe_of_keys"  # a key that no schema has
# How to give PROBE to a program that does not only take it from the file of --config.
GIVEN = {
    "eval.roofline": ["--shape", "llama-5m", f"{PROBE}=1"],
    "eval.speed --suite": ["--config", str(tiny_run.ROOT / "configs/quickstart/speed.yaml"), "--suite", "probe.yaml"],
    "train.throughput": ["--method", "eagle", "--config", "probe.yaml"],
}
REQUIRED = "(required)"


class Taken(BaseException):
    """A program is about to read its config with this schema."""


def be(program: str, *arguments: str) -> int:
    """Do in this process what ``python -m program`` or ``python program.py`` does."""
    start = [str(tiny_run.ROOT / program)] if program.endswith(".py") else ["-m", program]
    return tiny_run.be_python(json.dumps([sys.executable, *start, *arguments]))


def work(given: str) -> int:
    """Call a function of this file, in a folder and a process of its own."""
    name, folder, *arguments = json.loads(given)
    os.chdir(folder)
    return int(globals()[name](*arguments))


def run(folder: Path, *arguments: str, name: str = "be") -> None:
    """Run a program, or another function of this file, in ``folder``."""
    given = json.dumps([name, str(folder), *arguments])
    status = nursery.run("test_before.work", given, tiny_run.environment(), folder / "log", 120)
    assert status == 0, (folder / "log").read_text()[-3000:]


def schema_of(program: str) -> type[pydantic.BaseModel] | None:
    """Return the schema with which a program reads its config: the first one that is given PROBE."""
    try:
        be(program.partition(" ")[0], *GIVEN.get(program, ["--config", "probe.yaml"]))
    except Taken as found:
        return found.args[0]  # type: ignore[no-any-return]
    return None


def keys(schema: dict[str, Any], whole: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of a JSON schema, and (key=value, True) of every word that a key takes."""
    if "$ref" in schema:
        schema = reduce(lambda part, name: part[name], schema["$ref"].split("/")[1:], whole)
    for name, part in schema.get("properties", {}).items():
        default = REQUIRED if name in schema.get("required", []) else part.get("default")
        yield path + name, default if not isinstance(default, dict) else {}  # its own keys follow
        yield from keys(part, whole, f"{path}{name}.")
    inner = [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for part in [*schema.get("anyOf", []), *schema.get("oneOf", []), *inner]:
        yield from keys(part, whole, path)
    for word in [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]:
        yield f"{path[:-1]}={word}", True


def describe() -> int:
    """Write ``commands.json`` as it is now into this folder. Leaves pydantic spoiled for the rest of the process."""
    built, found = pydantic.BaseModel.__init__, {}

    def initialised(self: pydantic.BaseModel, **data: Any) -> None:
        if PROBE in data:
            raise Taken(type(self))
        built(self, **data)

    initialised.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    pydantic.BaseModel.__init__ = initialised  # type: ignore[method-assign]
    Path("probe.yaml").write_text(f"{PROBE}: 1\n")
    for name in COMMANDS:
        kind, _, method = name.partition(" ")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            be(kind, "--help") if kind != "drafter:" else None
        usage = said.getvalue().partition("\n\n")[0]
        schema = drafter_class(method).options if kind == "drafter:" else None
        if name in GIVEN or "--config" in usage:
            schema = schema_of(name)
        whole = schema.model_json_schema() if schema else {}
        found[name] = {"options": sorted({*re.findall(r"--[a-z][\w-]*", usage)}), "keys": dict(keys(whole, whole))}
    Path("commands.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``commands.json`` would hold now."""
    folder = tmp_path_factory.mktemp("commands")
    run(folder, name="describe")
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
    """Catches a program, an option, a YAML key or a word for it that is gone, a new default, and a new required key."""
    before, now = COMMANDS[name], commands[name]
    assert {*before["options"]} <= {*now["options"]}
    assert {key: now["keys"].get(key, "(gone)") for key in before["keys"]} == before["keys"]
    new = now["keys"].keys() - before["keys"].keys()
    inside = {key for key in new if key.rpartition(".")[0] in new}  # of a group that is new itself
    assert not [key for key in new - inside if now["keys"][key] == REQUIRED]


@pytest.mark.parametrize("made", RECORDED["decoding"], ids=lambda made: "-".join([made["drafter"], *made["options"]]))
def test_what_was_trained_still_drafts(folder: Path, made: dict[str, Any]) -> None:
    """Catches a checkpoint, adapter, draft model, datastore or pool that is refused, or loaded into the wrong places:
    then the target rejects nearly every draft."""
    target = TargetModel.from_pretrained("target", dtype="float32", device="cpu")
    taus = []
    for prompt, tokens in zip(RECORDED["prompts"], RECORDED["tokens"], strict=True):
        drafter = make_drafter(made["drafter"], target, **made["options"])
        result = generate(target, drafter, [prompt], max_new_tokens=len(tokens), eos_token_id=[])
        assert result.tokens[0].tolist() == tokens
        taus.append(result.trace.tau)
    assert sum(taus) == pytest.approx(sum(made["tau"]), rel=0.02)


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


def figures(page: Path) -> list[list[str]]:
    """The numbers in a report's rows of drafters."""
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| eagle ", "| autoregressive "))]
    return [re.findall(r"\d+(?:\.\d+)?", row) for row in rows]


def holds(now: Any, before: Any) -> bool:
    """Whether all keys and values of ``before`` are in ``now``, too; texts may be worded anew."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], before[key]) for key in before)
    if isinstance(before, list):
        return isinstance(now, list) and len(now) == len(before) and all(map(holds, now, before))
    return type(now) is str if isinstance(before, str) else bool(now == before)


def test_a_report_is_read_again(folder: Path) -> None:
    """Catches a report or its journal that is refused, and figures that become others."""
    run(folder, "eval.pages", "speed", "--out", "again")
    now, before = (json.loads(Path(name, "report.json").read_text()) for name in ("again", "speed"))
    assert holds(now, before)
    assert figures(Path("again/report.md")) == figures(Path("speed/report.md")) != []
    run(folder, "eval.compare", "speed", "again", "--out", "compared")
    rows = json.loads(Path("compared/compare.json").read_text())["rows"]
    assert rows and all(row["ratio"] == 1.0 for row in rows)


def test_a_card_quotes_report_and_certificate(folder: Path) -> None:
    """Catches a checkpoint, report.json or lossless.json of before that publishing refuses."""
    evidence = ["--report", "speed", "--certificate", "lossless"]
    run(folder, "drafters.hub", "push", "eagle", "user/drafter", *evidence, "--card", "card.md")
    rows, card = json.loads(Path("speed/report.json").read_text())["rows"], Path("card.md").read_text()
    assert all(f"{row['tau']:.2f}" in card for row in rows if row["drafter"] == "eagle")
    assert json.loads(Path("lossless/lossless.json").read_text())["verdict"] in card
