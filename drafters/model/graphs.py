"""Forwards of fixed shapes on buffers that never move, captured as CUDA graphs: one launch in place of hundreds.

What changes from step to step (lengths, tokens, who sees whom) lies in small device buffers that are filled before a
replay; positions, slots and the attention bias are worked out from them inside the graph. Rows are padded to a few
counts and the keys read to a few lengths, and every combination in use is captured once, when it is first met. On a CPU
nothing is captured and the same code is simply run: that is how it is tested without a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .fused import Rope, signed
from .kv_cache import CachePool, KVCache

MOST_ROWS = 64  # longer blocks are prompts: they have work enough to hide their launches
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 26, 32, 40, 48, 60, MOST_ROWS)
Layer = Callable[[torch.Tensor, Rope, torch.Tensor | None, Any, int], torch.Tensor]


def padded_rows(rows: int) -> int:
    """The count that ``rows`` are padded to; at most ``MOST_ROWS`` of them."""
    return next(count for count in ROWS if count >= rows)


def seen_rows(end: int, capacity: int) -> int:
    """How many cache rows attention reads where ``end`` are in use."""
    step = 256 if end <= 2048 else 1024
    return min(-(-end // step) * step, capacity)


class Static:
    """One captured forward: R rows (padded) of B batch rows over T uncommitted ones, reading ``seen`` cache rows.

    Attributes:
        lengths, starts: ``[B]`` committed rows, and the slot of each batch row's first new row.
        depths: ``[B, T]`` of the uncommitted rows. see: ``[B, R, T]`` which of them each new row sees.
        inputs: buffers of what the prologue takes.
    """

    def __init__(self, batch: int, rows: int, temporary: int, inputs: Sequence[torch.Tensor]) -> None:
        device = inputs[0].device
        self.rows = rows
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.starts = torch.zeros(batch, dtype=torch.long, device=device)
        self.depths = torch.zeros(batch, temporary, dtype=torch.long, device=device)
        self.see = torch.zeros(batch, rows, temporary, dtype=torch.bool, device=device)
        self.inputs = [torch.zeros((batch, rows, *x.shape[2:]), dtype=x.dtype, device=device) for x in inputs]
        self.replay: Callable[[], None] = _nothing
        self.forward: Callable[[], None] = _nothing  # kept, for it holds what the graph knows by address only
        self.outputs: tuple[torch.Tensor, dict[int, torch.Tensor]]

    def fill(
        self,
        inputs: Sequence[torch.Tensor],
        lengths: list[int],
        see: torch.Tensor | None,
        depths: torch.Tensor | None,
        offset: int,
    ) -> None:
        """Put a step's values into the buffers."""
        rows, temporary = inputs[0].shape[1], self.see.shape[2]
        for buffer, value in zip(self.inputs, inputs, strict=True):
            buffer[:, :rows].copy_(value)
        if lengths.count(lengths[0]) == len(lengths):  # nothing to copy from the host
            self.lengths.fill_(lengths[0])
            self.starts.fill_(lengths[0] + offset)
        else:
            known = torch.tensor(lengths, pin_memory=self.lengths.is_cuda)
            self.lengths.copy_(known, non_blocking=True)
            torch.add(self.lengths, offset, out=self.starts)
        order = torch.arange(temporary, device=self.see.device)
        own = (offset + torch.arange(self.rows, device=self.see.device))[:, None]
        # Of rows that are padding, itself is all one need see; of a chain, all before it.
        if see is None:
            self.see.copy_(order[None] <= own)
        else:
            self.see.copy_(order[None] == own)
            self.see[:, :rows, : see.shape[2]].copy_(see)
        self.depths.copy_(order)
        if depths is not None:
            self.depths[:, : depths.shape[1]].copy_(depths)

    def rows_of_step(self, seen: int, windows: set[int | None], groups: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """Positions and slots ``[B, R]`` and each window's bias ``[B, 1, groups * R, seen]``."""
        temporary, device = self.see.shape[2], self.see.device
        first = (self.starts - self.lengths)[:, None]
        own = (first + torch.arange(self.rows, device=device)).clamp_max(temporary - 1)
        positions = self.lengths[:, None] + self.depths.gather(1, own)
        slots = self.starts[:, None] + torch.arange(self.rows, device=device)
        columns = torch.arange(seen, device=device)
        since = columns - self.lengths[:, None]  # [B, seen]: of the uncommitted, their number
        known, number = since < 0, since.clamp(0, temporary - 1)
        among = self.see.gather(2, number[:, None].expand(-1, self.rows, -1)) & (since < temporary)[:, None]
        visible = known[:, None] | among
        keys = torch.where(known, columns, self.lengths[:, None] + self.depths.gather(1, number))
        biases = {}
        for window in windows:
            near = visible if window is None else visible & (positions[:, :, None] - keys[:, None] < window)
            bias = torch.zeros(near.shape, dtype=dtype, device=device).masked_fill_(~near, float("-inf"))
            biases[window] = bias[:, None].repeat(1, 1, groups, 1)
        return positions, slots, biases


class Graphs:
    """The captured forwards of one target and of what drafts for it, and the caches they are bound to.

    ``broken``: why nothing is captured any more, None while all is well.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.caches = device, CachePool()
        self._captured: dict[tuple[Any, ...], Static] = {}
        self._pool: Any = None
        self.broken: str | None = None

    def usable(self, cache: KVCache | None, rows: int, offset: int) -> bool:
        """Whether a forward is one for a graph: few rows that follow others in a cache made for it."""
        return (
            self.broken is None
            and cache is not None
            and cache.storage is not None
            and padded_rows_fit(rows, offset)
            and max(cache.lengths) + offset > 0
        )

    def run(
        self,
        name: str,
        layers: Sequence[tuple[int, Layer, int | None]],
        prologue: Callable[..., torch.Tensor],
        epilogue: Callable[[torch.Tensor], torch.Tensor],
        inputs: Sequence[torch.Tensor],
        cache: KVCache,
        table: Callable[[int], Rope],
        groups: int,
        see: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
        offset: int = 0,
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run ``layers`` over R new rows.

        Args:
            name: what is run; with the shapes it tells captured forwards apart.
            layers: (number, layer, sliding window), in order.
            prologue: inputs -> hidden states ``[B, R, H]``. epilogue: of the last hidden states.
            inputs: ``[B, R, ...]`` each.
            table: capacity -> cos and sin of every position.

        Returns:
            ``[B, R, H]`` and the taps, copies that the next replay leaves alone.
        """
        batch, count = inputs[0].shape[:2]
        rows = padded_rows(count)
        temporary = padded_rows(offset + rows)
        seen = seen_rows(max(cache.lengths) + offset + rows, cache.capacity)
        storage = cache.storage  # not the cache: its memory is lent anew once it is gone
        assert storage is not None
        key = (name, storage, batch, rows, temporary, seen, taps, [x.dtype for x in inputs].__repr__())
        static = self._captured.get(key)
        if static is None:
            with torch.inference_mode(False):
                static = Static(batch, rows, temporary, inputs)
        static.fill(inputs, cache.lengths, see, depths, offset)
        if key not in self._captured:
            windows = {window for _, _, window in layers}
            rope = table(cache.capacity + MOST_ROWS)

            def forward() -> None:
                positions, slots, biases = static.rows_of_step(seen, windows, groups, storage.keys.dtype)
                turn = signed((rope[0][positions], rope[1][positions]))
                view, hidden, collected = storage.at(slots, seen), prologue(*static.inputs), {}
                for index, layer, window in layers:
                    if index in taps:
                        collected[index] = hidden
                    hidden = layer(hidden, turn, biases[window], view, index)
                if layers[-1][0] + 1 in taps:
                    collected[layers[-1][0] + 1] = hidden
                static.outputs = epilogue(hidden), collected

            static.forward, static.replay = forward, self._capture(forward)
            self._captured[key] = static
        static.replay()
        hidden, collected = static.outputs
        return hidden[:, :count].clone(), {index: tap[:, :count].clone() for index, tap in collected.items()}

    def _capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        """``forward`` as something that replays it. A forward that cannot be captured is run as it is from now on."""
        if self.device.type != "cuda":
            return forward
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # libraries set themselves up in the first calls, which a graph may not hold
                for _ in range(2):
                    forward()
            torch.cuda.current_stream(self.device).wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Threads that read training data call CUDA, too, while tau is measured: only this one's calls matter.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                forward()
            return graph.replay
        except RuntimeError as error:
            self.broken = f"no CUDA graph could be captured: {str(error).splitlines()[0]}"
            logging.getLogger(__name__).warning("decoding goes on without graphs: %s", self.broken)
            return forward


def padded_rows_fit(rows: int, offset: int) -> bool:
    """Whether rows and uncommitted rows, both padded, stay within the captured counts."""
    return rows <= MOST_ROWS and offset + padded_rows(rows) <= MOST_ROWS


def same(hidden: torch.Tensor) -> torch.Tensor:
    """A prologue or epilogue that does nothing."""
    return hidden


def _nothing() -> None:
    raise AssertionError("replayed before it was captured")
