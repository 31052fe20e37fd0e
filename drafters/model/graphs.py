"""Forwards of fixed shapes on buffers that never move, captured as CUDA graphs: one launch in place of hundreds.

A forward is that of fused layers or of a learned head, or a model's own over a static cache. What changes from step to
step (lengths, tokens, who sees whom) is in small device buffers that are filled before a replay; positions, slots and
masks are computed from them inside the graph. New tokens are padded to a few counts, and the keys read to a few
lengths. Each combination is captured once, when it is first met. On a CPU nothing is captured and the same code is run:
that is how it is tested without a GPU.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from drafters.common.wording import first_line
from drafters.config import Engine
from drafters.model.cache import CachePool, KVCache, Storage, StorageRows
from drafters.model.check import FAILURES, most_allowed, off
from drafters.model.elementwise import compiling
from drafters.model.files import collect_memory
from drafters.model.rows import CHAIN, Angles, BufferedRows, Placed, Rows
from drafters.model.runner import Part, Runner, Taps, attention_kernels
from drafters.model.stock import ModelPart, StockRunner

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

MOST_ROWS = 64  # longer blocks are prompts: they have work enough to hide their launches
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 26, 32, 40, 48, 60, MOST_ROWS)


def padded_rows(rows: int) -> int:
    """Number of tokens that ``rows`` tokens (at most ``MOST_ROWS``) are padded to."""
    return next(count for count in ROWS if count >= rows)


def padded_rows_fit(rows: int, offset: int) -> bool:
    """Whether new and uncommitted tokens, both padded, stay within the captured counts."""
    return rows <= MOST_ROWS and offset + padded_rows(rows) <= MOST_ROWS


def seen_rows(end: int, capacity: int) -> int:
    """Number of cache slots that attention reads while ``end`` are in use."""
    step = 256 if end <= 2048 else 1024
    return min(-(-end // step) * step, capacity)


@dataclass(eq=False)
class Captured:
    """One forward of fixed shape.

    It keeps what the graph references by address. Not the cache: its memory is reused when it is gone.

    Attributes:
        inputs: buffers of the part's inputs. table: table of RoPE's angles; None for a model's own forward.
        outputs: hidden states and taps of the last run, overwritten by the next.
        replay: function that runs it again; None before it was captured.
        refused: True if there was no room to capture it.
    """

    runner: Runner
    part: Part
    rows: BufferedRows
    inputs: list[Tensor]
    storage: Storage
    table: Angles | None
    taps: tuple[int, ...]
    outputs: tuple[Tensor, Taps] | None = None
    replay: Callable[[], None] | None = None
    refused: bool = False

    def fill(self, inputs: Sequence[Tensor], rows: Placed) -> None:
        """Copy a step's values into the buffers."""
        for buffer, value in zip(self.inputs, inputs, strict=True):
            buffer[:, : rows.count].copy_(value)
        self.rows.fill(rows)

    def forward(self) -> None:
        """The operations that are captured; every input is a buffer, every shape is fixed."""
        cache = StorageRows(self.storage, self.rows.slots(), self.rows.end)
        with compiling(self.runner.engine == "compiled"):
            self.outputs = self.runner.operations(self.part, self.inputs, cache, self.rows, self.taps)


class GraphRunner(Runner):
    """The engine "graphs": the fused layers, captured, and the caches that captured forwards are bound to."""

    engine: Engine = "graphs"

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self._caches = CachePool(MOST_ROWS)
        self._parts: WeakSet[Part] = WeakSet()  # parts with a captured graph
        self._pool: Any = None
        self._streams: tuple[Any, Any] | None = None  # for warming up, and for capturing
        self.on_trial = True  # while loading, which reports what fails

    def new_cache(self, *shape: Any) -> KVCache:
        """As ``Runner.new_cache``, from the pool."""
        try:
            return self._caches.take(*shape)
        except (ValueError, torch.OutOfMemoryError):
            self.free()
        return self._caches.take(*shape)

    def free(self) -> None:
        """Free the memory of unused caches, and what was captured with them."""
        storages = self._caches.give_up()
        for part in self._parts:
            for key in [key for key in part.captured if key[0] in storages]:
                del part.captured[key]
        del storages
        if not any(one.replay is not None for part in self._parts for one in part.captured.values()):
            self._pool = None  # a pool whose graphs are all gone takes no others
        collect_memory()

    def _run(
        self, part: Part, inputs: Sequence[Tensor], cache: KVCache | None, rows: Placed, taps: tuple[int, ...]
    ) -> tuple[Tensor, Taps]:
        # A graph is for few tokens that follow others in a cache made for it.
        fits = padded_rows_fit(rows.count, rows.offset) and rows.end > rows.count
        if part.uncaptured is not None or cache is None or cache.storage is None or not fits:
            return super()._run(part, inputs, cache, rows, taps)
        # The shape: tokens and cache length, padded to the few that are captured.
        count, batch = padded_rows(rows.count), len(rows.lengths)
        uncommitted = padded_rows(rows.offset + count)
        seen = seen_rows(rows.end - rows.count + count, cache.capacity)
        table = None if isinstance(part, ModelPart) else (part.rope or self.rope).table(cache.positions + MOST_ROWS)
        angles = 0 if table is None else len(table[0])
        key = (cache.storage, count, uncommitted, seen, angles, taps, *(x.dtype for x in inputs))
        captured = part.captured.get(key)
        if captured is None:  # its first time: buffers that never move, which outlive this call's inference mode
            with torch.inference_mode(False):
                buffers = BufferedRows(batch, count, uncommitted, seen, rows.device)
                fed = [x.new_zeros(batch, count, *x.shape[2:]) for x in inputs]
                captured = Captured(self, part, buffers, fed, cache.storage, table, taps)
            part.captured[key] = captured
            self._parts.add(part)
        # Fill, capture on the first time, replay. The next replay overwrites its output, so the output is copied.
        captured.fill(inputs, rows)
        if captured.replay is None and not captured.refused:
            captured.replay = self._capture(captured, rows.device)
        if captured.replay is None:
            captured.refused = True
            return super()._run(part, inputs, cache, rows, taps)
        captured.replay()
        assert captured.outputs is not None
        hidden, collected = captured.outputs
        copies = {index: tap[:, : rows.count].clone() for index, tap in collected.items()}
        return hidden[:, : rows.count].clone(), copies

    def _capture(self, captured: Captured, device: torch.device) -> Callable[[], None] | None:
        """Capture a forward; returns what replays it. If that fails, None, and no forward of its part is captured from
        now on; where memory alone is short, this one is not.
        """
        if device.type != "cuda":
            return captured.forward
        for again in (False, True):
            try:
                # Streams and graphs are the current device's; a capture that fails at its end leaves its stream behind.
                now = torch.cuda.current_stream(device)
                with torch.cuda.device(device), torch.cuda.stream(now), attention_kernels(device):
                    return self._graph_of(captured.forward, device)
            except torch.OutOfMemoryError as error:
                if again:
                    logging.getLogger(__name__).warning("a forward is run without a graph: %s", first_line(error))
            except FAILURES as error:
                reason = f"no CUDA graph could be captured: {first_line(error)}"
                captured.part.uncaptured = reason
                with suppress(RuntimeError, TypeError):  # raised unless a capture has failed and is still under way
                    torch._C._cuda_endAllocateToPool(device.index or 0, self._pool)
                if not self.on_trial:
                    logging.getLogger(__name__).warning("some layers run without graphs: %s", reason)
                return None
            self.free()
        return None

    def _graph_of(self, forward: Callable[[], None], device: torch.device) -> Callable[[], None]:
        # Streams of this runner's own: cuBLAS keeps a workspace for each, which a graph knows by its address. Another
        # runner's graphs (a draft model's) may go away before these do.
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        side, stream = self._streams
        # Warm up, on a side stream: libraries set themselves up in the first calls, which a graph may not hold.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            forward()
            with synchronising() as waits:
                forward()
        torch.cuda.current_stream(device).wait_stream(side)
        if waits:
            raise RuntimeError(f"its forward waits for the GPU in {waits[0]}")
        # Capture. All graphs share one memory pool, for only one of them runs at a time.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads that read training data call CUDA, too, while tau is measured: only this one's calls matter.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            forward()
        replay: Callable[[], None] = graph.replay
        return replay


@contextmanager
def synchronising() -> Iterator[list[str]]:
    """Collect the places where operations of this thread synchronise.

    No graph can hold them. They are found before the capture, because torch's allocator does not end a capture that
    fails: afterwards ``torch.cuda.empty_cache`` raises an internal error.
    """
    places, thread, before = list[str](), threading.get_ident(), torch.cuda.get_sync_debug_mode()

    def note(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if threading.get_ident() == thread and "called a synchronizing" in str(message):  # not the mode's own notice
            places.append(f"{Path(filename).name}, line {lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


class CompiledRunner(GraphRunner):
    """The engine "compiled": captured fused layers, with compiled operations between their products."""

    engine: Engine = "compiled"


class StockGraphRunner(GraphRunner, StockRunner):
    """The engine "graphs" for a model that runs on its own forward, which is then captured whole."""


@torch.inference_mode()
def differs_from_layers(target: "TargetModel", graphs: GraphRunner) -> str | None:
    """Return how captured forwards differ from the target's uncaptured ones, or what went wrong; None if nothing did.

    A trial at every load, because drivers and libraries differ. After two prompts of unequal length come a chain and a
    tree, twice each, so that graphs are replayed with other values than they were captured with.
    """
    tokens = torch.arange(1, 10, device=target.device).expand(2, -1) % target.vocab_size
    see = torch.eye(5, dtype=torch.bool, device=target.device)[None].repeat(2, 1, 1)
    see[:, :, 0] = see[:, 4, 2] = True  # a root, its three children, and a grandchild
    whole = replace(target.part(0, None), captured={})
    runners, most = (target.runner, graphs), 0.0
    try:
        caches = [one.new_cache(one.shapes(), 2, 32, target.dtype, target.device) for one in runners]
        for runner, cache in zip(runners, caches, strict=True):  # a prompt is never captured
            runner.run(whole, [tokens[:, :6]], cache)
            cache.commit_first([6, 4])
        for turn in range(2):
            for count, rows, accepted in ((1, CHAIN, [[0], [0]]), (5, Rows(see, see.sum(-1) - 1), [[0, 2, 4], [0]])):
                fed = [tokens[:, turn : turn + count]]
                theirs, ours = (
                    runner.run(whole, fed, cache, rows)[0] for runner, cache in zip(runners, caches, strict=True)
                )
                most = max(most, off(ours, theirs).median().item())
                for cache in caches:
                    cache.commit(accepted)
    except FAILURES as failure:
        return first_line(failure)
    finally:
        whole.captured.clear()  # it references ``whole``: a cycle would keep its graphs until the next collection
    differs = most > most_allowed(target, tokens, most)
    return whole.uncaptured or (f"in a captured trial features are off by {most:.2g}" if differs else None)
