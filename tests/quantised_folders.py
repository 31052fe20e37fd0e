"""Tiny models as quantised ones are published: each function rewrites a saved model's folder by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # inputs that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight outputs in a 32-bit word
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SYMMETRIC = {"symmetric": True, "dynamic": False, "observer": "minmax"}


def rewrite(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor] | None], **quantization: Any) -> None:
    """Replace the tensors for which ``change`` gives others, and write ``quantization_config``."""
    found: dict[str, Tensor] = {}
    for key, value in load_file(folder / "model.safetensors").items():
        found |= change(key, value) or {key: value}
    save_file({key: value.contiguous() for key, value in found.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def fp8(folder: Path) -> None:
    """Projections in FP8, a scale for each block of 128 x 128: DeepSeek-V3, Qwen3-FP8."""

    def change(key: str, value: Tensor) -> dict[str, Tensor] | None:
        if "proj" not in key:
            return None
        rows, columns = value.shape
        blocks = (
            F.pad(value.float(), (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        )
        scale = blocks.abs().amax((1, 3)) / 448  # [blocks of rows, blocks of columns]
        each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        return {key: (value / each).to(torch.float8_e4m3fn), f"{key}_scale_inv": scale}

    rewrite(folder, change, quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")


def mxfp4(folder: Path) -> None:
    """Experts in MXFP4: GPT-OSS."""

    def change(key: str, value: Tensor) -> dict[str, Tensor] | None:
        if not key.endswith(("gate_up_proj", "down_proj")):
            return None
        rows = value.float().transpose(1, 2)
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        code = ((blocks / 2 ** exponent[..., None])[..., None] - table).abs().argmin(-1).to(torch.uint8)
        packed = code[..., 0::2] | (code[..., 1::2] << 4)
        return {f"{key}_blocks": packed, f"{key}_scales": (exponent + 127).to(torch.uint8)}

    rewrite(folder, change, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])


def compressed_fp8(folder: Path) -> None:
    """FP8-dynamic of llm-compressor: a scale for each output, activations quantised by token."""

    def change(key: str, value: Tensor) -> dict[str, Tensor] | None:
        if "proj" not in key:
            return None
        scale = value.float().abs().amax(1, keepdim=True) / 448
        return {key: (value / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}

    weights = SYMMETRIC | {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}
    _compressed(folder, change, "float-quantized", weights, inputs)


def compressed_w4a16(folder: Path) -> None:
    """W4A16 of llm-compressor."""

    def change(key: str, value: Tensor) -> dict[str, Tensor] | None:
        if "proj" not in key:
            return None
        code, scale = _four_bits(value)
        packed, shape = _packed(code, tuple(range(8))), torch.tensor(value.shape)
        return {f"{key}_packed": packed, f"{key}_scale": scale, f"{key}_shape": shape}

    weights = SYMMETRIC | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    _compressed(folder, change, "pack-quantized", weights, None)


def gptq(folder: Path) -> None:
    """GPTQ, symmetric."""

    def change(key: str, value: Tensor) -> dict[str, Tensor] | None:
        if "proj" not in key:
            return None
        code, scale = _four_bits(value)
        name, inputs = key.removesuffix(".weight"), torch.arange(value.shape[1])
        zeros = _packed(torch.full(scale.T.shape, 7), tuple(range(8)))  # stored less one
        found = {"qweight": _packed(code, tuple(range(8))).T, "qzeros": zeros, "scales": scale.T.half()}
        return {f"{name}.{kind}": part for kind, part in found.items()} | {f"{name}.g_idx": (inputs // GROUP).int()}

    options = {"desc_act": False, "sym": True, "true_sequential": True, "checkpoint_format": "gptq"}
    rewrite(folder, change, quant_method="gptq", bits=4, group_size=GROUP, **options)


def awq(folder: Path) -> None:
    """AWQ, in the layout "gemm"."""

    def change(key: str, value: Tensor) -> dict[str, Tensor] | None:
        if "proj" not in key:
            return None
        code, scale = _four_bits(value)
        zeros = _packed(torch.full(scale.T.shape, 8), AWQ_ORDER)
        found = {"qweight": _packed(code.T, AWQ_ORDER), "qzeros": zeros, "scales": scale.T.half()}
        return {f"{key.removesuffix('.weight')}.{kind}": part for kind, part in found.items()}

    rewrite(folder, change, quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")


def bitsandbytes(folder: Path) -> None:
    """Only the configuration; the package packs the weights itself."""
    rewrite(folder, lambda key, value: None, quant_method="bitsandbytes", load_in_4bit=True)


def _compressed(folder: Path, change: Any, kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    options = {"format": kind, "quantization_status": "compressed", "ignore": ["lm_head"]}
    rewrite(folder, change, quant_method="compressed-tensors", config_groups={"group_0": group}, **options)


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` from 0 to 15 with 8 as zero, and scales ``[out, in / GROUP]``."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 7
    return ((groups / scale[..., None]).round().clamp(-8, 7) + 8).flatten(1).to(torch.int32), scale


def _packed(code: Tensor, order: tuple[int, ...]) -> Tensor:
    """Eight columns' codes in each int32."""
    words = sum(code[:, place::8].long() << (4 * shift) for shift, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
