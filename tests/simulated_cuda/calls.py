"""Calls of torch's Python interface that the simulated device answers itself: those that name a device or leave it."""

from collections.abc import Callable
from typing import Any

import torch

from .device import CUDA, HOST, CudaTensor, SimulatedCuda, as_device, plain

Answer = Callable[[SimulatedCuda, Any, Any, dict[str, Any]], Any]
SPECIAL: dict[Any, Answer] = {}
_WITHOUT = torch._C.DisableTorchFunction


def _answers(*calls: Any) -> Callable[[Answer], Answer]:
    def keep(answer: Answer) -> Answer:
        SPECIAL.update(dict.fromkeys(calls, answer))
        return answer

    return keep


def _to(gpu: SimulatedCuda, value: torch.Tensor, device: Any, dtype: Any, non_blocking: bool, copy: bool) -> Any:
    wanted = value.device if device is None else as_device(device)
    if wanted.type not in ("cuda", "cpu"):
        return torch.Tensor.to(value, device=device, dtype=dtype, copy=copy)  # meta
    if wanted.type == value.device.type:
        if value.device.type == "cuda" and wanted.index not in (None, 0):
            raise RuntimeError("CUDA error: invalid device ordinal")
        gpu.own.placing = wanted
        return torch.ops.aten.to.dtype(value, value.dtype if dtype is None else dtype, non_blocking, copy)
    moved = gpu.move(value, CUDA if wanted.type == "cuda" else HOST, non_blocking)
    return moved if dtype is None or dtype == value.dtype else torch.ops.aten.to.dtype(moved, dtype)


@_answers(torch.Tensor.to)
def to(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``.to(device, dtype, ...)`` in its three forms."""
    value, *rest = args
    named = dict(kwargs)
    if "other" in named:
        rest = [named.pop("other"), *rest]
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
        named |= {"device": other.device, "dtype": other.dtype}
        names = ["non_blocking", "copy"]
    elif rest and isinstance(rest[0], torch.dtype):
        names = ["dtype", "non_blocking", "copy"]
    else:
        names = ["device", "dtype", "non_blocking", "copy"]
    named |= dict(zip(names, rest, strict=False))
    return _to(
        gpu,
        value,
        named.get("device"),
        named.get("dtype"),
        bool(named.get("non_blocking", False)),
        bool(named.get("copy", False)),
    )


@_answers(torch.Tensor.cpu)
def cpu(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``.cpu()``."""
    return _to(gpu, args[0], HOST, None, False, False)


@_answers(torch.tensor, torch.as_tensor, torch.asarray)
def tensor(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Made on the host, then copied: what torch does, too."""
    named, kwargs = kwargs.get("device"), {key: value for key, value in kwargs.items() if key != "device"}
    pinned = kwargs.pop("pin_memory", False)
    data = args[0] if args else kwargs["data"]
    if isinstance(data, CudaTensor):
        made = data if func is not torch.tensor else data.detach().clone()
        return _to(gpu, made, named, kwargs.get("dtype"), False, False)
    before, gpu.own.placing = gpu.own.placing, HOST
    try:
        made = func(*args, **kwargs)
    finally:
        gpu.own.placing = before
    if pinned:
        gpu.pin(made)
    if named is None or as_device(named).type != "cuda":
        return made if named is None else _to(gpu, made, named, None, False, False)
    wanted = made.requires_grad
    return gpu.move(made.detach(), CUDA, False).requires_grad_(wanted)


@_answers(torch.Tensor.pin_memory)
def pin_memory(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A copy in pinned memory, or what is there already."""
    if isinstance(args[0], CudaTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    given = args[0]
    if any(size > 1 and stride == 0 for size, stride in zip(given.shape, given.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to one location"
        )
    return given if gpu.is_pinned(given) else gpu.pin(given.clone())


@_answers(torch.Tensor.is_pinned)
def is_pinned(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """``.is_pinned()``."""
    return not isinstance(args[0], CudaTensor) and gpu.is_pinned(args[0])


@_answers(torch.Tensor.tolist)
def tolist(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One copy to the host for any size."""
    with _WITHOUT():
        if not isinstance(args[0], CudaTensor):
            return func(*args)
        gpu.wait("read", f"tolist, {list(args[0].shape)} {args[0].dtype}")
        gpu.streams.launch("tolist", [args[0]], [])
        return plain(args[0]).tolist()


@_answers(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__)
def numpy(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """NumPy knows host memory alone."""
    if isinstance(args[0], CudaTensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
    with _WITHOUT():
        return func(*args, **kwargs)


@_answers(torch.Tensor.__repr__)
def represent(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """For messages, which are not counted."""
    with _WITHOUT():
        return func(plain(args[0]) if isinstance(args[0], CudaTensor) else args[0])


@_answers(torch.Tensor.__deepcopy__)
def deep_copy(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A copy on the same device."""
    value, memo = args
    if not isinstance(value, CudaTensor):
        with _WITHOUT():
            return func(*args)
    if id(value) in memo:
        return memo[id(value)]
    made = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
    else:
        made.requires_grad_(value.requires_grad)
    memo[id(value)] = made
    return made


@_answers(torch.Tensor.__setitem__)
def set_item(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Numbers are written by the device, not copied to it."""
    before, gpu.own.filling = gpu.own.filling, True
    placing, gpu.own.placing = gpu.own.placing, args[0].device
    try:
        return func(*args)
    finally:
        gpu.own.filling, gpu.own.placing = before, placing


@_answers(torch.bmm)
def bmm(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With ``out_dtype``, which no CPU has."""
    wide = kwargs.pop("out_dtype", None)
    return torch.ops.aten.bmm(*args) if wide is None else torch.ops.aten.bmm(*(x.to(wide) for x in args))


@_answers(torch.histc)
def histc(gpu: SimulatedCuda, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of integers, too, which no CPU counts."""
    value, *rest = args
    rest += [kwargs[name] for name in ("bins", "min", "max") if name in kwargs]
    counted = torch.ops.aten.histc(value if value.is_floating_point() else value.float(), *rest)
    return counted.to(value.dtype)
