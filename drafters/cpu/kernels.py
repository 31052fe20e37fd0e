"""Kernels for a CPU: attention of a few tokens, argmax, and products with weights in a layout of their own.

``drafters/model/backend.py`` calls them, for shapes where torch's kernels reach a fraction of the memory bandwidth.
The source is kernels.cpp and its headers. It is compiled for this machine on first use, which takes about ten seconds,
and cached in the user's cache folder. Without a compiler, or with DRAFTERS_CPU_KERNELS=0, torch's kernels are used. If
the variable names one of LEVELS, the kernels use no instructions beyond that level.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.common.paths import user_cache

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
SWITCH = "DRAFTERS_CPU_KERNELS"
# Instructions that products need at least (avx512), and two faster levels; for each the flags that rule out all beyond
# it. On a CPU without AVX-512 the library has attention and argmax only.
NO_MATRIX_UNIT = ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")
LEVELS = {"avx512": (*NO_MATRIX_UNIT, "-mno-avx512bf16"), "avx512_bf16": NO_MATRIX_UNIT, "amx": ()}
HEAD_DIMS = frozenset({16, 32, 64, 96, 128})
MOST_QUERIES = 16  # tokens times query heads of one key head; for more, torch's attention is faster
MOST_ROWS = 512  # of a bf16 product: for more, oneDNN is as fast (two cores, SmolLM2's layers, ours and oneDNN's: 128
# rows 32 and 55 ms, 256 rows 61 and 87, 512 rows 137 and 151, 1,024 rows 390 and 322)
SMALL = 1 << 18  # bytes; smaller tensors are not copied to huge pages
GROUP = 32  # inputs of a tile, and of a group in int4
OUTPUTS = 32  # of two tiles side by side
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_log = logging.getLogger(__name__)


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one type for a C structure."""
    return [(name, kind) for name in names.split()]


class FewRows:
    """Attention of a few new tokens over a cache, for heads of one size.

    The result for a sequence is the same to the last bit in any batch.

    Attributes:
        rows: most new tokens that it is for.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, ends: Tensor, scale: float
    ) -> Tensor:
        """Attend from each sequence's new tokens to its own slots.

        Args:
            queries: ``[B, R, heads, D]``. keys, values: ``[B, kv_heads, slots, D]``, the new tokens' included.
            bias: ``[B or 1, 1, R or a multiple, slots]``; the first R rows are added; None: each token sees all
                slots up to its own.
            ends: int64 ``[B]``, slots in use; the last R are the new tokens'.

        Returns:
            ``[B, R, heads, D]``.
        """
        batch, rows, heads, width = queries.shape
        kernel = getattr(library(), f"attend_{DTYPES[queries.dtype]}")
        assert queries.stride()[2:] == keys.stride()[2:] == (width, 1) and keys.stride() == values.stride()
        out = queries.new_empty(batch, rows, heads, width)
        arguments = _Attention(
            *(queries.data_ptr(), keys.data_ptr(), values.data_ptr(), None if bias is None else bias.data_ptr()),
            *(ends.data_ptr(), out.data_ptr(), batch, rows, keys.shape[1], heads // keys.shape[1]),
            *(*queries.stride()[:2], *keys.stride()[:2], *bias_strides(bias, queries.dtype), scale),
        )
        kernel(ctypes.byref(arguments), width, torch.get_num_threads())
        return out


def attention(weight: Tensor, head_dim: int, groups: int) -> FewRows | None:
    """Return attention for a projection ``weight`` with ``groups`` query heads to a key head; None: use torch's."""
    known = weight.device.type == "cpu" and weight.dtype in DTYPES and head_dim in HEAD_DIMS
    return FewRows(MOST_QUERIES // groups) if known and groups <= MOST_QUERIES and library() is not None else None


def bias_strides(bias: Tensor | None, dtype: torch.dtype) -> tuple[int, int]:
    """Return the distance, in values, from one sequence's bias to the next, and from one token's to the next."""
    if bias is None:
        return 0, 0
    assert bias.stride(3) == 1 and bias.dtype == dtype
    return bias.stride(0) if bias.shape[0] > 1 else 0, bias.stride(2)


class _Attention(ctypes.Structure):
    """``Attention`` of attention.h."""

    _fields_ = [
        *fields(ctypes.c_void_p, "queries keys values bias ends out"),
        *fields(ctypes.c_int64, "batch rows key_heads groups query_batch query_row"),
        *fields(ctypes.c_int64, "key_batch key_head bias_batch bias_row"),
        ("scale", ctypes.c_float),
    ]


class PackedProduct(ctypes.Structure):
    """``Product`` of products.h: tiles, and the bias of their product."""

    _fields_ = [*fields(ctypes.c_void_p, "tiles scales bias"), *fields(ctypes.c_int64, "inputs outputs bits")]


def most_likely(logits: Tensor) -> Tensor | None:
    """Return ``logits.argmax(-1)`` on a CPU, ``[..., V]`` -> ``[...]``; None: use torch's, ten times slower."""
    loaded = library() if logits.dtype in DTYPES and logits.shape[-1] else None
    if loaded is None:
        return None
    logits = logits.contiguous()
    tokens = logits.new_empty(logits.shape[:-1], dtype=torch.long)
    kernel = getattr(loaded, f"largest_{DTYPES[logits.dtype]}")
    kernel(logits.data_ptr(), tokens.numel(), logits.shape[-1], tokens.data_ptr(), torch.get_num_threads())
    return tokens


class _HugePages:
    """Memory in pages of 2 MB, handed out piece by piece; a block is freed with its last piece.

    A step that reads hundreds of megabytes spends a tenth of its time on page lookups with pages of 4 KB.
    """

    PAGE, BLOCK, ADVICE = 1 << 21, 1 << 25, 14  # bytes, bytes, MADV_HUGEPAGE

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy in huge pages."""
        with self._lock:
            size = -(-tensor.nbytes // 64) * 64
            if size > len(self._block):
                self._block = self._new(-(-max(size, self.BLOCK) // self.PAGE) * self.PAGE)
            piece, self._block = self._block[:size], self._block[size:]
        return piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _new(self, size: int) -> Tensor:
        whole = torch.empty(size + self.PAGE, dtype=torch.uint8)
        block = whole[-whole.data_ptr() % self.PAGE :][:size]
        advise = getattr(ctypes.CDLL(None), "madvise", None)
        if advise is not None:  # a request: if it is refused, pages are small
            advise(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(size), self.ADVICE)
        return block


_huge_pages = _HugePages()


def pack(values: Tensor, scales: Tensor | None = None, middles: Tensor | None = None) -> "Tiles | None":
    """Return the ``Tiles`` of a weight; None unless it is bf16 (or quantised from bf16) on a CPU with AVX-512."""
    dtype = values.dtype if scales is None else scales.dtype
    if values.device.type != "cpu" or dtype != torch.bfloat16 or values.shape[1] % GROUP:
        return None
    loaded = library()
    return Tiles(values, scales, middles) if loaded is not None and hasattr(loaded, "multiply") else None


class Tiles:
    """A weight ``[outputs, inputs]`` in the order in which the kernels read it, for products with bf16 rows.

    The product of a row does not depend on the other rows, except for the rounding of a single row.

    Args:
        values: bf16; int8, with scales ``[outputs]``; or uint8 below 16, with scales and middles
            ``[outputs, inputs / GROUP]`` for each group of inputs: ``(values - 8) * scales + middles``.

    Attributes:
        most_rows: rows up to which it is faster than torch's product with the unquantised weight.
    """

    def __init__(self, values: Tensor, scales: Tensor | None = None, middles: Tensor | None = None) -> None:
        self.outputs, self.inputs = values.shape
        self.bits = 8 * values.itemsize if middles is None else 4
        self.most_rows = MOST_ROWS if scales is None else 1 << 62
        tiles = _in_pairs(values, GROUP).unflatten(4, (16, 2)).transpose(3, 4).contiguous()
        self.scales: Tensor | None = None
        if middles is not None:
            assert scales is not None
            rows = tiles.view(*tiles.shape[:3], 8, 2, 32)
            packed = (rows[..., 0, :] | rows[..., 1, :] << 4).flatten(3)
            both = [_in_pairs(part.to(torch.bfloat16), 1).flatten(3).contiguous() for part in (scales, middles)]
            tiles = torch.cat([*(part.view(torch.uint8) for part in both), packed], dim=-1)
        elif scales is not None:
            self.scales = F.pad(scales.float(), (0, -len(scales) % OUTPUTS))
        self.tiles = tiles = _huge_pages.copy(tiles) if tiles.nbytes >= SMALL else tiles
        self._product = self.native()
        self.nbytes = tiles.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` in bf16, contiguous -> ``[rows, outputs]``."""
        assert x.shape[1] == self.inputs and x.dtype == torch.bfloat16 and x.is_contiguous()
        out = x.new_empty(x.shape[0], self.outputs)
        loaded = library()
        assert loaded is not None
        loaded.multiply(ctypes.byref(self._product), x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads())
        return out

    def put(self, outputs: Tensor, values: Tensor, scales: Tensor | None = None) -> None:
        """Replace some outputs by ``values [n, inputs]`` with their scales; not in 4 bits."""
        assert self.bits > 4
        rows = values.view(len(values), -1, GROUP // 2, 2)
        self.tiles[outputs // OUTPUTS, :, outputs // 16 % 2, :, outputs % 16] = rows
        if self.scales is not None and scales is not None:
            self.scales[outputs] = scales.float()

    def native(self, bias: Tensor | None = None) -> PackedProduct:
        """Return the C structure; tiles and bias must outlive it."""
        scales = None if self.scales is None else self.scales.data_ptr()
        added = None if bias is None else bias.data_ptr()
        return PackedProduct(self.tiles.data_ptr(), scales, added, self.inputs, self.outputs, self.bits)


def _in_pairs(values: Tensor, step: int) -> Tensor:
    """``[outputs, inputs]`` -> ``[pairs, steps, 2, 16, step]``: outputs in pairs of tiles, padded with zeros."""
    padded = F.pad(values, (0, 0, 0, -len(values) % OUTPUTS))
    return padded.view(-1, 2, 16, values.shape[1] // step, step).permute(0, 3, 1, 2, 4)


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, with a line in the log, if they cannot be compiled or loaded."""
    most = os.environ.get(SWITCH) or "amx"
    if most == "0":
        return None
    if most not in LEVELS:
        raise ValueError(
            f"{SWITCH} is {most!r}; set it to 0 for torch's kernels, to one of {', '.join(LEVELS)}, or not"
        )
    try:
        loaded = ctypes.CDLL(str(_compiled(LEVELS[most])))
        # The system may not let this process use the matrix unit.
        if hasattr(loaded, "multiply") and not loaded.products_allowed():
            loaded = ctypes.CDLL(str(_compiled(NO_MATRIX_UNIT)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning("decoding on this CPU runs on torch's kernels, more slowly: %s", error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for dtype in DTYPES.values():
        kernel = getattr(loaded, f"attend_{dtype}")
        kernel.argtypes, kernel.restype = [pointer, number, ctypes.c_int], None
        kernel = getattr(loaded, f"largest_{dtype}")
        kernel.argtypes, kernel.restype = [pointer, number, number, pointer, ctypes.c_int], None
    if hasattr(loaded, "multiply"):
        loaded.multiply.argtypes, loaded.multiply.restype = [pointer] * 3 + [number, ctypes.c_int], None
        loaded.layers.argtypes = [pointer, number, pointer, number, ctypes.c_int]
        loaded.layers.restype = None
        loaded.pass_over.argtypes, loaded.pass_over.restype = [pointer, pointer, ctypes.c_int], None
    return loaded


def _compiled(without: tuple[str, ...]) -> Path:
    """Return the shared library for this source, compiler, processor and torch; compile it unless it is cached.

    Args:
        without: flags that rule out instructions.

    Raises:
        ValueError: no compiler, no OpenMP library of torch's, or the compiler's error. OSError: no place for the file.
    """
    name = os.environ.get("CXX") or "g++"
    compiler = shutil.which(name)
    if compiler is None:
        raise ValueError(f"there is no compiler {name!r}; install g++, or set CXX")
    openmp = _openmp()
    flags = [*FLAGS, *_vector_flags(), *without]
    age = Path(compiler).stat()
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    contents = [source.read_bytes() for source in sources]
    identity = repr((contents, flags, compiler, age.st_size, age.st_mtime, _processor(), openmp))
    folder = user_cache()
    built = folder / f"cpu_kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        # Linked with the OpenMP that torch has loaded: the threads of a second one would compete for the cores.
        for words in (
            [*flags, "-fopenmp", "-fPIC", "-c", str(SOURCE), "-o", str(compiled)],
            ["-shared", str(compiled), openmp, "-Wl,-z,defs", "-lm", "-o", str(linked)],
        ):
            done = subprocess.run([compiler, *words], capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise ValueError(f"{compiler} cannot compile {SOURCE.name}: {done.stderr.strip()[-500:]}")
        linked.rename(built)  # atomic: another process may look for it
    _log.info("compiled %s in %.0f s", built, time.monotonic() - start)
    return built


def _vector_flags() -> tuple[str, ...]:
    """Return flags for x86's vector instructions; no AVX-512 if torch does not use it (ATEN_CPU_CAPABILITY=avx2)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return ("-mprefer-vector-width=512",) if wide else ("-mno-avx512f",)


def _openmp() -> str:
    """Return the path of the OpenMP library that torch has loaded into this process."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line and ".so" in line}
    paths = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp"))]
    torchs = str(Path(torch.__file__).resolve().parent)  # as in the maps, also where the environment is a link
    paths.sort(key=lambda path: (not path.startswith(torchs), path))  # other packages (sentencepiece) bring their own
    if not paths:
        raise ValueError("torch's OpenMP library, libgomp or libiomp5, was not found in this process")
    return paths[0]


def _processor() -> str:
    """Return what -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
