"""The simulated CUDA device itself: what it refuses, counts and delays, and what a captured graph does."""

from collections.abc import Callable, Iterator

import pytest
import torch
from simulated_cuda import SimulatedCuda, simulated_cuda

GPU = torch.device("cuda")


@pytest.fixture
def gpu() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as device:
        yield device


@pytest.fixture(params=[False, True], ids=["autograd", "inference"])
def both_modes(gpu: SimulatedCuda, request: pytest.FixtureRequest) -> Iterator[SimulatedCuda]:
    """In inference mode torch hands over whole operations that it takes apart elsewhere."""
    with torch.inference_mode(request.param):
        yield gpu


def test_reads_and_uploads_are_counted(both_modes: SimulatedCuda) -> None:
    """Catches a way for the host to wait for the device that is not seen; and work on the device taken for one."""
    gpu = both_modes
    x, mask = torch.arange(4.0).to("cuda"), torch.tensor([True, False, True, False]).to("cuda")
    reads: list[Callable[[], object]] = [
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: bool((x > 1).any()),
        lambda: x.nonzero(),
        lambda: x[mask],
        lambda: x.masked_select(mask),
        lambda: torch.equal(x, x),
        lambda: torch.zeros(4).copy_(x),
        lambda: x[: int(x[1])],
    ]
    for number, read in enumerate(reads):
        gpu.log.clear()
        read()
        assert gpu.count("read") == 1 and gpu.count("upload") == 0, number
        assert gpu.log[0].where.startswith("tests/test_simulated_cuda.py:")
    uploads: list[Callable[[], object]] = [
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to("cuda", non_blocking=True),  # not pinned: as slow as any
        lambda: x.copy_(torch.ones(4)),
        lambda: x[torch.tensor([1, 2])],
        lambda: x[[0, 2]],
    ]
    for number, upload in enumerate(uploads):
        gpu.log.clear()
        upload()
        assert gpu.count("upload") == 1 and gpu.count("read") == 0, number
    gpu.log.clear()
    x[0] = 3.0
    x[mask] = 0.0
    x.masked_fill_(mask, 1.0)
    x.index_fill_(0, mask.long(), 2.0)
    torch.full((2,), 7, device="cuda")
    x.view(2, 2).repeat_interleave(2, dim=0)
    torch.where(mask, x, 0.0).topk(2)
    assert [event.kind for event in gpu.log] == []


def test_streams_are_ordered_by_events(gpu: SimulatedCuda) -> None:
    """Catches work of one stream that uses what another may not have written, or overwrites what it still reads."""
    side, x = torch.cuda.Stream(), torch.zeros(3, device="cuda")
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="may not have written"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(RuntimeError, match="may not have written"):
        y * 2
    with pytest.raises(RuntimeError, match="may still read"):
        x.add_(1)  # refused, but done: it is CUDA that would not notice
    torch.cuda.current_stream().wait_event(side.record_event())
    assert (y * 2).tolist() == [2.0, 2.0, 2.0]
    x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        assert (x + y).tolist() == [3.0, 3.0, 3.0]


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_replay_runs_operations_and_no_python(both_modes: SimulatedCuda) -> None:
    """Catches a replay that looks at Python again: on real CUDA the number below would stay what it was at capture."""
    buffer, scale, made = torch.ones(3, device="cuda"), 2.0, {}

    def work() -> None:
        made["out"] = (buffer * scale + torch.arange(3, device="cuda")).view(3, 1).reshape(-1)
        buffer.add_(1)

    graph = captured(work)
    assert buffer.tolist() == [1.0] * 3, "nothing is run while a graph is captured"
    assert made["out"].isnan().all(), "what it makes holds nothing before the first replay"
    scale = 100.0
    graph.replay()
    assert made["out"].tolist() == [2.0, 3.0, 4.0] and buffer.tolist() == [2.0] * 3
    buffer.fill_(5.0)
    kept, copied = made["out"], made["out"].clone()
    graph.replay()
    assert kept.tolist() == [10.0, 11.0, 12.0] and copied.tolist() == [2.0, 3.0, 4.0]
    assert both_modes.count("replay") == 2


def test_capture_refuses(gpu: SimulatedCuda) -> None:
    """Catches a forward that is captured here and would not be on a GPU."""
    x, generator = torch.ones(3, device="cuda"), torch.Generator("cuda")
    host, pinned = torch.ones(3), torch.ones(3).pin_memory()
    event = torch.cuda.Event()
    for wrong in (
        lambda: x.sum().item(),
        lambda: x[x > 0],
        lambda: x.cpu(),
        lambda: host.to("cuda"),
        lambda: x.copy_(host),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: x[[0, 1]],
        lambda: host.pin_memory(),
        lambda: x.to("cpu", non_blocking=True),
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        event.synchronize,
        event.query,
        lambda: torch.rand(3, device="cuda", generator=generator),
        lambda: captured(lambda: x + 1),
    ):
        with pytest.raises(RuntimeError, match="captur"):
            captured(wrong)
        assert x.tolist() == [1.0] * 3 and not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    graph = captured(lambda: x.copy_(pinned, non_blocking=True))
    pinned.fill_(4.0)
    graph.replay()
    assert x.tolist() == [4.0] * 3
