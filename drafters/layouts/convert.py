"""Import a released head: read it, check it against its target, write it as a checkpoint."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.common.files import check_new_folder
from drafters.common.paths import hub_names, shown_name
from drafters.common.wording import dtype_name
from drafters.heads.forms import DTYPES, EMBEDDING, Stated, another_target
from drafters.heads.keys import CONFIG_FILE, LOADS_AS_IT_IS
from drafters.heads.mask_embedding import MASK_FILE
from drafters.heads.one_layer import PICKLED_FILE
from drafters.heads.states import LM_HEAD
from drafters.hub.checkpoint import FORMAT_VERSION, HUB_NAMES, WEIGHTS_FILE, load_state, save_checkpoint, snapshot
from drafters.layouts.files import INDEXES, kind_of, read_folder
from drafters.model.ends import FrozenEnds, load_frozen_ends
from drafters.model.weights import EMBEDDING as TARGETS

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
    path, stored = read_folder(_folder(source, revision), source, LOADS_AS_IT_IS)
    kind, stated = kind_of(stored.config, stored.weights, source), Stated(target, exit_layer, layout, taps)
    forms = kind.forms
    for key, value in stated._asdict().items():
        if key != "target" and value is not None and key not in kind.shape.model_fields:
            option = f"--{key.replace('_', '-')}"
            raise ValueError(f"{option} is {value}, and {source} is {forms.noun}, which has none; leave it out")
    weights = forms.renamed(stored.weights)
    there = weights.get(EMBEDDING)  # the target's is read only to be compared with it
    dtype = there.dtype if there is not None and there.dtype in DTYPES else torch.float32
    ends = load_frozen_ends(target, dtype, "meta" if there is None else "cpu", target_revision)
    embedding, notices = weights.pop(EMBEDDING, None), list[str]()
    if embedding is not None and forms.has_lm_head_copy:
        notices += _drop_lm_head(weights, ends)
    reading = forms.read(stored._replace(weights=weights), ends.config, stated)
    notices += reading.notes + reading.doubts
    if another := another_target(stored.config, target, ends.fingerprint):
        raise ValueError(f"{source}: {another}")
    if embedding is not None:
        notices.append(_same_embedding(embedding, ends, source, target))
    shape, _ = kind.read_section(reading.options, source)
    load_state(kind.build_module(ends.config, shape), reading.weights, source)
    written = {
        "drafter_type": kind.name,
        "format_version": FORMAT_VERSION,
        "drafter": reading.options,
        "target": ends.identity(target, target_revision).model_dump(),
        "training": _provenance(source, target, revision, path),
    }
    save_checkpoint(out, reading.weights, written, dtype=None)
    return notices


def _provenance(source: str, target: str, revision: str | None, path: Path) -> dict[str, Any]:
    known = hub_names(source, target)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    named = {"imported_from": shown_name(source, known), HUB_NAMES: known}
    return named | {"revision": revision, "file": path.name, "sha256": digest}


def _folder(source: str, revision: str | None) -> Path:
    """The local folder of the source; pickled weights are downloaded only if the repository has no others."""
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    folder = snapshot(source, [CONFIG_FILE, MASK_FILE, WEIGHTS_FILE, *INDEXES], revision)
    if not (folder / WEIGHTS_FILE).is_file():
        folder = snapshot(source, [CONFIG_FILE, MASK_FILE, PICKLED_FILE], revision)
    return folder


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
