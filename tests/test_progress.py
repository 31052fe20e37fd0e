"""Bars on a terminal and in a log file."""

import io

from tqdm import tqdm

from data_prep.common import progress
from data_prep.common.progress import Bar


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
