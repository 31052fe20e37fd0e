"""Quantised checkpoints: whether they can be loaded here, and in which form their weights stay in memory.

transformers loads them. What it lacks is said here, in one line and before weights are read.
"""

import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.quantizers import AutoHfQuantizer

from drafters.common.wording import first_line
from drafters.model.files import quiet

# transformers asks for the two of GPTQ one after the other, and names a GPU where only a package is missing.
PACKAGES = {
    "awq": ("gptqmodel",),
    "gptq": ("optimum", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
}
WITH_KERNELS = ("fp8", "mxfp8", "mxfp4")  # transformers multiplies them on a GPU, by kernels of the package "kernels"


def quantisation(config: PretrainedConfig) -> str | None:
    """The method that a checkpoint is quantised with ("awq", "fp8"); None: it is not."""
    method = options(config).get("quant_method", "unknown") if getattr(config, "quantization_config", None) else None
    return None if method is None else str(getattr(method, "value", method))


def options(config: PretrainedConfig) -> dict[str, Any]:
    """``quantization_config``, which transformers keeps as a mapping or as an object of its own."""
    value = config.quantization_config
    return dict(value if isinstance(value, dict) else value.to_dict())


def to_load(name: str, config: PretrainedConfig, device: torch.device) -> PretrainedConfig:
    """Return the configuration to load a checkpoint with: a quantised one says whether it stays so.

    FP8 and MXFP4 become plain weights on a CPU and without the package kernels. So do weights of compressed-tensors
    whose activations are not quantised: it would unpack them anyway.

    Raises:
        ValueError: its package or its device is missing.
    """
    if (method := quantisation(config)) is None:
        return config
    settings = options(config)
    plain = method in WITH_KERNELS and (device.type == "cpu" or find_spec("kernels") is None)
    if method == "compressed-tensors":
        groups = (settings.get("config_groups") or {}).values()
        plain = not any(isinstance(group, dict) and group.get("input_activations") for group in groups)
    config = copy.deepcopy(config)
    config.quantization_config = settings | ({"dequantize": True} if plain else {})
    _check(name, method, config.quantization_config, device)
    return config


def _check(name: str, method: str, settings: dict[str, Any], device: torch.device) -> None:
    """Raise ValueError where transformers cannot load a checkpoint that is quantised so."""
    instead = "or give the model that it was made from"
    if missing := [package for package in PACKAGES.get(method, ()) if find_spec(package) is None]:
        packages = " ".join(missing).replace("_", "-")
        raise ValueError(f"{name} is quantised ({method}), and that needs a package: pip install {packages}; {instead}")
    try:
        with quiet():
            quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
            quantizer.validate_environment(device_map={"": str(device)}, weights_only=True)
    except (ImportError, RuntimeError, ValueError) as error:
        said = first_line(error).rstrip(".")
        if isinstance(error, ModuleNotFoundError) and error.name:
            said = f"that needs {error.name}: pip install {error.name}"
        raise ValueError(f"{name} is quantised ({method}) and cannot be loaded here: {said}; {instead}") from None


def as_asked(model: nn.Module, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Bring weights that transformers has turned into bf16 to ``dtype``, in place; float32 ones stay."""
    if quantisation(config) is None or not options(config).get("dequantize"):
        return
    for weights in model.parameters():
        if weights.dtype == torch.bfloat16:
            weights.data = weights.data.to(dtype)


@torch.no_grad()
def unpack(model: Any) -> None:
    """Run one token through a quantised model: compressed-tensors unpacks its weights in the first forward."""
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device))
