"""The list of mutants keeps up with the code that it mutates, and its results with the list."""

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.read_list(), ids=lambda mutant: mutant.name)
def test_every_mutant_can_still_be_made(mutant: mutants.Mutant) -> None:
    """Catches an entry that code has moved away from, or whose tests are gone: it would say nothing any more."""
    changed = mutant.text()
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.test_files() and all((mutants.ROOT / file).is_file() for file in mutant.test_files())


def test_results_are_of_the_list() -> None:
    """Catches mutants listed but never run, and survivors that nobody explained."""
    listed = mutants.read_list()
    results = json.loads(mutants.RESULTS.read_text())
    assert len({mutant.name for mutant in listed}) == len(listed) >= 60
    assert [mutant.name for mutant in listed] == list(results), "run make mutants, and commit its results"
    for mutant in listed:
        assert (results[mutant.name]["outcome"] == mutants.KILLED) is not bool(mutant.equivalent), mutant.name


def test_a_text_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mutant that changes nothing, or the wrong one of two places, and is called survived or killed."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for text, times in (("b = 2\n", 0), ("a = 1\na = 1\n", 2)):
        (tmp_path / "code.py").write_text(text)
        with pytest.raises(ValueError, match=f"'one'.* stands {times} times in code.py"):
            mutants.Mutant("one", "code.py", "a = 1", "a = 2", "tests/test_x.py", "").text()


def test_outcomes(tmp_path: Path) -> None:
    """Catches a mutant called killed by a test that fails anyway, and a tree left mutated for the next one."""
    for name, text in {
        "drafters/__init__.py": "",
        "drafters/code.py": "a = 1\n",
        "tests/test_x.py": "from drafters.code import a\n\n\ndef test_a():\n    assert a == 1\n",
        "tests/test_y.py": "def test_b():\n    assert False\n",
    }.items():
        (tmp_path / "clean" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clean" / name).write_text(text)
    (tmp_path / "copy").mkdir()
    # A process of its own: this one has imported another package of the name.
    program = [sys.executable, "-c", OUTCOMES, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made, unsound, told = json.loads(done.stdout.splitlines()[-1])
    assert {name: (outcome["outcome"], outcome["by"]) for name, outcome in made.items()} == {
        "seen": (mutants.KILLED, "tests/test_x.py::test_a"),
        "same": (mutants.SURVIVED, None),
        "sick": (mutants.KILLED, "tests/test_y.py::test_b"),
    }
    assert unsound == ["sick"] and "sick: tests/test_y.py::test_b fails without the mutant, too" in done.stdout
    assert "ended with 5" in told
    assert (tmp_path / "copy" / "drafters/code.py").read_text() == "a = 1\n"


OUTCOMES = """
import json, sys
from pathlib import Path

sys.path.append(sys.argv[2])
import mutants

folder = Path(sys.argv[1])
mutants.ROOT, tree = folder / "clean", folder / "copy"
mutants.copy_tree(tree)
code = "drafters/code.py"
made = {
    name: mutants.judge(mutants.Mutant(name, code, "a = 1", f"a = {value}", f"tests/{tests}.py", ""), tree)
    for name, value, tests in (("seen", 2, "test_x"), ("same", "1.0", "test_x"), ("sick", 2, "test_y"))
}
unsound = mutants.check_killers(made, tree)
try:
    mutants.run_tests(["tests/test_x.py", "-k", "nothing"], tree)
except ValueError as error:
    print(json.dumps([made, unsound, str(error)]))
"""
