"""Write trained MTP layers into a copy of its target's files, where engines read it.

Only files of weights that hold the layer are rewritten. The other weights are hard links of the target's where the
disk allows it; all else is copied, so that an edit there leaves the target alone. Every other tensor stays as it was,
bit for bit.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.files import replace_json, save_tensors
from drafters.common.fingerprints import same_weights
from drafters.heads.mtp.own import joined_experts, kind_of, layers_of, load_own, own_names, stored_names, table
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only, weight_map
from drafters.model.head_adapter import load_head
from drafters.model.quantised import quantisation
from drafters.model.weights import INDEX, SINGLE, Stored, stored_tensors

NEW = "model-mtp.safetensors"  # file of the layer, if the target has none and is in several files
COUNTS = {"qwen": "mtp_num_hidden_layers", "mimo": "num_nextn_predict_layers", "deepseek": "num_nextn_predict_layers"}


def stitch(checkpoint: str, out: Path, target: str | None = None) -> list[str]:
    """Write the target with the layer of ``checkpoint`` into the new folder ``out``; return the rewritten files.

    Args:
        checkpoint: the drafter, or a LoRA for one, which is merged.
        target: folder of the target, if not the one that the checkpoint names.

    Raises:
        ValueError: no MTP layer, one of another target, a target that is no folder or is quantised, or one whose own
            layer is of another kind.
    """
    config, weights = load_head(checkpoint)
    if config["drafter_type"] != "mtp":
        raise ValueError(f"{checkpoint} holds a drafter of type {config['drafter_type']!r}, and only mtp is stitched")
    name, kind = target or config["target"]["name"], config["drafter"]["kind"]
    target_config, fingerprint = _target(checkpoint, config["target"], name)
    folder, stored, layers = Path(name), stored_tensors(name, None), target_config.num_hidden_layers
    if (theirs := kind_of(stored, layers)) not in (None, kind):
        raise ValueError(f"{checkpoint} is of kind {kind}, and the MTP layer of {name} of kind {theirs}")
    own, usual = load_own(name)[1] if theirs else {}, _usual_dtype(stored)
    count = layers_of(weights)
    parts = tuple(table(kind, count, layers).values())  # ids of draft tokens and candidates stay in the checkpoint
    weights = {key: _as_before(value, own.get(key), usual) for key, value in weights.items() if key.startswith(parts)}
    places = {key: stored[key] for key in own_names(stored, kind, layers)}
    tensors = stored_names(weights, kind, target_config, joined_experts(places or stored))
    if places and (others := sorted(tensors.keys() ^ places.keys())):
        raise ValueError(f"{name} and {checkpoint} differ in the layer's tensors, first in {others[0]}")
    single = SINGLE if not (folder / INDEX).is_file() else NEW
    files = {place.file for place in places.values()} or {single}
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in {*files, INDEX, "config.json"}:
            (_link if path.suffix == ".safetensors" else shutil.copyfile)(path, out / path.name)
    in_files = {key: places[key].key if key in places else _new_key(key, stored) for key in tensors}
    for file in sorted(files):
        part = [key for key in tensors if key not in places or places[key].file == file]
        _rewrite(folder / file, out / file, {in_files[key]: tensors[key] for key in part})
    if (folder / INDEX).is_file():
        _write_index(folder / INDEX, out, {} if places else {in_files[key]: value for key, value in tensors.items()})
    _write_config(folder, out, COUNTS[kind], count)
    _check(out, fingerprint, weights)
    return sorted(files)


def _target(checkpoint: str, trained: dict[str, Any], name: str) -> tuple[PretrainedConfig, str]:
    """Return the configuration and the fingerprint of the target in the folder ``name``.

    Raises:
        ValueError: no folder, a quantised target, or another one than ``checkpoint`` was trained for.
    """
    if not Path(name).is_dir():
        raise ValueError(f"{name} is no folder; download the target (hf download {name}) and give --target FOLDER")
    config = load_config_only(name)
    if (method := quantisation(config)) is not None:
        raise ValueError(f"{name} is quantised ({method}), and the layer is not; give the target in bf16 or float16")
    found = load_frozen_ends(name, device="meta").fingerprint
    if not same_weights(trained["fingerprint"], found, f"an MTP layer trained for {trained['name']!r}"):
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']} (fingerprint {trained['fingerprint']}), and {name} has "
            f"the fingerprint {found}; give its own target: --target FOLDER"
        )
    return config, found


def _as_before(value: Tensor, own: Tensor | None, usual: torch.dtype) -> Tensor:
    """Return a trained tensor in the dtype of the one that it replaces, or in the target's ``usual`` one.

    One that training left alone stays as it was: a checkpoint has rounded it to 16 bits.
    """
    if own is None:
        return value.to(usual)
    return own if torch.equal(own.to(value.dtype), value) else value.to(own.dtype)


def _usual_dtype(stored: dict[str, Stored]) -> torch.dtype:
    """The dtype of most tensors: single ones of a target in bf16 are float32."""
    counts = Counter(place.dtype for place in stored.values())
    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[counts.most_common(1)[0][0]]


def _new_key(name: str, stored: dict[str, Stored]) -> str:
    """The name of a new tensor in the target's files, where a multimodal target has more before it."""
    if not name.startswith("model."):
        return name
    other, place = next((key, place) for key, place in stored.items() if key.startswith("model."))
    return place.key.removesuffix(other.removeprefix("model.")) + name.removeprefix("model.")


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
    save_tensors(whole | tensors, after, metadata)


def _write_index(index: Path, out: Path, new: dict[str, Tensor]) -> None:
    """Write the index; ``new``: tensors of a file that the target did not have."""
    weight_map(index)
    whole = json.loads(index.read_text(encoding="utf-8"))
    whole["weight_map"] |= dict.fromkeys(new, NEW)
    if "total_size" in whole["metadata"]:
        whole["metadata"]["total_size"] += sum(value.numel() * value.element_size() for value in new.values())
    replace_json(out / INDEX, whole)


def _write_config(folder: Path, out: Path, key: str, count: int) -> None:
    """Write config.json, which says how many MTP layers there are."""
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    section = whole.get("text_config", whole)
    section[key] = count
    replace_json(out / "config.json", whole)


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path.resolve(), new)
    except OSError:  # another disk
        shutil.copyfile(path, new)
