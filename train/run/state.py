"""The resumable state of a run, the same for any number of ranks and any ZeRO stage.

state/step-00001000/
  weights.safetensors       float32, by the names of the module's parameters
  exp_avg.safetensors       Adam's first moment, by the same names
  exp_avg_sq.safetensors    and its second
  weight_average.safetensors    with the config's weight_average, by the same names
  progress.json             steps done, the position in the data, the time spent; and the SHA-256 of all of these

It is not DeepSpeed's checkpoint, which is pickled and, from ZeRO-1 on, split by rank, so that another number of ranks
could not read it. Here whole tensors are gathered, and each rank takes its part of them on loading.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data_prep.common.disk import file_sha256
from drafters.common.files import replace_json, save_tensors
from drafters.common.paths import readable
from train.core.average import FILE as AVERAGE
from train.core.average import WeightAverage
from train.core.engine import MOMENTS, WEIGHTS, Engine
from train.core.runtime import Ranks
from train.run.files import StateFolder

PROGRESS = "progress.json"
ALWAYS = (WEIGHTS, *MOMENTS)


class SavedState:
    """A complete state on disk.

    Raises:
        ValueError: it is damaged, missing, or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise ValueError(f"{folder} does not exist, though {folder.parent / 'latest'} names it: {self._advice()}")
        for kind in ALWAYS:
            readable(folder / f"{kind}.safetensors")
        try:
            self.progress: dict[str, Any] = dict(json.loads((folder / PROGRESS).read_text()))
            written = dict(self.progress.pop("sha256", {}))
            kinds = (*ALWAYS, AVERAGE) if f"{AVERAGE}.safetensors" in written else ALWAYS
            digests = checksums(folder, self.progress, kinds)
            self._files = {kind: safe_open(folder / f"{kind}.safetensors", "pt") for kind in kinds}
        except (TypeError, ValueError, OSError, SafetensorError) as error:
            raise ValueError(f"{folder} is damaged ({error}): {self._advice()}") from error
        if wrong := ", ".join(name for name, digest in digests.items() if written.get(name) != digest):
            raise ValueError(f"{folder} is damaged ({wrong} differ from the checksums in {PROGRESS}): {self._advice()}")

    def load_weights(self, module: nn.Module) -> None:
        """Load the module's weights, before an engine splits them; raise ValueError if names or shapes differ."""
        ours = {name: tuple(value.shape) for name, value in _trained(module)}
        file = self._files[WEIGHTS]
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if ours != theirs:
            names = ", ".join(sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)))
            raise ValueError(f"{self.folder} is of another drafter: {names} differ in shape or are missing")
        with torch.no_grad():
            for name, value in _trained(module):
                value.copy_(file.get_tensor(name))

    def load_optimizer(self, engine: Engine, steps: int) -> None:
        """Set the float32 weights and the optimizer's state after ``steps``; the module has its weights already."""
        engine.make_moments(steps)
        for name, parameter in _trained(engine.module):
            for kind in engine.kept_of(parameter):
                engine.scatter(parameter, kind, self._files[kind].get_tensor(name))

    def weight_average(self) -> dict[str, Tensor]:
        """The averages by the weights' names; raises ValueError if the state has none."""
        if (file := self._files.get(AVERAGE)) is None:
            raise ValueError(f"{self.folder} holds no {AVERAGE}, which the config asks for; set {AVERAGE}=null")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def _advice(self) -> str:
        return StateFolder(self.folder.parent.parent).advice(self.folder.name)


def checksums(folder: Path, progress: dict[str, Any], kinds: tuple[str, ...] = ALWAYS) -> dict[str, str]:
    """The SHA-256 of a state's files by name; ``progress`` is what progress.json holds beside them."""
    digests = {name: file_sha256(folder / name) for name in (f"{kind}.safetensors" for kind in kinds)}
    return {**digests, PROGRESS: hashlib.sha256(json.dumps(progress, sort_keys=True).encode()).hexdigest()}


def save_state(
    engine: Engine, states: StateFolder, progress: dict[str, Any], ranks: Ranks, average: WeightAverage | None
) -> None:
    """Write the state after ``progress["step"]`` steps, then name it as the newest; a collective.

    A kill meanwhile leaves the earlier states as they were.

    Raises:
        OSError: for example a full disk. The incomplete state is deleted; earlier states stay.
    """
    tag = states.tag(progress["step"])
    folder = states.begin(tag) if ranks.is_first else Path()
    kinds = ALWAYS if average is None else (*ALWAYS, AVERAGE)
    failure: OSError | None = None
    for kind in kinds:
        tensors: dict[str, Tensor] = {}
        for name, parameter in _trained(engine.module):
            if kind == AVERAGE and average is not None:
                tensors[name] = average.weights[name]
            elif kind in engine.kept_of(parameter):
                whole = engine.gather(parameter, kind)  # a collective, so also after a failure
                tensors |= {name: whole.to("cpu", torch.float32)} if ranks.is_first else {}
        if ranks.is_first and failure is None:
            try:
                save_tensors(tensors, folder / f"{kind}.safetensors")
                if kind == kinds[-1]:
                    replace_json(folder / PROGRESS, {**progress, "sha256": checksums(folder, progress, kinds)})
                    states.publish(tag)
            except OSError as error:
                failure = error
    if int(ranks.total(torch.tensor(failure is not None, dtype=torch.int64, device=engine.device))):
        if ranks.is_first:
            states.abandon(tag)
        what = f"{states.path / tag} could not be written ({failure or 'on rank 0'})"
        raise OSError(f"{what}; {states.saved_notice()}") from failure


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in module.named_parameters() if value.requires_grad]
