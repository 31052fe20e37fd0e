"""Import a released head: read it, check it against its target, write it as a checkpoint."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.files import check_new_folder
from drafters.common.fingerprints import same_weights
from drafters.common.paths import hub_names, shown_name
from drafters.common.wording import dtype_name, shortened
from drafters.hub.checkpoint import FORMAT_VERSION, HUB_NAMES, WEIGHTS_FILE, load_state, save_checkpoint, snapshot
from drafters.hub.declared import Layout
from drafters.layouts import block, eagle3
from drafters.layouts.config import CONFIG_FILE, LOADS_AS_IT_IS, made_from, read_config
from drafters.layouts.released import (
    DTYPES,
    EMBEDDING,
    INDEXES,
    PICKLED_FILE,
    differences,
    exportable,
    head_layer,
    kind_of,
    read_weights,
)
from drafters.layouts.state_heads import LM_HEAD
from drafters.learned import LearnedDrafter
from drafters.model.ends import FrozenEnds, load_frozen_ends
from drafters.model.layers import layer_config
from drafters.model.weights import EMBEDDING as TARGETS

STATE_HEADS = (eagle3.METHOD, *block.METHODS)  # methods whose heads read several of the target's states
ROWS = 4096  # of an embedding that are compared at once
_OTHER_EMBEDDING = (
    "give the model that it was trained for: --target MODEL. If it was trained with the target's embedding, and this "
    f"one was left random, delete {EMBEDDING} from the file"
)


def convert(
    source: str,
    target: str,
    out: Path,
    exit_layer: int | None = None,
    revision: str | None = None,
    target_revision: str | None = None,
    layout: str | None = None,
    taps: list[int] | None = None,
) -> list[str]:
    """Write the released head ``source`` as a checkpoint into ``out``, its tensors bit for bit.

    Args:
        source: a folder, or a Hub repository at ``revision``.
        target: the model that it was trained for; its embedding and LM head are read.
        exit_layer, layout, taps: what some files do not tell: the layer of a Kangaroo adapter; fill-in or anchor-first
            of a block head; of an EAGLE-3 or block head the target's hidden states, where k is the one after k layers.

    Returns:
        notes for the user on what was left out.

    Raises:
        ValueError: nothing loadable there, more than tensors in a pickled file, a head of another kind, for another
            target, or with other names and shapes.
        OSError: the disk is full, for example.
    """
    check_new_folder(out, "--out")
    folder = _folder(source, revision)
    config = read_config(folder, source, LOADS_AS_IT_IS)
    path, weights = read_weights(folder, source)
    kind, notices = kind_of(weights), list[str]()
    _check_known(weights, kind, source, exit_layer, layout, taps)
    if states := kind.name in STATE_HEADS:
        weights = (eagle3 if kind.name == eagle3.METHOD else block).renamed(weights)
    there = weights.get(EMBEDDING)  # the target's is read only to be compared with it
    dtype = there.dtype if there is not None and there.dtype in DTYPES else torch.float32
    ends = load_frozen_ends(target, dtype, "meta" if there is None else "cpu", target_revision)
    embedding = weights.pop(EMBEDDING, None)
    if states:
        notices += _drop_lm_head(weights, ends) if embedding is not None and kind.name in block.METHODS else []
        options, more, weights = _state_head(kind.name, config, weights, ends, folder, source, layout, taps)
        notices += more
    else:
        options = _options(config, weights, kind, ends, source, target, notices)
        if "exit_layer" in kind.shape.model_fields:
            options |= {"exit_layer": _exit_layer(config, exit_layer, ends, source, target)}
    _check_made_for(config, ends, source, target)
    if embedding is not None:
        notices.append(_same_embedding(embedding, ends, source, target))
    load_state(kind.build_module(ends.config, kind.read_section(options, source)[0]), weights, source)
    written = {
        "drafter_type": kind.name,
        "format_version": FORMAT_VERSION,
        "drafter": options,
        "target": ends.identity(target, target_revision).model_dump(),
        "training": _provenance(source, target, revision, path),
    }
    save_checkpoint(out, weights, written, dtype=None)
    return notices


def _state_head(
    method: str,
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    ends: FrozenEnds,
    folder: Path,
    source: str,
    layout: str | None,
    taps: list[int] | None,
) -> tuple[dict[str, Any], list[str], dict[str, Tensor]]:
    """Options, notes for the user, and weights of a head that reads the target's states."""
    if method == eagle3.METHOD:
        found = eagle3.read(config, weights, ends.config, source, taps)
        own = eagle3.own_weights(weights, found.options)
    else:
        block.check_folder(folder, source)
        found = block.read(config, weights, ends.config, source, layout, taps)
        own = block.own_weights(weights, found.options)
    return found.options, found.notes + found.doubts, own


def _provenance(source: str, target: str, revision: str | None, path: Path) -> dict[str, Any]:
    known = hub_names(source, target)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    named = {"imported_from": shown_name(source, known), HUB_NAMES: known}
    return named | {"revision": revision, "file": path.name, "sha256": digest}


def _options(
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    kind: type[LearnedDrafter],
    ends: FrozenEnds,
    source: str,
    target: str,
    notices: list[str],
) -> dict[str, Any]:
    """Options of a head of one layer of the target's kind; a bias of zeros is removed from ``weights``."""
    layer = head_layer(config, ends.config, kind)
    shape = layer_config(ends.config, layer)
    _check_layer(config, shape, kind.layout, source, target)
    if (eps := config.get("rms_norm_eps", 1e-6)) != (own := getattr(shape, "rms_norm_eps", eps)):
        notices.append(f"rms_norm_eps is {eps} in its {CONFIG_FILE} and {own} in the layer that it gets")
    options: dict[str, Any] = {} if layer == "target" else {"layer": layer}
    return options | (_bias(config, weights, kind.layout.bias, source, notices) if kind.layout.bias else {})


def _folder(source: str, revision: str | None) -> Path:
    """The local folder of the source; pickled weights are downloaded only if the repository has no others."""
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    folder = snapshot(source, [CONFIG_FILE, WEIGHTS_FILE, *INDEXES], revision)
    if not (folder / WEIGHTS_FILE).is_file():
        folder = snapshot(source, [CONFIG_FILE, PICKLED_FILE], revision)
    return folder


def _check_known(
    weights: Mapping[str, Tensor],
    kind: type[LearnedDrafter],
    source: str,
    exit_layer: int | None,
    layout: str | None,
    taps: list[int] | None,
) -> None:
    """Raise ValueError if this toolkit has no such head, or one is given what it does not have."""
    names = kind.layout.names
    if kind.name not in STATE_HEADS and 2 * len(names & weights.keys()) < len(names):
        known = ", ".join(other.layout.noun for other in exportable())
        held = ", ".join(sorted(weights)[:3]) or "nothing"
        raise ValueError(f"{source} is no head of a known kind (known: {known}): it holds {held}")
    for option, given, has in (
        ("--exit-layer", exit_layer, "exit_layer" in kind.shape.model_fields),
        ("--layout", layout, kind.name in block.METHODS),
        ("--taps", taps, kind.name in STATE_HEADS),
    ):
        if given is not None and not has:
            raise ValueError(f"{option} is {given}, and {source} is {kind.layout.noun}, which has none; leave it out")


def _check_layer(config: Mapping[str, Any], shape: PretrainedConfig, layout: Layout, source: str, target: str) -> None:
    """Raise ValueError unless the head is made of one layer of this ``shape``."""
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"{source}: num_hidden_layers is {shortened(layers)} in {CONFIG_FILE}, and a head has 1")
    if layout.rope_theta:  # the official code does not read RoPE from config.json
        config = {key: value for key, value in config.items() if not key.startswith("rope_")}
    if found := differences(config, shape, layout):
        raise ValueError(f"{source} is no head for {target}: {'; '.join(found)}. Give its own: --target MODEL")


def _check_made_for(config: Mapping[str, Any], ends: FrozenEnds, source: str, target: str) -> None:
    """Raise ValueError if an export of ours names another target."""
    made = made_from(config)
    known = made.get("target_fingerprint")
    if known is not None and not same_weights(str(known), ends.fingerprint, source):
        raise ValueError(
            f"{source} was trained for {shortened(made.get('target'))} (target_fingerprint {shortened(known)}), and "
            f"{target} is another model (fingerprint {ends.fingerprint}); give the one it was trained for: "
            "--target MODEL"
        )


def _same_embedding(theirs: Tensor, ends: FrozenEnds, source: str, target: str) -> str:
    """The note that the head's embedding is the target's; raises ValueError if it differs by more than rounding."""
    ours = ends.embed.weight
    if theirs.shape != ours.shape or theirs.dtype not in DTYPES:
        raise ValueError(
            f"{source}: {EMBEDDING} is {list(theirs.shape)} in {dtype_name(theirs.dtype)}, and {TARGETS} of "
            f"{target} is {list(ours.shape)}; {_OTHER_EMBEDDING}"
        )
    if (largest := _apart(theirs, ours, ends)) is not None:
        raise ValueError(
            f"{source}: its {EMBEDDING} is not the embedding of {target}: they are up to {largest:.3g} apart, more "
            f"than rounding explains; {_OTHER_EMBEDDING}"
        )
    return f"its {EMBEDDING} ({dtype_name(theirs.dtype)}) is the target's, and was left out"


def _apart(theirs: Tensor, ours: Tensor, ends: FrozenEnds) -> float | None:
    """The largest difference of two matrices ``[V, H]``; None if rounding explains it."""
    # They may differ by the rounding of the coarser dtype; float16 also flushes the smallest values to zero.
    stored = getattr(torch, dtype_name(getattr(ends.config, "dtype", None)), ours.dtype)
    eps, tiny = max(torch.finfo(kind).eps for kind in (theirs.dtype, ours.dtype, stored)), 2.0**-24
    for start in range(0, len(ours), ROWS):
        one, other = theirs[start : start + ROWS].float(), ours[start : start + ROWS].float()
        if not torch.allclose(one, other, rtol=eps, atol=tiny):
            return (one - other).abs().nan_to_num(torch.inf).max().item()
    return None


def _drop_lm_head(weights: dict[str, Tensor], ends: FrozenEnds) -> list[str]:
    """Remove a copy of the target's LM head, as DeepSpec's trainer stores one; another LM head is the head's own."""
    theirs, ours = weights.get(LM_HEAD), ends.lm_head
    if theirs is None or theirs.shape != ours.weight.shape or theirs.dtype not in DTYPES:
        return []
    if _apart(theirs, ours.weight, ends) is not None:
        return [f"its {LM_HEAD} is not the target's, and is kept: it drafts with all {len(theirs):,} rows of its own"]
    del weights[LM_HEAD]
    return [f"its {LM_HEAD} ({dtype_name(theirs.dtype)}) is the target's, and was left out"]


def _bias(
    config: Mapping[str, Any], weights: dict[str, Tensor], name: str, source: str, notices: list[str]
) -> dict[str, Any]:
    """The option of a head with the bias ``name``; a bias of zeros is removed from ``weights``."""
    bias = weights.get(name)
    if bias is None:
        if config.get("bias", True):
            given = "true" if "bias" in config else "absent, which means true,"
            raise ValueError(
                f"{source}: bias is {given} in {CONFIG_FILE}, and {name} is not among its tensors. If it was trained "
                f'without one, set "bias": false in {CONFIG_FILE}; else the file is incomplete'
            )
        return {}
    if bias.is_floating_point() and not bias.any():
        del weights[name]
        notices.append(f"its {name} is zero, and was left out")
        return {}
    option = name.replace(".", "_")
    notices.append(f"its {name} is kept ({option}: true; to train it further, set that there, too)")
    return {option: True}


def _exit_layer(config: Mapping[str, Any], given: int | None, ends: FrozenEnds, source: str, target: str) -> int:
    known = made_from(config).get("exit_layer")
    layers = ends.config.num_hidden_layers
    if known is not None and given not in (None, known):
        raise ValueError(f"--exit-layer is {given}, and {source} was trained behind layer {known}; leave it out")
    if (found := given or known) is None:
        raise ValueError(f"{source} does not say its exit layer: give --exit-layer N (2 for Vicuna 7B, 3 for 13B)")
    if type(found) is not int or not 0 < found < layers:
        raise ValueError(f"--exit-layer must be between 1 and {layers - 1} for {target}, found {found}")
    return found
