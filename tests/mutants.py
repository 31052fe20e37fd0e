"""Make deliberate mistakes (mutants) in the code, one at a time. The tests of each must fail.

    make mutants                    # all of mutants.yaml, about ten minutes
    python tests/mutants.py refill  # those with the word in their name

An entry has a ``name``; ``find``, an expression or statement that occurs exactly once in the packages; ``replace``, the
mistake; and ``tests``, the stem of a test file and pytest's ``-k``. Code is compared as ``ast.unparse`` prints it, so
file names, line wraps and comments do not matter.
"""

import ast
import functools
import importlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("drafters", "train", "data_prep", "eval")
# Imported before the forks that run each mutant's tests, which saves about seven seconds a mutant.
LIBRARIES = ("torch", "transformers.models.llama.modeling_llama")
SECONDS = 120  # time limit of one mutant's tests; the slowest take 20 s


def read_list() -> list[dict[str, str]]:
    """Return the entries of mutants.yaml, each with its ``group``."""
    groups = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text())
    return [{"group": group, **entry} for group, entries in groups.items() for entry in entries]


@functools.cache
def sources() -> dict[Path, str]:
    """Return the code of the packages by file, as ``ast.unparse`` prints it."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file.relative_to(ROOT): ast.unparse(ast.parse(file.read_text())) + "\n" for file in files}


def mutate(find: str, replace: str) -> tuple[Path, str]:
    """Return the file that contains ``find``, relative to the root, and its text with ``replace`` instead."""
    code = ast.unparse(ast.parse(find))
    pattern = rf"(?<!\w){re.escape(code)}(?!\w)"
    texts = {file: text for file, text in sources().items() if code in text}  # much faster than the pattern
    places = [(file, found) for file, text in texts.items() for found in re.finditer(pattern, text)]
    if len(places) != 1:
        where = ", ".join(str(file) for file, _ in places) or "no file"
        raise ValueError(f"tests/mutants.yaml: {find!r} occurs {len(places)} times ({where}), expected once")
    file, found = places[0]
    return file, found.string[: found.start()] + replace + found.string[found.end() :]


def pytest_arguments(tests: str) -> list[str]:
    """Return pytest's arguments: ``tests`` with the file's path instead of its stem."""
    stem, *options = shlex.split(tests)
    (file,) = (ROOT / "tests").rglob(f"{stem}.py")
    return [str(file.relative_to(ROOT)), *options]


def run_tests(arguments: list[str], tree: Path, seconds: float) -> list[str]:
    """Run pytest in ``tree``, in a process of its own. Return the names of the failed tests; none after a timeout."""
    log = tree / "pytest.log"
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(arguments, tree, log))
    child.start()
    child.join(seconds)
    if child.is_alive():
        os.killpg(child.ident or 0, signal.SIGKILL)  # also the programs that the tests started
        child.join()
    output = log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    if (child.exitcode or 0) > 1 and not failed:  # no test was run
        raise ValueError(f"pytest {shlex.join(arguments)} ended with {child.exitcode}:\n{output[-2000:]}")
    return failed


def _pytest(arguments: list[str], tree: Path, log: Path) -> None:
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")  # for programs that tests start
    sys.path = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests"))]
    sys.dont_write_bytecode = True  # bytecode of a file that changes twice in a second would be stale
    sys.exit(int(pytest.main(["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments])))


def main(words: list[str]) -> None:
    """Run the mutants whose names contain one of ``words``, print a line for each, and exit with those not killed."""
    for name in LIBRARIES:
        importlib.import_module(name)
    killers, wrong = set[str](), list[str]()
    tree = Path(tempfile.mkdtemp(prefix="mutants-"))  # a TemporaryDirectory would end with the first fork that exits
    try:
        shutil.copytree(ROOT, tree, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        for entry in (one for one in read_list() if any(word in one["name"] for word in words)):
            began, (file, text) = time.monotonic(), mutate(entry["find"], entry["replace"])
            (tree / file).write_text(text)
            failed = run_tests(["-x", *pytest_arguments(entry["tests"])], tree, SECONDS)
            shutil.copy(ROOT / file, tree / file)
            killers.update(failed)
            wrong += [] if failed else [f"not killed: {entry['name']}"]
            told = f"{time.monotonic() - began:5.1f} s  {failed[0] if failed else 'NOT KILLED'}"
            print(f"{entry['group']:10}  {entry['name']:64}  {told}", flush=True)
        # A test that fails without a mutant, too, kills nothing.
        broken = run_tests(sorted(killers), tree, len(killers) * SECONDS) if killers else []
        wrong += [f"fails without a mutant: {test}" for test in broken]
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main(sys.argv[1:] or [""])
