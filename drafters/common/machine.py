"""What a figure was measured with: target, device, threads, libraries, commit."""

import platform
import resource
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from drafters.common.precision import cpu_instructions
from drafters.common.provenance import code_state, cpu_name, library_versions, load_average
from drafters.common.threads import cpu_cores, idle_threads
from drafters.common.wording import dtype_name

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

MEASURED_WITH = ("torch", "transformers", "numpy")


def environment(target: "TargetModel") -> dict[str, Any]:
    """``measured_on``, and the target; of one that was tuned with its drafter (``joint:``) also its origin."""
    tuned_from = getattr(target.config, "tuned_from", None)
    return {
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "parameters": target.parameters,
            **({"tuned_from": tuned_from} if tuned_from else {}),
        },
        "dtype": dtype_name(target.dtype),
        "engine": target.engine,
        "quantize": target.quantize,
    } | measured_on(target.device)


def measured_on(device: torch.device) -> dict[str, Any]:
    """``machine``, device, date and load: a high ``load_average`` shows that other work disturbed the timing."""
    return {
        "device": str(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": load_average(),
    } | machine(device)


def machine(device: torch.device) -> dict[str, Any]:
    """``hardware``, threads, libraries and commit."""
    commit, dirty = code_state()
    return {
        **hardware(device),
        "threads": idle_threads(),
        "platform": platform.platform(),
        "versions": library_versions(*MEASURED_WITH),
        "commit": commit,
        "dirty": dirty,
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor with its vector instructions, cores that this process may use, and GPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu_name(), "cpu_instructions": cpu_instructions(), "cpu_cores": cpu_cores(), "gpu": gpu}


def peak_memory_bytes(device: torch.device) -> dict[str, int | None]:
    """Peak memory of this process so far, on the host and on the device (None if the device is the host)."""
    unit = 1 if sys.platform == "darwin" else 1024
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "device": on_device}
