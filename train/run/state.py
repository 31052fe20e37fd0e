"""The resumable state of a run, the same for any number of ranks and any ZeRO stage.

state/step-00001000/
  weights.safetensors       float32, by the names of the module's parameters
  exp_avg.safetensors       Adam's first moment, by the same names
  exp_avg_sq.safetensors    and its second
  progress.json             steps done, the position in the data, the time spent; and the SHA-256 of all of these

Not DeepSpeed's own checkpoint, which is pickled and, from ZeRO-1 on, split by rank: another number of ranks could not
read it. Whole tensors are gathered for this one, and each rank takes its part of them again on loading.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data_prep.store.reader import file_sha256
from drafters.files import replace_text, save_tensors
from drafters.paths import readable
from train.run.files import StateFolder
from train.runtime import Ranks

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
PROGRESS = "progress.json"


class SavedState:
    """A whole state on disk.

    Raises:
        ValueError: it is damaged, missing, or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise ValueError(f"{folder} does not exist, though {folder.parent / 'latest'} names it: {self._advice()}")
        if not (folder / PROGRESS).is_file():
            raise ValueError(
                f"{folder} holds no {PROGRESS}: an earlier version of this toolkit wrote it, in DeepSpeed's own "
                "format; finish the run with that version, or train anew with another out="
            )
        for kind in (WEIGHTS, *MOMENTS):
            readable(folder / f"{kind}.safetensors")
        try:
            self.progress: dict[str, Any] = dict(json.loads((folder / PROGRESS).read_text()))
            written = dict(self.progress.pop("sha256", {}))
            found = checksums(folder, self.progress)
            self._files = {kind: safe_open(folder / f"{kind}.safetensors", "pt") for kind in (WEIGHTS, *MOMENTS)}
        except (TypeError, ValueError, OSError, SafetensorError) as error:
            raise ValueError(f"{folder} is damaged ({error}): {self._advice()}") from error
        wrong = [name for name, digest in found.items() if written.get(name) != digest]
        if wrong:
            raise ValueError(
                f"{folder} is damaged ({', '.join(wrong)} differ from the checksums in {PROGRESS}): {self._advice()}"
            )

    def load_weights(self, module: nn.Module) -> None:
        """Give the module its weights, before an engine takes them apart.

        Raises:
            ValueError: the names or shapes are others than the module's.
        """
        ours = {name: tuple(value.shape) for name, value in _trained(module)}
        file = self._files[WEIGHTS]
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if ours != theirs:
            differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
            raise ValueError(
                f"{self.folder} is of another drafter: {', '.join(differing)} differ in shape or are missing"
            )
        with torch.no_grad():
            for name, value in _trained(module):
                value.copy_(file.get_tensor(name))

    def load_optimizer(self, engine: Any, steps: int) -> None:
        """Set the engine's float32 weights and Adam's state after so many steps; its module has its weights."""
        _make_moments(engine, steps)
        for name, parameter in _trained(engine.module):
            for kind, file in self._files.items():
                _set(engine, parameter, kind, file.get_tensor(name))

    def _advice(self) -> str:
        return StateFolder(self.folder.parent.parent).advice(self.folder.name)


def checksums(folder: Path, progress: dict[str, Any]) -> dict[str, str]:
    """The SHA-256 of a state's files, by their names; ``progress`` is what stands in progress.json beside them."""
    found = {name: file_sha256(folder / name) for name in (f"{kind}.safetensors" for kind in (WEIGHTS, *MOMENTS))}
    return {**found, PROGRESS: hashlib.sha256(json.dumps(progress, sort_keys=True).encode()).hexdigest()}


def save_state(engine: Any, states: StateFolder, step: int, progress: dict[str, Any], ranks: Ranks) -> None:
    """Write the state after ``step`` steps, and name it as the newest once it is whole; every rank has to call it.

    A kill on the way leaves the states before as they were.

    Raises:
        OSError: the disk is full, say. What was written of this state is removed; the states before stay.
    """
    tag, failure = states.tag(step), None
    folder = states.begin(tag) if ranks.is_first else Path()
    for kind in (WEIGHTS, *MOMENTS):
        tensors = {}
        for name, parameter in _trained(engine.module):
            whole = _get(engine, parameter, kind)  # a collective, also after a failure
            if ranks.is_first and failure is None:
                tensors[name] = whole.to("cpu", torch.float32)
        if ranks.is_first and failure is None:
            failure = _written(folder / f"{kind}.safetensors", tensors)
    if ranks.is_first and failure is None:
        try:
            whole_progress = {**progress, "sha256": checksums(folder, progress)}
            replace_text(folder / PROGRESS, json.dumps(whole_progress, indent=2) + "\n")
            states.publish(tag)
        except OSError as error:
            failure = error
    failed = ranks.total(torch.tensor([failure is not None], dtype=torch.int64, device=engine.device))
    if int(failed):
        if ranks.is_first:
            states.abandon(tag)
        latest = states.latest()
        kept = f"the last good state is {states.path / latest}" if latest else "there is no earlier one"
        raise OSError(f"{states.path / tag} could not be written ({failure or 'on rank 0'}); {kept}") from failure


def _written(path: Path, tensors: dict[str, Tensor]) -> OSError | None:
    """Write a file; what went wrong, if anything did."""
    try:
        save_tensors(tensors, path)
    except OSError as error:
        return error
    return None


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in module.named_parameters() if value.requires_grad]


def _get(engine: Any, parameter: nn.Parameter, kind: str) -> Tensor:
    """One whole float32 tensor: the parameter's master weights, or a moment of them. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        return parameter.detach() if kind == WEIGHTS else engine.optimizer.state[parameter][kind]
    if kind == WEIGHTS:
        return safe_get_full_fp32_param(parameter)
    return safe_get_full_optimizer_state(parameter, kind)


def _set(engine: Any, parameter: Any, kind: str, whole: Tensor) -> None:
    """The reverse of ``_get``: this rank's part of ``whole``."""
    from deepspeed import utils

    stage = engine.zero_optimization_stage()
    if stage == 0:
        (parameter.data if kind == WEIGHTS else engine.optimizer.state[parameter][kind]).copy_(whole)
        return
    if stage == 3:  # parts are rounded up to one size, which DeepSpeed forgets where it cuts a whole tensor itself
        size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
        part = whole.new_zeros(size)
        mine = whole.flatten()[rank * size : (rank + 1) * size]
        part[: len(mine)] = mine
        if kind == WEIGHTS:
            utils.safe_set_local_fp32_param(parameter, part)
        else:
            utils.safe_set_local_optimizer_state(parameter, part, kind)
    elif kind == WEIGHTS:
        utils.safe_set_full_fp32_param(parameter, whole)
    else:
        utils.safe_set_full_optimizer_state(parameter, whole, kind)


def _make_moments(engine: Any, steps: int) -> None:
    """Adam's state as it is after ``steps`` steps, zero as yet; DeepSpeed would make it in the first step."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    adam = optimizer if stage == 0 else optimizer.optimizer
    held = [value for group in adam.param_groups for value in group["params"]]
    if stage == 3:  # its groups are empty between steps
        held = optimizer.fp32_partitioned_groups_flat
    for value in held:
        adam.state[value] = {"step": torch.tensor(float(steps), device=value.device)}
        adam.state[value] |= {kind: torch.zeros_like(value, requires_grad=False) for kind in MOMENTS}
    if stage in (1, 2):
        optimizer._lazy_init_hp_params_optimizer_state()  # where each parameter's moments lie in the flat ones
