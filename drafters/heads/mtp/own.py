"""The MTP layers in a target's own files: their tensors' names by kind, read into our module and written back.

transformers drops these tensors when it loads a target.
"""

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.heads.mtp.module import MTPLayer
from drafters.heads.mtp.shape import Kind, MTPShape
from drafters.model.ends import read_tensors
from drafters.model.files import load_config_only
from drafters.model.loading import BASE, MERGE, config_and_adapter
from drafters.model.weights import SHOWN, open_weights, stored_tensors

# By kind: beginnings of the tensors' names and their names in our module. {k} is the number of the layer in the files,
# and {p} the place of the parts around it in our module, "" for the first layer's.
NAMES: dict[Kind, dict[str, str]] = {
    "qwen": {
        "mtp.pre_fc_norm_embedding.": "embed_norm.",
        "mtp.pre_fc_norm_hidden.": "hidden_norm.",
        "mtp.fc.": "fc.",
        "mtp.norm.": "norm.",
        "mtp.layers.{k}.": "layers.",
    },
    "mimo": {
        "model.mtp_layers.{k}.token_layernorm.": "{p}embed_norm.",
        "model.mtp_layers.{k}.hidden_layernorm.": "{p}hidden_norm.",
        "model.mtp_layers.{k}.input_proj.": "{p}fc.",
        "model.mtp_layers.{k}.final_layernorm.": "{p}norm.",
        "model.mtp_layers.{k}.": "layers.",
    },
    "deepseek": {
        "model.layers.{k}.enorm.": "{p}embed_norm.",
        "model.layers.{k}.hnorm.": "{p}hidden_norm.",
        "model.layers.{k}.eh_proj.": "{p}fc.",
        "model.layers.{k}.shared_head.norm.": "{p}norm.",
        "model.layers.{k}.": "layers.",
    },
}
# Copies of the target's embedding and LM head that files of DeepSeek's kind have beside a layer.
COPIES = ("model.layers.{k}.embed_tokens.weight", "model.layers.{k}.shared_head.head.weight")
# Families of DeepSeek's kind in which engines feed back the output after the norm; vLLM's GLM-4.5 does not.
NORMED = ("deepseek_v3",)
FLOATS = ("F32", "BF16", "F16")  # dtypes of weights that are not quantised
SCALES = ("_scale", "_scale_inv", "_scale_2", "scales")  # ends of names beside quantised weights
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def table(kind: Kind, count: int, layers: int) -> dict[str, str]:
    """Return the beginnings of the tensors' names of ``count`` MTP layers -> their names in our module.

    A layer's own tensors come after those of its parts. ``layers``: number of the target's layers.
    """
    first, names = layers if kind == "deepseek" else 0, {}
    for number in range(count):
        place = f"others.{number - 1}." if number else ""
        for there, ours in NAMES[kind].items():
            name = f"layers.{number}." if ours == "layers." else ours.format(p=place)
            names[there.format(k=first + number)] = name
    return names


def kind_of(names: Collection[str], layers: int) -> Kind | None:
    """Return the kind of the MTP layers among these tensors of a target of ``layers`` layers; None if there is none."""
    for kind in NAMES:
        marks = tuple(there for there, ours in table(kind, 1, layers).items() if ours != "layers.0.")
        if any(name.startswith(marks) for name in names):
            return kind
    return None


def count_of(names: Collection[str], kind: Kind, layers: int) -> int:
    """Return the number of MTP layers of this kind among the tensors of a target of ``layers`` layers."""
    count = 0
    while any(name.startswith([*table(kind, count + 1, layers)][-1]) for name in names):
        count += 1
    return max(count, 1)


def own_keys(names: Collection[str], config: PretrainedConfig) -> dict[str, Any]:
    """Return keys of the shape of the MTP layers whose tensors are among the target's ``names``; {} without any."""
    layers = config.num_hidden_layers
    if (kind := kind_of(names, layers)) is None:
        return {}
    keys = {"kind": kind, "layers": count_of(names, kind, layers)}
    return keys | ({"feeds_back_normed": True} if config.model_type in NORMED else {})


def own_names(names: Collection[str], kind: Kind, layers: int) -> dict[str, str]:
    """Return the MTP layers' tensors among the target's ``names``: name there -> name in our module."""
    count = count_of(names, kind, layers)
    begins, copies = table(kind, count, layers), {*copies_of(layers, count)}
    named = {}
    for name in names:
        begin = next((one for one in begins if name.startswith(one)), None)
        if begin is not None and name not in copies:
            named[name] = begins[begin] + name.removeprefix(begin)
    return named


def copies_of(layers: int, count: int) -> dict[str, int]:
    """Return the names of the copies beside ``count`` layers: 0 for one of the embedding, 1 for one of the LM head."""
    return {name.format(k=layers + number): end for number in range(count) for end, name in enumerate(COPIES)}


def load_own(name: str, revision: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the MTP layers of a target's files: keys of their shape, and the tensors of our module in the files' dtype.

    Raises:
        ValueError: as ``find_own``.
    """
    keys, names = find_own(name, revision)
    _compare_copies(name, revision)
    tensors = {names[one]: value for one, value in read_tensors(name, revision, names.__contains__)}
    return keys, fused_experts(tensors)


def _compare_copies(name: str, revision: str | None) -> None:
    """Warn if an embedding or LM head beside an MTP layer differs from the target's, which drafters read."""
    weights = open_weights(name, revision, load_config_only(name, revision))
    layers = weights.config.num_hidden_layers
    for copy, end in copies_of(layers, count_of(weights.stored, "deepseek", layers)).items():
        if copy in weights.stored and not torch.equal(weights.read(copy), weights.read(weights.ends[end])):
            warnings.warn(
                f"{name}: {copy} differs from {weights.ends[end]}. The MTP layer drafts and trains with the latter; "
                "expect fewer accepted tokens than in an engine that reads the former",
                stacklevel=3,
            )


def find_own(name: str, revision: str | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``own_keys`` of the MTP layers in a target's files, and their tensors: name there -> name in our module.

    Raises:
        ValueError: the files have none, one that is quantised, or one with other tensors than the target's family has.
    """
    config, adapter = config_and_adapter(name, revision)
    if adapter is not None:
        raise ValueError(f"{name} is a LoRA adapter of {adapter[BASE]}, which may have an MTP layer; {MERGE}")
    layers, stored = config.num_hidden_layers, stored_tensors(name, revision)
    keys = own_keys(stored, config)
    if not keys:
        known = f"known are mtp.*, model.mtp_layers.* and model.layers.{layers}.eh_proj"
        if other := sorted(one for one in stored if "mtp" in one or one.startswith(f"model.layers.{layers}.")):
            raise ValueError(
                f"{name}: its MTP layer is of no known kind ({other[0]}), so the order of its inputs is unknown; "
                f"{known}. Train a layer: train/mtp.py with start=regression"
            )
        says = [key for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if getattr(config, key, 0)]
        lost = f"; its config.json says {says[0]}: the layer is missing from the files" if says else ""
        raise ValueError(
            f"{name} has no MTP layer{lost}; {known}. "
            "Train one: train/mtp.py with start=regression, or give checkpoint: a folder"
        )
    names = own_names(stored, keys["kind"], layers)
    if packed := sorted(one for one in names if stored[one].dtype not in FLOATS or one.endswith(SCALES)):
        raise ValueError(f"{name}: its MTP layer is quantised ({packed[0]}); give the target in bf16 for the drafter")
    others = [one for one in stored if one.startswith("mtp.")] if keys["kind"] == "qwen" else []
    _check_tensors(name, {one: stored[one].shape for one in [*names, *others]}, MTPShape(**keys), config)
    return keys, names


def _check_tensors(name: str, found: Mapping[str, tuple[int, ...]], shape: MTPShape, config: PretrainedConfig) -> None:
    """Raise ValueError unless the tensors of the MTP layers in the files of ``name`` are those of the family's."""
    with torch.device("meta"):
        module = MTPLayer(config, shape)
    wanted = stored_names(module.state_dict(), shape.kind, config, joined_experts(found))
    differences = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "of another shape": {
            f"{key} {list(found[key])}, not {list(value.shape)}"
            for key, value in wanted.items()
            if found.get(key, value.shape) != value.shape
        },
    }
    if wrong := [f"{what}: {', '.join(sorted(keys)[:SHOWN])}" for what, keys in differences.items() if keys]:
        raise ValueError(
            f"{name}: the tensors of its MTP layer are not those of a layer of {config.model_type}: "
            f"{'; '.join(wrong)}. Download it again, or train a layer: train/mtp.py with start=regression"
        )


def layers_of(names: Iterable[str]) -> int:
    """Return the number of layers that our module's tensors belong to."""
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith("layers."))


def joined_experts(names: Iterable[str]) -> bool:
    """Whether the files have the matrices of all experts of a layer in one tensor."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def fused_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the matrices of single experts as transformers 5 has them: ``gate_up_proj [E, 2 I, H]``, ``down_proj [E, H,
    I]``."""
    single: dict[str, dict[tuple[str, int], Tensor]] = {}
    fused = {}
    for name, value in weights.items():
        if (match := _EXPERT.match(name)) is None:
            fused[name] = value
        else:
            single.setdefault(match[1], {})[match[3], int(match[2])] = value
    for prefix, parts in single.items():
        count = 1 + max(number for _, number in parts)
        gate, up, down = ([parts[part, e] for e in range(count)] for part in ("gate_proj", "up_proj", "down_proj"))
        fused[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        fused[f"{prefix}down_proj"] = torch.stack(down)
    return fused


def stored_names(
    weights: Mapping[str, Tensor], kind: Kind, config: PretrainedConfig, joined: bool = False
) -> dict[str, Tensor]:
    """Return our module's tensors under the names of the target's files; the inverse of ``load_own``.

    ``joined``: leave the matrices of all experts in one tensor.
    """
    back = {ours: there for there, ours in table(kind, layers_of(weights), config.num_hidden_layers).items()}
    written = {}
    for name, value in weights.items():
        begins = next(one for one in back if name.startswith(one))
        there = back[begins] + name.removeprefix(begins)
        if joined:
            written[there] = value
        elif name.endswith(".experts.gate_up_proj"):
            for number, pair in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), pair.chunk(2), strict=True):
                    written[f"{there.removesuffix('gate_up_proj')}{number}.{part}.weight"] = half.contiguous()
        elif name.endswith(".experts.down_proj"):
            for number, half in enumerate(value):
                written[f"{there.removesuffix('down_proj')}{number}.down_proj.weight"] = half.contiguous()
        else:
            written[there] = value
    return written
