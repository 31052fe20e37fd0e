"""Write a trained MTP layer into a copy of its target's files, where engines read it.

Only files of weights that hold the layer are written anew. The others are hard links of the target's where the disk
allows it, else copies. Every other tensor stays as it was, bit for bit.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.common.files import replace_json
from drafters.common.fingerprints import same_weights
from drafters.heads.mtp.own import NAMES, kind_of, load_own, own_names, stored_names
from drafters.hub.checkpoint import load_checkpoint
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only, weight_map
from drafters.model.quantised import quantisation
from drafters.model.weights import INDEX, SINGLE, stored_tensors

NEW = "model-mtp.safetensors"  # file of the layer, if the target has none and is in several files
COUNTS = {"qwen": "mtp_num_hidden_layers", "mimo": "num_nextn_predict_layers", "deepseek": "num_nextn_predict_layers"}


def stitch(checkpoint: str, out: Path, target: str | None = None) -> list[str]:
    """Write the target with the layer of ``checkpoint`` into the new folder ``out``; return the files written anew.

    Args:
        target: folder of the target, if not the one that the checkpoint names.

    Raises:
        ValueError: no MTP layer, one of another target, a target that is no folder or is quantised, or one whose own
            layer is of another kind.
    """
    config, weights = load_checkpoint(checkpoint)
    if config["drafter_type"] != "mtp":
        raise ValueError(f"{checkpoint} holds a drafter of type {config['drafter_type']!r}, and only mtp is stitched")
    name = target or config["target"]["name"]
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name} is no folder; download the target (hf download {name}) and give --target FOLDER")
    told = load_config_only(name)
    if (method := quantisation(told)) is not None:
        raise ValueError(f"{name} is quantised ({method}), and the layer is not; give the target in bf16 or float16")
    trained, found = config["target"], load_frozen_ends(name, device="meta").fingerprint
    if not same_weights(trained["fingerprint"], found, f"an MTP layer trained for {trained['name']!r}"):
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']} (fingerprint {trained['fingerprint']}), and {name} has "
            f"the fingerprint {found}; give its own target: --target FOLDER"
        )
    kind, layers = config["drafter"]["kind"], told.num_hidden_layers
    names = tuple(NAMES[kind].values())  # ids of draft tokens and candidates stay in the checkpoint
    weights = {key: value for key, value in weights.items() if key.startswith(names)}
    stored = stored_tensors(name, None)
    if (theirs := kind_of(stored, layers)) not in (None, kind):
        raise ValueError(f"{checkpoint} is of kind {kind}, and the MTP layer of {name} of kind {theirs}")
    dtype = _dtype(stored[next(iter(stored))].dtype)
    tensors = {key: value.to(dtype) for key, value in stored_names(weights, kind, told).items()}
    places = {key: stored[key].file for key in own_names(stored, kind, layers)}
    if places and (others := sorted(tensors.keys() ^ places.keys())):
        raise ValueError(f"{name} and {checkpoint} differ in the layer's tensors, first in {others[0]}")
    single = SINGLE if not (folder / INDEX).is_file() else NEW
    files = {*places.values()} or {single}
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in {*files, INDEX, "config.json"}:
            _link(path, out / path.name)
    for file in sorted(files):
        part = {key: value for key, value in tensors.items() if places.get(key, single) == file}
        _rewrite(folder / file, out / file, part)
    if (folder / INDEX).is_file():
        _write_index(folder / INDEX, out, {} if places else tensors)
    _write_config(folder, out, COUNTS[kind])
    _check(out, found, {key: value.to(dtype) for key, value in weights.items()})
    return sorted(files)


def _check(out: Path, fingerprint: str, weights: dict[str, Tensor]) -> None:
    """Read the folder again: raise ValueError unless it holds this target and these weights of the layer."""
    if (read := load_frozen_ends(str(out), device="meta").fingerprint) != fingerprint:
        raise ValueError(f"{out} was written with the fingerprint {read}, not the target's {fingerprint}; delete it")
    _, layer = load_own(str(out))
    if wrong := [key for key in layer.keys() | weights.keys() if not _equal(layer.get(key), weights.get(key))]:
        raise ValueError(f"{out} was written with another {sorted(wrong)[0]} than the checkpoint's; delete it")


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _rewrite(before: Path, after: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of weights again, with these tensors in place of its own."""
    whole, metadata = {}, {"format": "pt"}
    if before.is_file():
        with safe_open(before, framework="pt") as opened:
            metadata = opened.metadata() or metadata
            whole = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no dict)
    save_file({key: value.contiguous() for key, value in (whole | tensors).items()}, after, metadata)


def _write_index(index: Path, out: Path, new: dict[str, Tensor]) -> None:
    """Write the index; ``new``: tensors of a file that the target did not have."""
    weight_map(index)
    whole = json.loads(index.read_text(encoding="utf-8"))
    whole["weight_map"] |= dict.fromkeys(new, NEW)
    if "total_size" in whole["metadata"]:
        whole["metadata"]["total_size"] += sum(value.numel() * value.element_size() for value in new.values())
    replace_json(out / INDEX, whole)


def _write_config(folder: Path, out: Path, count: str) -> None:
    """Write config.json, which says that there is one MTP layer."""
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    section = whole.get("text_config", whole)
    section[count] = section.get(count) or 1
    replace_json(out / "config.json", whole)


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path.resolve(), new)
    except OSError:  # another disk
        shutil.copyfile(path, new)


def _dtype(name: str) -> torch.dtype:
    """The dtype that a safetensors file calls ``name``."""
    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[name]
