"""Checkpoints of drafters, on disk and on the Hub: ``config.json`` and ``model.safetensors``.

``config.json`` describes the drafter, its target and its training; see ``CheckpointConfig``. A LoRA for a trained
drafter (``head_adapter.py``) has peft's two files instead of ``model.safetensors``. Loading is strict: another format
version, a missing or unexpected weight, another shape, NaN or another target is a ``ValueError`` with the fix.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from drafters.common.files import replacing, save_tensors, sync
from drafters.common.fingerprints import same_weights
from drafters.common.paths import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, check_loadable, is_hub_id
from drafters.common.wording import dtype_name, how_to_import, json_object, shortened, with_article
from drafters.config import Amount, Config, Layers, Vocabulary, validate
from drafters.hub.client import look_up
from drafters.hub.model_card import CARD_FILE

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
HUB_NAMES = "hub_names"  # key of ``training``
WEIGHTS_FILE = "model.safetensors"
CONFIDENCE_FILE = "confidence.json"  # of train.tools.calibrate, in the format of SGLang's option
EXACT = "e_score_correction_bias"  # of a router of experts; transformers keeps it in float32, too
_PICKLED_FILES = ("pytorch_model.bin", "model.bin", "model.pt", "model.pth")


class TargetIdentity(Config):
    """The target that a drafter was trained for; identifies it among all others."""

    name: str
    revision: str | None = None
    fingerprint: str
    hidden_size: Amount = Field(gt=0)
    vocab_size: Vocabulary = Field(gt=0)
    num_hidden_layers: Layers = Field(gt=0)


class CheckpointConfig(Config):
    """Schema of ``config.json``.

    ``training``: provenance. Its ``hub_names`` are the names in the file that were loaded from the Hub.
    """

    drafter_type: str
    format_version: int
    drafter: dict[str, Any] = {}
    target: TargetIdentity
    training: dict[str, Any] = {}

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files beside ``config.json``, the weights last."""
        return (WEIGHTS_FILE,)

    @property
    def records_hub_names(self) -> bool:
        """True if the file says which names are the Hub's. Without a record, a revision shows it: no folder has one."""
        return HUB_NAMES in self.training or self.target.revision is not None

    @property
    def hub_names(self) -> list[str]:
        """Names of Hub repositories in the file, as recorded when they were loaded.

        Older files have no record. Then these are a target with a revision, and an adapter's base by its form.
        """
        if HUB_NAMES in self.training:
            return list(self.training[HUB_NAMES])
        names = [self.target.name] if self.target.revision is not None else []
        names += [self.base.name] if isinstance(self, AdapterConfig) else []
        return [name for name in names if is_hub_id(name)]


class BaseHead(Config):
    """The trained drafter that an adapter is for: a folder or Hub repository, and its fingerprint."""

    name: str
    fingerprint: str


class AdapterConfig(CheckpointConfig):
    """Schema of an adapter's ``config.json``; ``drafter`` has the options that differ from the base's."""

    base: BaseHead

    @property
    def files(self) -> tuple[str, ...]:
        return ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE


def make_config(
    drafter_type: str, drafter: Mapping[str, Any], target: "TargetModel", training: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a drafter of ``target``: its own options ``drafter``, its provenance ``training``."""
    return {
        "drafter_type": drafter_type,
        "format_version": FORMAT_VERSION,
        "drafter": dict(drafter),
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_hidden_layers": target.num_layers,
        },
        "training": dict(training or {}),
    }


def save_checkpoint(
    folder: str | Path,
    module: nn.Module | Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``; an older checkpoint there is replaced.

    A process killed during the call leaves the older checkpoint, the new one, or a folder without ``config.json``,
    which does not load: never a mixture.

    Args:
        module: the module, or its weights by name.
        dtype: floating-point weights are cast to it, except for ``EXACT``; None keeps theirs.

    Raises:
        ValueError: ``config`` does not follow ``CheckpointConfig``, or a weight is NaN or infinite.
    """
    folder = Path(folder)
    checked = parse_config(dict(config), source=f"the config to be saved in {folder}")
    if isinstance(checked, AdapterConfig):
        raise ValueError(f"{folder} has the config of an adapter of {checked.base.name!r}; name the head itself")
    state = module.state_dict() if isinstance(module, nn.Module) else module
    weights = {}
    for name, value in state.items():
        kept = value.dtype if dtype is None or not value.is_floating_point() or name.endswith(EXACT) else dtype
        weights[name] = value.detach().to("cpu", kept).contiguous().clone()  # safetensors refuses shared storage
    check_finite(weights, source=f"the module to be saved in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(checked.model_dump(), indent=2, sort_keys=True, allow_nan=False) + "\n"
    with replacing(folder / CONFIG_FILE) as new_config:
        new_config.write_text(text, encoding="utf-8")
        sync(new_config)
        with replacing(folder / WEIGHTS_FILE) as new_weights:
            save_tensors(weights, new_weights, {"format": "pt"})
            # Both new files are written; from here until the config is renamed, the folder does not load.
            (folder / CONFIG_FILE).unlink(missing_ok=True)


def load_checkpoint(
    path_or_repo: str | Path, revision: str | None = None, token: str | bool | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint from a local folder or, if there is no such folder, from a Hub repository ``user/name``.

    Returns:
        the content of ``config.json`` (as ``CheckpointConfig`` describes it) and the weights by name, on the CPU; of an
        adapter as ``AdapterConfig`` describes it, and the adapter's own: see ``head_adapter.load_head``.

    Raises:
        ValueError: nothing is found under that name, or what is found is not a complete checkpoint of this format.
    """
    folder = _folder(path_or_repo, revision, token)
    config = read_config(folder, source=str(path_or_repo))
    return config.model_dump(), _read_weights(folder, config.files[-1], source=str(path_or_repo))


def drafter_type(path_or_repo: str | Path, revision: str | None = None) -> str:
    """The method of a checkpoint, without reading its weights; raises as ``load_checkpoint`` does."""
    return config_of(path_or_repo, revision).drafter_type


def config_of(path_or_repo: str | Path, revision: str | None = None) -> CheckpointConfig:
    """The ``config.json`` of a checkpoint, without reading its weights; raises as ``load_checkpoint`` does."""
    return read_config(_folder(path_or_repo, revision, None), source=str(path_or_repo))


def _folder(path_or_repo: str | Path, revision: str | None, token: str | bool | None) -> Path:
    """The local folder of a checkpoint, downloaded if necessary."""
    if not isinstance(path_or_repo, str | Path):
        raise ValueError(f"a drafter is named by its folder or Hub repository, found {shortened(path_or_repo)}")
    folder = Path(path_or_repo).expanduser()
    check_loadable(folder, revision)
    return folder if folder.is_dir() else _download(str(path_or_repo), revision, token)


def read_config(folder: Path, source: str | None = None) -> CheckpointConfig:
    """Read and check ``config.json`` in the local ``folder``; ``source`` is the name that errors give it."""
    source = source or str(folder)
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{source} holds no {CONFIG_FILE}; a drafter is a folder of {CONFIG_FILE} and {WEIGHTS_FILE}")
    source = f"{source}: {CONFIG_FILE}"
    return parse_config(json_object(path, source), source)


def parse_config(data: dict[str, Any], source: str) -> CheckpointConfig:
    """Check the content of a ``config.json``; errors begin with ``source``."""
    if "drafter_type" not in data:
        kind = data.get("architectures") or data.get("model_type") or sorted(data)
        raise ValueError(
            f"{source} has no key 'drafter_type', so it is not a drafter of this toolkit (found: {shortened(kind)}). "
            f"{how_to_import(source.removesuffix(f': {CONFIG_FILE}'))}"
        )
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{source} has format_version {version!r}, and this toolkit reads {FORMAT_VERSION}")
    return validate(AdapterConfig if "base" in data else CheckpointConfig, data, source=source)


def load_state(module: nn.Module, state: Mapping[str, Tensor], source: str = "the checkpoint") -> None:
    """Copy ``state`` into ``module``; both must have the same weights.

    The module keeps its dtype and device. It does not change if there is an error.

    Raises:
        ValueError: weights are missing, unexpected, of another shape, integers or NaN; the message lists them.
    """
    own = module.state_dict()
    pairs = [(name, state[name], own[name]) for name in sorted(own.keys() & state.keys())]
    kinds = [(name, a.dtype, b.dtype) for name, a, b in pairs if a.is_floating_point() != b.is_floating_point()]
    sizes = [(name, list(a.shape), list(b.shape)) for name, a, b in pairs if a.shape != b.shape]
    found = {
        "missing weights": sorted(own.keys() - state.keys()),
        "unexpected weights": sorted(state.keys() - own.keys()),
        "shapes differ": [f"{name}: {a} in {source}, {b} in the drafter" for name, a, b in sizes],
        "whole numbers in place of weights": [f"{name}: {dtype_name(a)}, not {dtype_name(b)}" for name, a, b in kinds],
    }
    problems = [f"{what}: {', '.join(names)}" for what, names in found.items() if names]
    if problems:
        kind = type(module).__name__
        raise ValueError(
            f"{source} does not fit {kind}: {'; '.join(problems)}. Was it saved from {with_article(kind)}?"
        )
    check_finite(state, source)
    module.load_state_dict(state, strict=True)


def check_target(config: Mapping[str, Any], target: "TargetModel") -> None:
    """Refuse a target other than the one of a checkpoint's ``config``.

    Raises:
        ValueError: names both targets and the difference: sizes if they differ, else the fingerprints (a fine-tune,
            another revision).
    """
    trained = parse_config(dict(config), source=CONFIG_FILE).target
    sizes = (
        ("hidden size", trained.hidden_size, target.hidden_size),
        ("vocabulary", trained.vocab_size, target.vocab_size),
        ("layers", trained.num_hidden_layers, target.num_layers),
    )
    differing = ", ".join(f"{what} {ours} against {theirs}" for what, ours, theirs in sizes if ours != theirs)
    if not differing:
        fingerprint = target.fingerprint()
        if same_weights(trained.fingerprint, fingerprint, f"a drafter trained for {trained.name!r}"):
            return
        differing = f"fingerprint {trained.fingerprint} against fingerprint {fingerprint}, so other weights"
    at_revision = f" (revision {trained.revision})" if trained.revision else ""
    raise ValueError(
        f"this drafter was trained for {trained.name!r}{at_revision}, not for {target.name!r}: {differing}. "
        f"Load the target {trained.name!r}{at_revision}, or train a drafter for {target.name!r}"
    )


def _download(repo_id: str, revision: str | None, token: str | bool | None) -> Path:
    """The local snapshot of the drafter's files in the Hub repository ``repo_id``."""
    files = [CONFIG_FILE, WEIGHTS_FILE, ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, CARD_FILE]
    folder = snapshot(repo_id, files, revision, token)
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, ADAPTER_WEIGHTS_FILE)):
        names = HfApi(token=token).list_repo_files(repo_id, revision=revision)
        raise ValueError(_no_weights(repo_id, names))
    return folder


def snapshot(repo_id: str, files: list[str], revision: str | None = None, token: str | bool | None = None) -> Path:
    """The local folder of those of the ``files`` that the Hub repository ``repo_id`` has.

    Raises:
        ValueError: no such repository or revision, or the Hub refuses or cannot be reached.
    """
    looked = f"no drafter {repo_id!r}: there is no folder {Path(repo_id).expanduser().absolute()}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id) or repo_id.startswith(("./", "../", "~/")):
        raise ValueError(f"{looked}, and the name is not a Hub repository like 'user/my-drafter'")
    try:
        look_up(repo_id, revision, token)
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=files))
    except RevisionNotFoundError:
        raise ValueError(f"the Hub repository {repo_id!r} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ValueError(f"{looked}, and no such Hub repository; for a private one: `hf auth login`") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise ValueError(f"{looked}, and the Hub cannot be reached (check the connection and HF_HUB_OFFLINE)") from None
    except (HFValidationError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{looked}, and the Hub answers: {reason}") from None


def _read_weights(folder: Path, name: str, source: str) -> dict[str, Tensor]:
    path = folder / name
    if not path.is_file():
        raise ValueError(_no_weights(source, [entry.name for entry in folder.iterdir()], name))
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{source}: {name} cannot be read ({error}); it may be cut off") from None


def _no_weights(source: str, names: list[str], wanted: str = WEIGHTS_FILE) -> str:
    """The message for a checkpoint without ``wanted`` among its files ``names``."""
    pickled = sorted(set(names).intersection(_PICKLED_FILES))
    if not pickled:
        return f"{source} holds no {wanted}; found: {', '.join(sorted(names)) or 'nothing'}"
    return (
        f"{source} holds {pickled[0]} but no {wanted}. {how_to_import(source)}. Other pickled weights can run code and "
        "are not read; if you trust the file, convert it: "
        f"safetensors.torch.save_file(torch.load({pickled[0]!r}, weights_only=True), {wanted!r})"
    )


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raise ValueError if a weight holds NaN or infinity."""
    bad = sorted(name for name, value in weights.items() if not torch.isfinite(value).all())
    if bad:
        raise ValueError(f"{source}: NaN or infinite values in {', '.join(bad)}: lower the learning rate")
