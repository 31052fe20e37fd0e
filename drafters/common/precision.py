"""The rule behind ``dtype: auto`` and ``precision: auto``: bf16 where the device has instructions for it."""

import logging
import platform
from functools import cache

import torch

from drafters.common.wording import dtype_name

AMPERE = (8, 0)  # CUDA's compute capability from which bf16 is multiplied in hardware


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of ``auto``: bf16 where ``device`` is fast at it, else float32 (CPU) or float16 (GPU)."""
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bf16() else torch.float32
    if device.type == "cuda" and torch.version.hip is None:
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= AMPERE else torch.float16
    return torch.float16 if device.type == "mps" else torch.bfloat16


def training_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of ``precision: auto``: as ``fast_dtype``, but on an x86 CPU bf16 only with AMX.

    The time of decoding is that of reading weights, and bf16 has half the bytes. The time of training is that of
    products of large matrices: with AVX-512 BF16 alone torch needs 1.3 to 1.9 times as long as in float32.
    """
    fast = fast_dtype(device)
    slower = device.type == "cpu" and _is_x86() and not torch.cpu._is_amx_tile_supported()
    return torch.float32 if slower else fast


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def cpu_has_bf16() -> bool:
    """True if this CPU has AVX-512 BF16, AMX or Arm's BF16 instructions, and torch uses them.

    Limits that the user sets (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA) count.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if not _is_x86():
        return True  # oneDNN's answer for Arm is about the instruction; for x86 it is yes for all AVX-512
    has_it = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_it and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def cpu_instructions() -> str:
    """The vector instructions that torch uses on this CPU: "AVX2", "AVX512 with BF16", "AVX512 with BF16 and AMX"."""
    level = torch.backends.cpu.get_cpu_capability()
    more = ["BF16"] * cpu_has_bf16() + ["AMX"] * (level.startswith("AVX512") and torch.cpu._is_amx_tile_supported())
    return f"{level} with {' and '.join(more)}" if more else level


@cache
def warn_if_slow(dtype: torch.dtype, device: torch.device) -> None:
    """Log one warning if ``dtype`` is bf16 and ``device`` has no instructions for it."""
    better = fast_dtype(device)
    if dtype == torch.bfloat16 and better != dtype:
        name = dtype_name(better)
        where = "this CPU" if device.type == "cpu" else device
        text = "bfloat16 has no fast instructions on %s; set dtype (or precision) to auto or %s"
        logging.getLogger(__name__).warning(text, where, name)
