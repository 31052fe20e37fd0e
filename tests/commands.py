"""Programs as a user starts them, each in a process of its own, and the options and YAML keys that they take."""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import nursery
import pydantic
import tiny_run
import yaml

from drafters import drafter_class

REQUIRED = "(required)"  # the recorded default of a key that has none
PROBE = "probe_of_keys"  # a key that no schema has
# How to give PROBE to a program that does not only take it from the file of --config.
GIVEN = {
    "eval.roofline": ["--shape", "llama-5m", f"{PROBE}=1"],
    "eval.speed --suite": ["--config", str(tiny_run.ROOT / "configs/quickstart/speed.yaml"), "--suite", "probe.yaml"],
    "train.throughput": ["--method", "eagle", "--config", "probe.yaml"],
}


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
    status = nursery.run("commands.work", given, tiny_run.environment(), folder / "log", 120)
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
        apart = name == "head" and "batch_tokens" in schema["properties"]  # keys of a head may stand beside it
        required = name in schema.get("required", []) and not apart
        default = REQUIRED if required else part.get("default")
        yield path + name, default if not isinstance(default, dict) else {}  # its own keys follow
        yield from keys(part, whole, f"{path}{name}.")
    inner = [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for part in [*schema.get("anyOf", []), *schema.get("oneOf", []), *inner]:
        yield from keys(part, whole, path)
    for word in [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]:
        yield f"{path[:-1]}={word}", True


def described(name: str) -> dict[str, Any]:
    """Options and keys of one program or ``drafter: <method>``, and which files in configs/ it takes."""
    program, _, method = name.partition(" ")
    schema: type[pydantic.BaseModel] | None = None
    usage = ""
    if program == "drafter:":
        schema = drafter_class(method).options
    else:
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            be(program, "--help")
        usage = said.getvalue().partition("\n\n")[0]
        if name in GIVEN or "--config" in usage:
            schema = schema_of(name)
    whole = schema.model_json_schema() if schema else {}
    taken = [] if schema is None else [file for file, content in shipped().items() if takes(schema, content)]
    options = sorted({*re.findall(r"--[a-z][\w-]*", usage)})
    more = keys_of_head(schema, method if program == "drafter:" else "")
    return {"options": options, "keys": dict(keys(whole, whole)) | more, "configs": taken}


def keys_of_head(schema: Any, method: str) -> dict[str, Any]:
    """Keys of a head's shape that a checkpoint has beside the options, and a training config may have beside others."""
    if method:
        kind: Any = getattr(drafter_class(method), "shape", None)
        usual: dict[str, Any] = {}
    else:
        field = getattr(schema, "model_fields", {}).get("head")
        kind = field and field.annotation
        usual = kind.usual if kind else {}
    whole = kind.model_json_schema() if kind else {}
    return dict(keys(whole, whole)) | usual


@cache
def shipped() -> dict[str, Any]:
    """The content of every file in configs/."""
    files = sorted((tiny_run.ROOT / "configs").rglob("*.yaml"))
    return {str(file.relative_to(tiny_run.ROOT)): yaml.safe_load(file.read_text()) for file in files}


def takes(schema: type[pydantic.BaseModel], content: dict[str, Any]) -> bool:
    """Whether ``content`` is a config of this schema."""
    with contextlib.suppress(pydantic.ValidationError):
        return bool(schema(**content))
    return False


def describe(*names: str) -> int:
    """Write commands.json into this folder: options and YAML keys of these programs, and of ``drafter: <method>``.

    Until the process ends, pydantic stops at PROBE.
    """
    built, found = pydantic.BaseModel.__init__, {}

    def initialised(self: pydantic.BaseModel, **data: Any) -> None:
        if PROBE in data:
            raise Taken(type(self))
        built(self, **data)

    initialised.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    pydantic.BaseModel.__init__ = initialised  # type: ignore[method-assign]
    Path("probe.yaml").write_text(f"{PROBE}: 1\n")
    for name in names:
        try:
            found[name] = described(name)
        except (Exception, SystemExit) as error:
            found[name] = {"options": [repr(error)], "keys": {}, "configs": []}
    Path("commands.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0
