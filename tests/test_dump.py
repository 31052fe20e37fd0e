"""Writing beside computing: bounded, in order, and its errors reach the one who computes."""

import errno
import threading
import time

import pytest

from data_prep.extraction.dump import IN_FLIGHT, Background


def test_jobs_run_in_order_and_at_most_two_wait():
    """Catches a host that fills up with shards when the disk is slower than the target, and shards that overtake."""
    done: list[int] = []
    gate = threading.Semaphore(0)

    def job(index):
        gate.acquire()
        done.append(index)

    submitted: list[int] = []

    def compute():
        with Background() as background:
            for index in range(6):
                background.submit(lambda index=index: job(index))
                submitted.append(index)

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.2)
    assert len(submitted) == IN_FLIGHT and done == []
    for _ in range(6):
        gate.release()
    thread.join(timeout=10)
    assert done == submitted == list(range(6))


def test_an_error_reaches_the_caller():
    """Catches a full disk noticed only at the end of the corpus, and a shard that was handed over and is lost."""
    done: list[str] = []
    started = threading.Event()

    def fails():
        started.wait()
        raise OSError(errno.ENOSPC, "the disk is full")

    with pytest.raises(OSError, match="the disk is full"), Background() as background:
        background.submit(fails)
        background.submit(lambda: done.append("after"))
        background.check()  # nothing yet, and no waiting
        started.set()
        while True:
            time.sleep(0.001)
            background.check()
    with pytest.raises(OSError, match="the disk is full"), Background() as background:
        background.submit(fails)  # the very last one
    with pytest.raises(KeyboardInterrupt), Background() as background:
        background.submit(lambda: (time.sleep(0.1), done.append("handed over before"))[0])
        raise KeyboardInterrupt
    assert done == ["after", "handed over before"]
