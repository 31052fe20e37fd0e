"""The MTP layer in a target's own files: its tensors' names by kind, read into our module and written back.

transformers drops these tensors when it loads a target.
"""

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.heads.mtp.module import MTPLayer
from drafters.heads.mtp.shape import Kind, MTPShape
from drafters.model.ends import read_tensors
from drafters.model.files import load_config_only
from drafters.model.loading import BASE, MERGE, config_and_adapter
from drafters.model.weights import SHOWN, stored_tensors

# By kind: beginnings of the tensors' names, with {n} for the target's number of layers, and their names in our module.
NAMES: dict[Kind, dict[str, str]] = {
    "qwen": {
        "mtp.pre_fc_norm_embedding.": "embed_norm.",
        "mtp.pre_fc_norm_hidden.": "hidden_norm.",
        "mtp.fc.": "fc.",
        "mtp.norm.": "norm.",
        "mtp.layers.0.": "layers.0.",
    },
    "mimo": {
        "model.mtp_layers.0.token_layernorm.": "embed_norm.",
        "model.mtp_layers.0.hidden_layernorm.": "hidden_norm.",
        "model.mtp_layers.0.input_proj.": "fc.",
        "model.mtp_layers.0.final_layernorm.": "norm.",
        "model.mtp_layers.0.": "layers.0.",
    },
    "deepseek": {
        "model.layers.{n}.enorm.": "embed_norm.",
        "model.layers.{n}.hnorm.": "hidden_norm.",
        "model.layers.{n}.eh_proj.": "fc.",
        "model.layers.{n}.shared_head.norm.": "norm.",
        "model.layers.{n}.": "layers.0.",
    },
}
# Copies of the target's embedding and LM head that files of DeepSeek's kind have beside the layer.
COPIES = ("model.layers.{n}.embed_tokens.weight", "model.layers.{n}.shared_head.head.weight")
FURTHER = {"qwen": "mtp.layers.1.", "mimo": "model.mtp_layers.1.", "deepseek": "model.layers.{m}."}
FLOATS = ("F32", "BF16", "F16")  # dtypes of weights that are not quantised
SCALES = ("_scale", "_scale_inv", "_scale_2", "scales")  # ends of names beside quantised weights
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def kind_of(names: Collection[str], layers: int) -> Kind | None:
    """Return the kind of the MTP layer among these tensors of a target of ``layers`` layers; None if there is none."""
    for kind, table in NAMES.items():
        marks = tuple(name.format(n=layers) for name, ours in table.items() if ours != "layers.0.")
        if any(name.startswith(marks) for name in names):
            return kind
    return None


def own_kind(name: str) -> Kind | None:
    """Return the kind of the MTP layer in a target's files; None if there is none."""
    return kind_of(stored_tensors(name, None), load_config_only(name).num_hidden_layers)


def own_names(names: Iterable[str], kind: Kind, layers: int) -> dict[str, str]:
    """Return the MTP layer's tensors among the target's ``names``: name there -> name in our module."""
    table, copies = NAMES[kind], {copy.format(n=layers) for copy in COPIES}
    beginnings = sorted(table, key=len, reverse=True)  # a layer's own tensors come after its parts
    named = {}
    for name in names:
        begins = next((one for one in beginnings if name.startswith(one.format(n=layers))), None)
        if begins is not None and name not in copies:
            named[name] = table[begins] + name.removeprefix(begins.format(n=layers))
    return named


def load_own(name: str, revision: str | None = None) -> tuple[Kind, dict[str, Tensor]]:
    """Read the MTP layer of a target's files: its kind, and the tensors of our module in the files' dtype.

    Raises:
        ValueError: as ``find_own``.
    """
    kind, names = find_own(name, revision)
    tensors = {names[one]: value for one, value in read_tensors(name, revision, names.__contains__)}
    return kind, fused_experts(tensors)


def find_own(name: str, revision: str | None = None) -> tuple[Kind, dict[str, str]]:
    """Return the kind of the MTP layer in a target's files, and its tensors: name there -> name in our module.

    Raises:
        ValueError: the files have none, several, one that is quantised, or one with other tensors than the target's
            family has.
    """
    config, adapter = config_and_adapter(name, revision)
    if adapter is not None:
        raise ValueError(f"{name} is a LoRA adapter of {adapter[BASE]}, which may have an MTP layer; {MERGE}")
    layers, stored = config.num_hidden_layers, stored_tensors(name, revision)
    kind = kind_of(stored, layers)
    if kind is None:
        says = [key for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if getattr(config, key, 0)]
        lost = f"; its config.json says {says[0]}: the layer is missing from the files" if says else ""
        raise ValueError(
            f"{name} has no MTP layer{lost}; known are mtp.*, model.mtp_layers.* and model.layers.{layers}.eh_proj. "
            "Train one: train/mtp.py with start=regression, or give checkpoint: a folder"
        )
    further = FURTHER[kind].format(m=layers + 1)
    if any(one.startswith(further) for one in stored):
        raise ValueError(
            f"{name} has several MTP layers ({further}*), and here a draft's steps share one; give another"
        )
    names = own_names(stored, kind, layers)
    if packed := sorted(one for one in names if stored[one].dtype not in FLOATS or one.endswith(SCALES)):
        raise ValueError(f"{name}: its MTP layer is quantised ({packed[0]}); give the target in bf16 for the drafter")
    others = [one for one in stored if one.startswith("mtp.")] if kind == "qwen" else []
    _check_tensors(name, {one: stored[one].shape for one in [*names, *others]}, kind, config)
    return kind, names


def _check_tensors(name: str, found: Mapping[str, tuple[int, ...]], kind: Kind, config: PretrainedConfig) -> None:
    """Raise ValueError unless the tensors of the MTP layer in the files of ``name`` are those of the family's."""
    with torch.device("meta"):
        module = MTPLayer(config, MTPShape(kind=kind))
    wanted = stored_names(module.state_dict(), kind, config, joined_experts(found))
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
    back = {ours: name.format(n=config.num_hidden_layers) for name, ours in NAMES[kind].items()}
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
