"""Each program understands the commands that the documentation shows for it. No command runs further than that."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from drafters import config as configs
from drafters.cli.program import CommandLine
from train.configs import schema_of
from train.preflight import command as command_line

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LAUNCHER = re.compile(r"^(?:deepspeed|torchrun|srun)\b.*?(?=train/|-m |--module |python )")
OTHERS = "make vllm sbatch pip git hf source pytest tensorboard mkdocs cd cp cat tar".split()  # not our programs  # noqa: SIM905
OURS = {"drafters", "data_prep", "train", "eval"}


class Taken(Exception):
    """A program has understood its command line."""


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every shell example."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(), re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if line := line.strip().removeprefix("$ ").removesuffix("&").strip():
                    found.append((page.name, line))
    return found


def ours(line: str) -> tuple[str, list[str]] | None:
    """The module that a command runs, and its arguments."""
    words = [word for word in shlex.split(LAUNCHER.sub("", line), comments=True) if word != "[--verify]"]
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[:1] == ["python"]:
        words.pop(0)
    elif not words or words[0] in OTHERS:
        return None
    if words[0] in ("-m", "--module"):
        words.pop(0)
    module = words[0].removesuffix(".py").replace("/", ".")
    return (module, words[1:]) if module.split(".")[0] in OURS else None


def config_of(module: str) -> str:
    """A shipped config for a program, where a page says F."""
    room = {"data_prep.features": "features", "data_prep.regenerate": "regenerate"}
    return f"configs/{room[module]}/stdlib.yaml"


@pytest.mark.parametrize(("page", "line"), commands())
def test_the_command_is_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command whose program, option, config or key was renamed."""
    monkeypatch.chdir(ROOT)
    found = ours(line)
    if found is None:
        words = line.split()
        assert words[0] in OTHERS, line
        if words[0] == "make":
            words = shlex.split(line, comments=True)
            file, goals = (words[2], words[3:]) if words[1] == "-f" else ("Makefile", words[1:])
            goal = next((word for word in goals if "=" not in word), "all")
            assert re.search(rf"^\.PHONY:.*\b{goal}\b", (ROOT / file).read_text(), re.M), line
        return
    module, arguments = found
    arguments = [word for word in arguments if not word.endswith("=...")]
    arguments = [
        config_of(module) if word == "F" and before == "--config" else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    parse, validate = CommandLine.parse, configs.validate

    def parsed(self: CommandLine, given: list[str] | None) -> Any:
        result = parse(self, given)
        if getattr(result, "config", None) is None and not getattr(result, "overrides", None):
            raise Taken
        return result

    def validated(*given: Any, **more: Any) -> Any:
        found = validate(*given, **more)
        if configs.validate is validated:
            raise Taken
        return found  # to a module that was first imported here, and keeps this function

    monkeypatch.setattr(CommandLine, "parse", parsed)
    monkeypatch.setattr(configs, "validate", validated)
    with pytest.raises(Taken):
        program = importlib.import_module(f"{module}.__main__" if module == "drafters.hub" else module)
        if hasattr(program, "main"):
            program.main(arguments)
        else:  # train/<method>.py: all share one command line
            command_line.main(schema_of(module.removeprefix("train.")), None, arguments)
