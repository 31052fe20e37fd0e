"""Load a target's weights, after a check that they fit into memory, and merge a LoRA adapter that peft saved.

Only LoRA's numbers are read from an ``adapter_config.json``: peft's own class of it may name modules to import.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from drafters.common.paths import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, readable
from drafters.common.precision import warn_if_slow
from drafters.common.wording import dtype_name, shortened, size_text
from drafters.model.cache import SMALL, cache_bytes, config_shapes
from drafters.model.files import (
    free_memory,
    load_config_only,
    meta_model,
    not_loaded,
    quiet,
    resolve_device,
    resolve_dtype,
)
from drafters.model.fingerprint import of_model
from drafters.model.quantised import as_asked, quantisation, to_load
from drafters.model.weights import TEXT_NAMES, mtp_tensors, open_weights, quantised_bytes, refuse_differences

DeviceMap = str | dict[str, Any]
Model = TypeVar("Model", bound=nn.Module)
BASE = "base_model_name_or_path"
# Keys of adapter_config.json that change the weights LoRA adds, and keys that must be off.
TAKEN = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out")
OFF = (
    "bias",
    "modules_to_save",
    "use_dora",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "lora_bias",
)
MERGE = "merge it with peft, and give the folder of the merged model"


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of a model of this configuration."""
    return sum(weights.numel() for weights in meta_model(config).parameters()) * dtype.itemsize


def check_memory(
    what: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    devices: list[torch.device],
    batch: int,
    context: int,
    stored: int | None = None,
) -> None:
    """Raise ValueError if the weights, with a cache of ``batch`` sequences of ``context`` tokens, cannot fit.

    Args:
        what: the model, for the message.
        devices: all that the model may spread over.
        stored: bytes of weights that stay quantised.
    """
    weights = weight_bytes(config, dtype) if stored is None else stored
    cache = cache_bytes(config_shapes(config), batch, context, dtype)
    free = sum(free_memory(device) for device in devices)
    if weights + cache <= max(free, SMALL):
        return
    where = f"{devices[0]} has" if len(devices) == 1 else f"{len(devices)} devices have together"
    # What is quantised is loaded whole first, so that quantize would be no help here.
    if weights > free:
        needs = f"its weights need {size_text(weights)}" + (f" in {dtype_name(dtype)}" if stored is None else "")
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
) -> tuple[PreTrainedModel, str]:
    """Return a model from a local folder or a Hub repository (weights in safetensors; remote code is never run), and
    its fingerprint.

    A LoRA adapter is merged into the model that it names, in float32. The arguments are
    ``TargetModel.from_pretrained``'s.

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
        merged = merge_adapter(base, name, adapter, revision)
        fingerprint = of_model(merged)  # in float32, so that it is the same for every ``kind``
        return merged.to(kind), fingerprint
    config = to_load(str(name), config, where)
    check_memory(str(name), config, kind, devices, *cache_tokens, quantised_bytes(str(name), revision, config))
    weights = open_weights(str(name), revision, config)
    places = {"": str(where)} if device_map is None and quantisation(config) else device_map
    try:
        with quiet() if mtp_tensors(weights.stored) else nullcontext():  # transformers reports tensors that it drops
            model, info = AutoModelForCausalLM.from_pretrained(
                str(name),
                config=config,
                key_mapping=TEXT_NAMES if weights.multimodal else None,
                dtype=kind,
                revision=revision or "main",
                trust_remote_code=False,
                use_safetensors=True,
                device_map=places,
                output_loading_info=True,
            )
    except (OSError, KeyError, SafetensorError) as error:
        raise not_loaded(error, name, "model", "config.json and safetensors weights") from error
    info["unexpected_keys"] = set(info["unexpected_keys"]) & weights.stored.keys()  # not those of other modalities
    refuse_differences(str(name), config, info)  # of a quantised model, this is the first time that it is known
    as_asked(model, config, kind)
    if device_map is not None:
        _check_places(model, name, device_map)
    return model if places else model.to(where), weights.fingerprint()


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
        if not bare and not isinstance(error.__cause__, OSError):  # a damaged file, or no answer from the Hub
            raise
        adapter = adapter_config(name, revision)
        if adapter is None:
            raise
        return load_config_only(adapter[BASE], adapter.get("revision")), adapter
    return config, adapter_config(name, revision)  # beside a config.json, transformers loads the adapter itself


def layer_devices(model: Any, layers: nn.ModuleList) -> list[torch.device] | None:
    """Return each decoder layer's device; None if the whole model is on one device."""
    devices = [next(layer.parameters()).device for layer in layers]
    return devices if len({weights.device for weights in model.parameters()}) > 1 else None


def is_only_moved(module: nn.Module) -> bool:
    """Return True if a module has no hook of accelerate's, or one that only moves inputs to the weights' device."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,)) if hook is not None else ()
    return all(type(one).__name__ == "AlignDevicesHook" and not one.offload for one in hooks)


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module or one of its parts has hooks, beside those that only move inputs."""
    return any(part._forward_hooks or part._forward_pre_hooks or not is_only_moved(part) for part in module.modules())


def adapter_config(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """The adapter's configuration in a folder or Hub repository; None where there is no adapter.

    Raises:
        ValueError: it is damaged, or of another kind than LoRA.
    """
    path = _adapter_file(name, ADAPTER_CONFIG_FILE, revision)
    if path is None:
        return None
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        kind, base = config["peft_type"], config[BASE]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}); save the adapter again") from None
    if kind != "LORA":
        raise ValueError(f"{name} is an adapter of type {shortened(kind)}, and only LORA is merged; {MERGE}")
    if on := [key for key in OFF if config.get(key) not in (None, False, "none", [])]:
        raise ValueError(f"{name} is an adapter with {', '.join(on)}, and only plain LoRA is merged; {MERGE}")
    if not isinstance(base, str) or base in ("", name):
        raise ValueError(
            f"{path}: {BASE} is {shortened(base)}; set it to the folder or Hub repository of the model "
            "that the adapter is for"
        )
    return config


def merge_adapter(model: Model, name: str, config: dict[str, Any], revision: str | None) -> Model:
    """``model`` with the LoRA adapter ``name`` in its weights.

    Raises:
        ValueError: peft is not installed, no safetensors weights, or weights that are not the model's.
    """
    try:
        import peft
    except ImportError:
        raise ValueError(f"{name} is a LoRA adapter, and peft is not installed; pip install peft") from None
    path = _adapter_file(name, ADAPTER_WEIGHTS_FILE, revision)
    if path is None:
        raise ValueError(f"{name} has no {ADAPTER_WEIGHTS_FILE}; save the adapter again, as safetensors")
    options = {key: config[key] for key in TAKEN if config.get(key) is not None}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options))
    weights = load_file(path)
    wanted = peft.get_peft_model_state_dict(wrapped)
    shapes, known = ({key: value.shape for key, value in each.items()} for each in (weights, wanted))
    if differing := sorted(key for key in {*shapes, *known} if shapes.get(key) != known.get(key)):
        raise ValueError(
            f"{path} does not fit the base model {config[BASE]}: {len(differing)} weights are "
            f"missing, unknown or of another shape, for example {shortened(differing[0])}"
        )
    peft.set_peft_model_state_dict(wrapped, weights)
    merged: Model = merged_lora(wrapped)
    return merged


def merged_lora(wrapped: Any) -> Any:
    """Return peft's model with LoRA in its weights: computed in float64, so that all machines get the same weights."""
    for name, weights in wrapped.named_parameters():
        if "lora_" in name:
            weights.data = weights.data.double()
    return wrapped.merge_and_unload()


def _adapter_file(name: str, file: str, revision: str | None) -> Path | None:
    """One file's path, downloaded if it is on the Hub; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return readable(path) if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError, OSError):
        return None  # there is no adapter, or the loader of models says what is wrong
