"""Which code made a result."""

import subprocess
from pathlib import Path

import pytest

from drafters.common.provenance import UNCOMMITTED, git_commit


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *name, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with one committed module in ``package``."""
    package = tmp_path / "code" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text("ONE = 1\n")
    (package.parent / ".gitignore").write_text("runs/\n")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return package.parent


def test_the_commit_tells_when_the_code_is_not_in_it(checkout: Path) -> None:
    """Catches a result that names a commit which does not hold the code it was made with, and a false alarm."""
    package, commit = checkout / "package", git(checkout, "rev-parse", "HEAD")
    assert git_commit(package) == commit
    (checkout / "notes.txt").write_text("not code")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "ignored.py").write_text("")
    assert git_commit(package) == commit
    (checkout / "other").mkdir()
    (checkout / "other" / "new.py").write_text("")  # in a new folder above the one asked about
    assert git_commit(package) == commit + UNCOMMITTED
    (checkout / "other" / "new.py").unlink()
    (package / "module.py").write_text("ONE = 2\n")
    assert git_commit(package) == commit + UNCOMMITTED
    git(checkout, "add", ".")  # staged is not committed
    assert git_commit(package) == commit + UNCOMMITTED
