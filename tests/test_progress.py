"""Bars on a terminal and in a log file."""

import io

import pytest
from tqdm import tqdm

from data_prep.common import progress
from data_prep.common.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_now_and_then(monkeypatch):
    """Catches a log of thousands of carriage returns, and one that does not show that the run continues."""
    file = io.StringIO()
    with Bar(total=1000, file=file, desc="train") as bar:
        for step in range(1000):
            bar.update(1)
            if step % 100 == 0:
                tqdm.write("a line", file=file)  # takes bars away and draws them again
    lines = file.getvalue().splitlines()
    assert lines[:-1] == ["a line"] * 10
    assert lines[-1].startswith("train: 100%")
    assert "\r" not in file.getvalue()
    file = io.StringIO()
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with Bar(total=3, file=file, miniters=1) as bar:
        for _ in range(3):
            bar.update(1)
    assert [line.partition("|")[0].strip() for line in file.getvalue().splitlines()] == ["33%", "67%", "100%", "100%"]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_bar_without_progress(stream):
    """Catches an error below a bar at 0%, as if work had been done."""
    file = stream()
    with pytest.raises(ValueError), Bar(total=10, file=file):
        tqdm.write("step 0", file=file)
        raise ValueError
    assert file.getvalue().strip("\r\n ") == "step 0"


def test_only_the_first_rank_draws(monkeypatch):
    """Catches eight bars over one another under a launcher."""
    monkeypatch.setenv("RANK", "1")
    file = io.StringIO()
    with Bar(total=1, file=file) as bar:
        bar.update(1)
    assert not file.getvalue()
