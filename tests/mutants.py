"""Do the tests see mistakes? Each of mutants.yaml is made by itself in a copy of the tree, and some test must fail.

    make mutants                      # those whose code or tests changed since they were last run
    python tests/mutants.py kangaroo  # those with the word in their name, whether they changed or not

An entry of mutants.yaml: ``name``; ``file``, whose ``old`` text becomes ``new``; ``tests``, the narrowest that should
fail (pytest's arguments); ``bug``, what the mistake would do; and, where no test can fail, ``equivalent``: why not.
The outcomes stand in docs/results/mutants.json, written after every mutant, and in mutants.md beside it.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.yaml"
RESULTS = ROOT / "docs" / "results" / "mutants.json"
COPIED = ("drafters", "data_prep", "train", "eval", "tests")
FAMILIES = ("llama", "mistral", "mixtral", "qwen3")
SECONDS = 240  # for one mutant's tests
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"


@dataclass(frozen=True)
class Mutant:
    """One entry of the list; see the module."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    bug: str
    equivalent: str = ""

    def text(self) -> str:
        """The mutated file.

        Raises:
            ValueError: ``old`` does not stand in it exactly once.
        """
        text = (ROOT / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name!r}: its old text stands {found} times in {self.file}, not once: "
                f"where the code changed, change its entry in tests/mutants.yaml:\n{self.old}"
            )
        return text.replace(self.old, self.new)

    def test_files(self) -> list[str]:
        """Those that ``tests`` names."""
        return [word.split("::")[0] for word in shlex.split(self.tests) if word.startswith("tests/")]

    def key(self) -> str:
        """Changes when the mutant, the code around it, or a file of its tests does."""
        texts = [self.text(), self.tests, *((ROOT / file).read_text() for file in self.test_files())]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def read_list() -> list[Mutant]:
    """All mutants."""
    return [Mutant(**entry) for entry in yaml.safe_load(LIST.read_text())]


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A folder that goes with this process: tempfile's own goes with the first fork of it, in some test, that exits."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_tree(into: Path) -> None:
    """The packages and tests, copied; whatever else the tests read, linked."""
    for item in ROOT.iterdir():
        if item.name in COPIED:
            shutil.copytree(item, into / item.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif item.is_file():
            shutil.copy(item, into / item.name)
        elif item.name not in (".git", "runs"):
            (into / item.name).symlink_to(item)


def run_tests(arguments: list[str], tree: Path) -> tuple[str, list[str], str]:
    """Run pytest in ``tree``: the outcome, the tests that failed, and the output's end.

    Raises:
        ValueError: pytest found no test, or did not get as far as running one.
    """
    log = tree / "pytest.log"
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(arguments, tree, log))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        os.killpg(child.ident or 0, signal.SIGKILL)  # programs that the tests started, too
        child.join()
        return TIMED_OUT, [], ""
    output = log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    if child.exitcode not in (0, 1) and not failed:
        raise ValueError(f"pytest {shlex.join(arguments)} ended with {child.exitcode}:\n{output[-2000:]}")
    return (KILLED if failed else SURVIVED), failed, output[-2000:]


def _pytest(arguments: list[str], tree: Path, log: Path) -> None:
    """In a process of its own, which has the libraries and nothing of the project."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)  # of programs that tests start
    sys.path = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests"))]
    # A file that changes twice in a second, to the same size, would not be compiled anew.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.exit(int(pytest.main(["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments])))


def load_libraries() -> None:
    """What nearly all tests import and no mutant changes: once, here, and not once a mutant."""
    for name in ("torch", "transformers", *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES)):
        importlib.import_module(name)


def judge(mutant: Mutant, tree: Path) -> dict[str, Any]:
    """Make the mistake in ``tree``, run its tests, and mend it."""
    began, file = time.monotonic(), tree / mutant.file
    file.write_text(mutant.text())
    try:
        outcome, failed, _ = run_tests(["-x", *shlex.split(mutant.tests)], tree)
    finally:
        shutil.copy(ROOT / mutant.file, file)
    by = failed[0] if failed else None
    return {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - began, 1), "key": mutant.key()}


def check_killers(outcomes: dict[str, dict[str, Any]], tree: Path) -> list[str]:
    """The mutants killed by a test that fails without them, too: of those the outcome says nothing."""
    killers = sorted({outcome["by"] for outcome in outcomes.values() if outcome["by"]})
    if not killers:
        return []
    _, broken, output = run_tests(killers, tree)
    unsound = [name for name, outcome in outcomes.items() if outcome["by"] in broken]
    for name in unsound:
        print(f"{name}: {outcomes[name]['by']} fails without the mutant, too\n{output}", flush=True)
    return unsound


def write(mutants: list[Mutant], outcomes: dict[str, dict[str, Any]]) -> None:
    """Both files; what is on the list no more is left out."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    listed = {mutant.name: outcomes[mutant.name] for mutant in mutants if mutant.name in outcomes}
    RESULTS.write_text(json.dumps(listed, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(mutants, listed))


def page(mutants: list[Mutant], outcomes: dict[str, dict[str, Any]]) -> str:
    """The outcomes as Markdown."""
    killed = sum(outcome["outcome"] == KILLED for outcome in outcomes.values())
    alike = sum(bool(mutant.equivalent) for mutant in mutants)
    lines = [
        "# Mutants",
        "",
        f"{len(mutants)} mistakes, each made by itself in a copy of the code: some test must fail. Run: "
        f"{len(outcomes)}; killed: {killed}; explained, as no test can fail: {alike}. Written by `make mutants` from "
        "[tests/mutants.yaml](../../tests/mutants.yaml), where each is spelt out.",
        "",
        "| mutant | file | what it would do | outcome |",
        "| --- | --- | --- | --- |",
    ]
    for mutant in mutants:
        outcome = outcomes.get(mutant.name, {"outcome": "not run", "by": None})
        told = f"killed by `{outcome['by'].removeprefix('tests/')}`" if outcome["by"] else f"**{outcome['outcome']}**"
        told += f": {mutant.equivalent}" if mutant.equivalent else ""
        cells = [mutant.name, f"`{mutant.file}`", mutant.bug, told]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    words = parser.parse_args().words
    mutants = read_list()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    due = [mutant for mutant in mutants if known.get(mutant.name, {}).get("key") != mutant.key()]
    if words:
        due = [mutant for mutant in mutants if any(word in mutant.name for word in words)]
    load_libraries()
    with temporary() as folder:
        copy_tree(folder)
        for number, mutant in enumerate(due, start=1):
            known[mutant.name] = outcome = judge(mutant, folder)
            write(mutants, known)
            told = f"{outcome['outcome']} {outcome['by'] or ''}"
            print(f"{number}/{len(due)} {mutant.name}: {told} ({outcome['seconds']} s)", flush=True)
        current = {m.name: known[m.name] for m in mutants if known.get(m.name, {}).get("key") == m.key()}
        for name in check_killers(current, folder):
            del known[name]
    write(mutants, known)
    left = [m.name for m in mutants if known.get(m.name, {}).get("outcome") != KILLED and not m.equivalent]
    if left:
        sys.exit(f"not killed, and not explained: {', '.join(left)}")


if __name__ == "__main__":
    main()
