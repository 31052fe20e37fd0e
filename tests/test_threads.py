"""CPU threads by the load of other processes."""

from pathlib import Path

import pytest
import torch

from drafters.common import threads
from drafters.common.threads import Look, threads_for


@pytest.mark.parametrize(
    ("others", "cores", "most", "expected"),
    [
        (0.0, 2, 2, 2),
        (0.3, 2, 2, 2),
        (1.0, 2, 2, 1),
        (2.0, 2, 2, 1),
        (0.7, 2, 2, 1),
        (3.0, 16, 16, 13),
        (0.0, 16, 8, 8),
    ],
)
def test_a_thread_for_each_free_core(others: float, cores: int, most: int, expected: int) -> None:
    """Catches threads that wait for a core that another process has, no thread at all, and more than were asked for."""
    own = 1.5  # cores that this process keeps busy itself
    before, now = Look(10.0, 100.0, 50.0), Look(12.0, 100.0 + 2 * (own + others), 50.0 + 2 * own)
    assert threads_for(before, now, cores, most) == expected


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A process with two threads, and a list that holds the number of cores that others use."""
    others, times = [0.0], iter(range(0, 1000, 10))
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "_before", None)
    monkeypatch.setattr(threads, "_most", None)
    monkeypatch.setattr(threads, "FIRST_LOOK", 0.0)
    monkeypatch.setattr(threads, "EVERY", -1.0)
    monkeypatch.setattr(threads, "_fewest", None)
    monkeypatch.setattr(threads, "_threads", None)
    monkeypatch.setattr(threads, "cpu_cores", lambda: 2)
    monkeypatch.setattr(threads, "own_cores", lambda: 2)
    monkeypatch.setattr(Look, "now", lambda: (lambda t: Look(t, others[0] * t, 0.0))(float(next(times))))
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    now = [2]
    return others


def test_threads_follow_the_load(two_threads: list[float]) -> None:
    """Catches a process that keeps its threads when another one comes, and one that never takes them back."""
    found = []
    for load in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0):
        two_threads[0] = load
        threads._before = None
        threads.fit_threads()
        found.append(torch.get_num_threads())
    assert found == [2, 2, 2, 2, 1, 1, 2]  # what lasts for one look only changes nothing
    # What a report says, and a resumed measurement is recognised by.
    assert (threads.idle_threads(), threads.fewest_threads()) == (2, 1)


def test_what_the_user_sets_stays(two_threads: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches OMP_NUM_THREADS or a config's threads overruled by the load."""
    two_threads[0] = 2.0
    threads.set_threads(2)
    threads.fit_threads()
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "_most", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads.fit_threads()
    assert torch.get_num_threads() == 2
    threads.fit_threads(2)  # of a rank, whose launcher has set the variable for it
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 2), ("max 100000", 8), ("20000 100000", 1), (None, 8)])
def test_a_control_groups_quota_counts(
    text: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches eight threads in a container that may use one core and a half."""
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert threads.cpu_cores() == cores
