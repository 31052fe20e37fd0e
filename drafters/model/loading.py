"""Loading a target's weights: how much memory they will need is known before they are read."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from drafters.common.precision import warn_if_slow
from drafters.common.wording import dtype_name, size_text
from drafters.model.adapter import BASE, adapter_config, merge_adapter
from drafters.model.cache import SMALL, cache_bytes
from drafters.model.files import free_memory, load_config_only, meta_model, not_loaded, resolve_device, resolve_dtype
from drafters.model.weights import open_weights, refuse_differences

DeviceMap = str | dict[str, Any]


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of a model of this configuration."""
    return sum(weights.numel() for weights in meta_model(config).parameters()) * dtype.itemsize


def check_memory(
    what: str, config: PretrainedConfig, dtype: torch.dtype, devices: list[torch.device], batch: int, context: int
) -> None:
    """Raise ValueError if the weights, with a cache of ``batch`` rows of ``context`` tokens, cannot fit.

    Args:
        what: the model, for the message.
        devices: all that the model may spread over.
    """
    weights, cache = weight_bytes(config, dtype), cache_bytes(config, batch, context, dtype)
    free = sum(free_memory(device) for device in devices)
    if weights + cache <= max(free, SMALL):
        return
    where = f"{devices[0]} has" if len(devices) == 1 else f"{len(devices)} devices have together"
    # What is quantised is loaded whole first, so that quantize would be no help here.
    if weights > free:
        needs = f"its weights need {size_text(weights)} in {dtype_name(dtype)}"
        fix = "use a smaller model or dtype, or several GPUs with device_map='auto'"
    else:
        needs = (
            f"its weights ({size_text(weights)}) and a cache of {batch} x {context} tokens ({size_text(cache)}) "
            f"need {size_text(weights + cache)}"
        )
        fix = "lower max_new_tokens, the length of the prompts or how many are decoded at once"
    raise ValueError(f"{what} does not fit: {needs}, and {where} {size_text(free)} free; {fix}")


def load_model(
    name: str,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    revision: str | None,
    device_map: DeviceMap | None,
    cache_tokens: tuple[int, int],
) -> tuple[PreTrainedModel, str | None]:
    """A model from a local folder or a Hub repository (weights in safetensors; remote code is never run).

    A LoRA adapter is merged into the model that it names, in float32.

    Returns:
        the model, and the fingerprint of its files; None where it must be taken from the model itself.

    Args:
        device_map: how accelerate spreads the layers over several GPUs ("auto", or module -> device); in place of
            ``device``.
        cache_tokens: rows of a batch, and tokens of each, that the memory has to suffice for, too.

    Raises:
        ValueError: nothing loadable there, no such device, too little memory or other tensors than the configuration
            describes (both found before the weights are read; see ``open_weights``), or a device map that leaves
            layers off the GPUs.
    """
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    warn_if_slow(kind, where)
    if device_map is not None and device is not None:
        raise ValueError(f"device {str(device)!r} and device_map {device_map!r} are both given; leave one out")
    devices = [where]
    if device_map is not None and torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    config, adapter = config_and_adapter(name, revision)
    if adapter is not None:
        base, _ = load_model(adapter[BASE], torch.float32, device, adapter.get("revision"), device_map, cache_tokens)
        return merge_adapter(base, name, adapter, revision).to(kind), None
    check_memory(str(name), config, kind, devices, *cache_tokens)
    weights = open_weights(str(name), revision, config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(name),
            dtype=kind,
            revision=revision or "main",
            trust_remote_code=False,
            attn_implementation="sdpa",
            use_safetensors=True,
            device_map=device_map,
            output_loading_info=True,
        )
    except (OSError, KeyError, SafetensorError) as error:
        raise not_loaded(error, name, "model", "config.json and safetensors weights") from error
    refuse_differences(str(name), config, info)  # of a quantised model, this is the first time that it is known
    if device_map is None:
        return model.to(where), weights.fingerprint()
    _check_places(model, name, device_map)
    return model, weights.fingerprint()


def _check_places(model: PreTrainedModel, name: str, device_map: DeviceMap) -> None:
    """Raise ValueError where a device map leaves some of the layers, not all, off the GPUs."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if places & {"cpu", "disk"} and len(places) > 1:
        raise ValueError(
            f"device_map {device_map!r} leaves layers of {name} on {', '.join(sorted(places & {'cpu', 'disk'}))}, from "
            "where every step would fetch them; use more GPUs, a smaller dtype, or a map that names GPUs alone"
        )


def config_and_adapter(name: str, revision: str | None = None) -> tuple[PretrainedConfig, dict[str, Any] | None]:
    """A model's configuration; of an adapter its base model's, and its own.

    Raises:
        ValueError: neither is there, or one that cannot be used.
    """
    try:
        config = load_config_only(name, revision)
    except ValueError as error:
        bare = Path(name).is_dir() and not (Path(name) / "config.json").is_file()
        if not bare and not isinstance(error.__cause__, OSError):  # it is there and no good, or nobody answers
            raise
        adapter = adapter_config(name, revision)
        if adapter is None:
            raise
        return load_config_only(adapter[BASE], adapter.get("revision")), adapter
    return config, adapter_config(name, revision)  # beside a config.json, transformers would load it by itself


def layer_devices(model: Any) -> list[torch.device] | None:
    """Where each decoder layer lies; None where the whole model lies together."""
    found = [next(layer.parameters()).device for layer in model.model.layers]
    return found if len({weights.device for weights in model.parameters()}) > 1 else None


def is_only_moved(module: nn.Module) -> bool:
    """Whether accelerate's hook on a module, if any, does no more than move its inputs to where its weights are."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,)) if hook is not None else ()
    return all(type(one).__name__ == "AlignDevicesHook" and not one.offload for one in hooks)
