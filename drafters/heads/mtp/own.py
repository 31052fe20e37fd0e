"""The MTP layer in a target's own files: its tensors' names by kind, read into our module and written back.

transformers drops these tensors when it loads a target.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.heads.mtp.shape import Kind
from drafters.model.ends import read_tensors
from drafters.model.files import load_config_only
from drafters.model.weights import stored_tensors

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
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def kind_of(names: Iterable[str], layers: int) -> Kind | None:
    """Return the kind of the MTP layer among these tensors of a target of ``layers`` layers; None if there is none."""
    marks = {kind: next(name for name, ours in table.items() if ours == "fc.") for kind, table in NAMES.items()}
    known = {*names}
    return next((kind for kind, mark in marks.items() if mark.format(n=layers) + "weight" in known), None)


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
        ValueError: the files have none, several, or one that is quantised.
    """
    config = load_config_only(name, revision)
    layers, stored = config.num_hidden_layers, stored_tensors(name, revision)
    kind = kind_of(stored, layers)
    if kind is None:
        says = [key for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if getattr(config, key, 0)]
        lost = f"; its config.json says {says[0]}: the layer is missing from the files" if says else ""
        raise ValueError(
            f"{name} has no MTP layer{lost}; known are mtp.*, model.mtp_layers.* and model.layers.{layers}.eh_proj. "
            "Train one: train/mtp.py with start=random, or give checkpoint: a folder"
        )
    further = FURTHER[kind].format(m=layers + 1)
    if any(one.startswith(further) for one in stored):
        raise ValueError(
            f"{name} has several MTP layers ({further}*), and here a draft's steps share one; give another"
        )
    names = own_names(stored, kind, layers)
    if scales := sorted(one for one in names if one.endswith(("_scale", "_scale_inv", "_zeros", "qweight"))):
        raise ValueError(f"{name}: its MTP layer is quantised ({scales[0]}); give the target in bf16 for the drafter")
    tensors = {names[one]: value for one, value in read_tensors(name, revision, names.__contains__)}
    return kind, fused_experts(tensors)


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


def stored_names(weights: Mapping[str, Tensor], kind: Kind, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return our module's tensors under the names of the target's files; the inverse of ``load_own``."""
    back = {ours: name.format(n=config.num_hidden_layers) for name, ours in NAMES[kind].items()}
    written = {}
    for name, value in weights.items():
        begins = next(one for one in back if name.startswith(one))
        there = back[begins] + name.removeprefix(begins)
        if name.endswith(".experts.gate_up_proj"):
            for number, pair in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), pair.chunk(2), strict=True):
                    written[f"{there.removesuffix('gate_up_proj')}{number}.{part}.weight"] = half.contiguous()
        elif name.endswith(".experts.down_proj"):
            for number, half in enumerate(value):
                written[f"{there.removesuffix('down_proj')}{number}.down_proj.weight"] = half.contiguous()
        else:
            written[there] = value
    return written
