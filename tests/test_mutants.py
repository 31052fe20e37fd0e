"""Every entry of mutants.yaml fits the code and the tests, and mutants.py reports the mutants that no test kills."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

MOST = 120
MUTANTS = mutants.read_list()
TESTS = "\n".join(file.read_text() for file in (mutants.ROOT / "tests").rglob("*.py"))
SMALL_LIST = """
group:
- {name: killed, find: a = 1, replace: a = 2, tests: test_x}
- {name: not seen, find: b = (1), replace: b = 2, tests: test_x}
- {name: test fails anyway, find: a = 1, replace: a = 2, tests: test_y}
"""
MAIN = "import sys; sys.path.append('tests'); import mutants; mutants.LIBRARIES = (); mutants.main([''])"


@pytest.mark.parametrize("entry", MUTANTS, ids=lambda entry: entry["name"])
def test_entries_fit_the_code(entry: dict[str, str]) -> None:
    """Catches an entry whose code or tests were renamed, or whose code now occurs twice."""
    file, text = mutants.mutate(entry["find"], entry["replace"])
    compile(text, file, "exec")
    _, *selection = mutants.pytest_arguments(entry["tests"])
    words = set(re.findall(r"\w+", " ".join(selection[1:]))) - {"and", "or", "not"}
    assert not [word for word in words if word not in TESTS]


def test_list_is_short() -> None:
    """Catches a list so long that renames take hours."""
    assert len({entry["name"] for entry in MUTANTS}) == len(MUTANTS) <= MOST


def test_outcomes(tmp_path: Path) -> None:
    """Catches a mutant that counts as killed though its tests pass, or though they fail without it, too."""
    for name, text in {
        "tests/mutants.yaml": SMALL_LIST,
        "tests/test_x.py": "from eval.code import a\n\n\ndef test_a():\n    assert a == 1\n",
        "tests/test_y.py": "def test_b():\n    assert False\n",
        "eval/__init__.py": "",
        "eval/code.py": "a = 1  # comment\nb = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(mutants.__file__, tmp_path / "tests")
    done = subprocess.run([sys.executable, "-c", MAIN], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    outcomes = [line.split(" s  ")[1] for line in done.stdout.splitlines()]
    assert outcomes == ["tests/test_x.py::test_a", "NOT KILLED", "tests/test_y.py::test_b"]
    assert done.stderr.splitlines() == ["not killed: not seen", "fails without a mutant: tests/test_y.py::test_b"]
