"""Loading a target's weights: how much memory they will need is known before they are read."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..wording import dtype_name, size_text
from .adapter import BASE, adapter_config, merge_adapter
from .files import free_memory, load_config_only, not_loaded, refuse_integers, resolve_device, resolve_dtype, weight_map
from .kv_cache import SMALL, cache_bytes
from .precision import warn_if_slow

DeviceMap = str | dict[str, Any]


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this configuration without contents, for the shapes of its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return model


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
) -> PreTrainedModel:
    """A model from a local folder or a Hub repository (weights in safetensors; remote code is never run).

    A LoRA adapter is merged into the model that it names, in float32.

    Args:
        device_map: how accelerate spreads the layers over several GPUs ("auto", or module -> device); in place of
            ``device``.
        cache_tokens: rows of a batch, and tokens of each, that the memory has to suffice for, too.

    Raises:
        ValueError: nothing loadable there, no such device, too little memory (found before the weights are read),
            weights that are no floating point, an index that names other files than weights beside it, or a device map
            that leaves layers off the GPUs.
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
        base = load_model(adapter[BASE], torch.float32, device, adapter.get("revision"), device_map, cache_tokens)
        return merge_adapter(base, name, adapter, revision).to(kind)
    check_memory(str(name), config, kind, devices, *cache_tokens)
    check_index(name, revision)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(name),
            dtype=kind,
            revision=revision or "main",
            trust_remote_code=False,
            attn_implementation="sdpa",
            use_safetensors=True,
            device_map=device_map,
        )
    except (OSError, KeyError, SafetensorError) as error:
        raise not_loaded(error, name, "model", "config.json and safetensors weights") from error
    check_floating(name, revision, config)
    if device_map is None:
        return model.to(where)  # type: ignore[arg-type]
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if places & {"cpu", "disk"} and len(places) > 1:
        raise ValueError(
            f"device_map {device_map!r} leaves layers of {name} on {', '.join(sorted(places & {'cpu', 'disk'}))}, from "
            "where every step would fetch them; use more GPUs, a smaller dtype, or a map that names GPUs alone"
        )
    return model


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


def check_index(name: str, revision: str | None) -> None:
    """Raise ValueError if the model's index of weights names anything but safetensors files beside it."""
    folder = Path(name)
    if folder.is_dir():
        for index in folder.glob("*.safetensors.index.json"):
            weight_map(index)
        return
    with contextlib.suppress(OSError, HfHubHTTPError, HTTPError):  # there is none, or the loader says what is wrong
        weight_map(Path(hf_hub_download(name, "model.safetensors.index.json", revision=revision)))


def check_floating(name: str, revision: str | None, config: PretrainedConfig) -> None:
    """Raise ValueError if weights on the disk are whole numbers, which transformers casts without a word."""
    if getattr(config, "quantization_config", None):  # it says how to read them
        return
    folder = Path(name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):  # nothing is known of where it was downloaded to
            return
        folder = Path(cached).parent
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key.endswith((".weight", ".bias")):  # a buffer may hold positions
                    refuse_integers(path, key, file.get_slice(key).get_dtype())


def layer_devices(model: Any) -> list[torch.device] | None:
    """Where each decoder layer lies; None where the whole model lies together."""
    found = [layer.self_attn.o_proj.weight.device for layer in model.model.layers]
    return found if len({weights.device for weights in model.parameters()}) > 1 else None


def is_only_moved(module: nn.Module) -> bool:
    """Whether accelerate's hook on a module, if any, does no more than move its inputs to where its weights are."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,)) if hook is not None else ()
    return all(type(one).__name__ == "AlignDevicesHook" and not one.offload for one in hooks)
