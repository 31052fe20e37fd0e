"""The files of a run folder.

config.json, model.safetensors   the trained drafter (drafters.hub.checkpoint)
run.json                         how to run it again: config, arguments, commit, versions
metrics.jsonl, tensorboard/      figures by step
summary.json, summary.png        its results (`python -m train.tools.summary` makes them again)
cache/                           states that the target computed, with `data.disk_gb` (train/data/cache.py)
state/step-*/, state/latest      resumable states (train/run/state.py): the newest two, `latest` names the newest
state/best.safetensors           with `keep: best`, the weights with the best tau (train/run/keep.py)
"""

import contextlib
import fcntl
import json
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.common.disk import check_room
from data_prep.store.lock import is_locked
from data_prep.store.manifest import StoreManifest
from drafters.common.files import check_folder, naming, replace_text, sync_folder
from drafters.common.fingerprints import same_weights
from drafters.common.provenance import changes, git_commit, library_versions
from drafters.config import Config
from train.core.config import FREE_ON_RESUME, TrainConfig

if TYPE_CHECKING:
    from torch import nn

KEPT_STATES = 2
PACKING = 2  # version of `epoch_batches` in train/data/packing.py: raised when the same seed gives other batches
METRICS = "metrics.jsonl"
WEIGHTS = "target_fingerprint"  # key of run.json
BEST = "best.safetensors"  # in state/
CACHE = "cache"  # folder of the states that an online run keeps (train/data/cache.py)
LIBRARIES = ("deepspeed", "tensorboard", "matplotlib", "tqdm")
FIGURES = ("run.json", METRICS, "tensorboard", "summary.json", "summary.png")


class StateFolder:
    """``state/`` of a run: the complete states, and the one being written.

    A state is written under a temporary name, renamed, and only then named in ``latest``. So ``latest`` names a
    complete state after a kill or a power cut at any point.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "state"
        self._latest = self.path / "latest"

    def latest(self) -> str | None:
        """The tag of the newest complete state, or None."""
        return self._latest.read_text(errors="replace").strip() if self._latest.is_file() else None

    def newest(self) -> Path | None:
        """The folder of the newest complete state."""
        latest = self.latest()
        return self.path / latest if latest else None

    def saved_notice(self) -> str:
        """The state that survives an error, for its message."""
        newest = self.newest()
        return f"the last good state is {newest}" if newest else "no checkpoint was written yet"

    def advice(self, damaged: str | None = None) -> str:
        """How to continue from a state other than ``damaged``."""
        tags = ", ".join(tag for tag in self._tags() if tag != damaged)
        return f"write one of {tags} into {self._latest} and resume from that" if tags else "give another out="

    def _tags(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("step-*"))

    @staticmethod
    def tag(step: int) -> str:
        """The state's folder name."""
        return f"step-{step:08d}"

    def begin(self, tag: str) -> Path:
        """An empty folder to write ``tag`` into; deletes the incomplete states of killed runs."""
        latest = self.latest() or ""
        for leftover in self.path.glob("*step-*"):
            if leftover.name.startswith(".") or leftover.name > latest:
                shutil.rmtree(leftover)
        folder = self.path / f".{tag}"
        folder.mkdir(parents=True)
        return folder

    def publish(self, tag: str) -> None:
        """Give the folder of ``begin`` its name, make it the latest state, and delete all but the newest two."""
        folder = self.path / f".{tag}"
        sync_folder(folder)
        folder.rename(self.path / tag)
        replace_text(self._latest, tag + "\n")
        self.tidy()

    def tidy(self) -> None:
        """Delete all states but the newest two; also on resume, because a kill may have prevented it."""
        latest = self.latest() or ""
        for old in [tag for tag in self._tags() if tag <= latest][:-KEPT_STATES]:
            shutil.rmtree(self.path / old, ignore_errors=True)

    def abandon(self, tag: str) -> None:
        """Delete the files of a state that cannot be finished."""
        shutil.rmtree(self.path / f".{tag}", ignore_errors=True)


def check_run_folder(config: TrainConfig, resume: bool) -> TrainConfig:
    """Refuse to mix two runs. Return ``config``; on resume, what it leaves to device or target is that run's.

    The files of a run that died before its first state are accepted; ``clear_dead_run`` deletes them.

    Raises:
        ValueError: the folder is not empty and ``resume`` is False; there is nothing to resume; another process trains
            in it; or a key changed that a resumed run must keep.
    """
    run, states = config.out, StateFolder(config.out)
    check_folder(run)
    held = False
    with contextlib.suppress(OSError, ValueError):  # no such file, or a file system without locks
        held = is_locked(run / METRICS)
    if held:
        raise ValueError(f"another process is training in {run}: wait until it ends, or give another out=")
    if not resume and (not run.exists() or not any(run.iterdir()) or _is_dead(run)):
        return config
    described = (run / "run.json").is_file()
    if described and (there := read_info(run).get("drafter")) != config.drafter:
        what = f"a run of train/{there}.py" if there else "a run that is no drafter's training"
        raise ValueError(f"out: {run} holds {what}, and this is train/{config.drafter}.py; give another out=")
    if not resume and described and states.latest() is not None:
        raise ValueError(f"{run} is not empty: pass --resume to continue the run in it, or another out=")
    if not resume:
        raise ValueError(f"{run} is not empty and holds no state to resume: empty it, or give another out=")
    if not states.latest():
        raise ValueError(
            f"--resume: there is no run at {run} with a saved state; start without --resume, or {states.advice()}"
        )
    now = by_key(config.model_dump(mode="json"))
    recorded = read_info(run)["config"]
    free = FREE_ON_RESUME - ({"draft_vocab"} if config.sizes_lm_head else set())
    if recorded.get("tau_every") is None:  # otherwise the best so far was chosen with them
        free |= {"tau_prompts", "tau_new_tokens"}
    now = {key: value for key, value in now.items() if key not in free}
    # A run from before a key existed did what ``older`` says, or else what the key's default says.
    if "head" not in recorded:  # a run from before its keys were a group
        recorded = config.gathered(config.older | recorded)
    head = defaults(type(config.head)) | recorded["head"]
    before = by_key(defaults(type(config)) | config.older | recorded | {"head": head})
    before = {key: value for key, value in before.items() if key in now}
    left = {key for key, value in now.items() if value == "auto" or (key, value) == ("head.taps", None)}
    settled = {key: before[key] for key in left & before.keys()}
    now |= settled
    # A run may have recorded auto instead of the value; then loading the weights refuses another value.
    before |= {key: now[key] for key, value in before.items() if value == "auto"}
    if changed := changes(before, now):
        raise ValueError(
            f"--resume: the config differs from the run in {run}: {'; '.join(changed)}; undo that or use another out="
        )
    head = {key.removeprefix("head."): value for key, value in settled.items() if key.startswith("head.")}
    rest = {key: value for key, value in settled.items() if not key.startswith("head.")}
    return config.model_copy(update=rest | {"head": config.head.model_copy(update=head)})


def defaults(schema: type[Config]) -> dict[str, Any]:
    """The keys of a schema that have defaults, with these."""
    every = {name: field.default for name, field in schema.model_fields.items() if not field.is_required()}
    return {name: value.model_dump() if isinstance(value, Config) else value for name, value in every.items()}


def read_info(run: Path) -> dict[str, Any]:
    """The contents of a run's run.json; raises ValueError if it is missing or damaged."""
    info = read_object(run / "run.json")
    if not isinstance(info.get("config"), dict):
        raise ValueError(f"{run / 'run.json'} is missing or damaged; restore it, or train again with another out=")
    return info


def clear_dead_run(run: Path) -> None:
    """Delete the figures of a run that died before its first state, so that those of two runs do not mix."""
    if run.exists() and _is_dead(run):
        for path in (path for path in run.iterdir() if path.name != CACHE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_dead(run: Path) -> bool:
    """True if the folder holds only a run's own files, and no state and no drafter."""
    run_files = {"state", CACHE, *FIGURES, *(f".{name}.tmp" for name in FIGURES)}
    names = {path.name for path in run.iterdir()}
    unfinished = all(path.name == BEST or path.name.startswith(".") for path in (run / "state").glob("*"))
    return bool(names) and names <= run_files and unfinished


def by_key(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of nested groups by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= {f"{key}.{leaf}": each for leaf, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def describe_data(manifest: StoreManifest) -> dict[str, Any]:
    """Identifies a run's dialogues and states: the data file's hash, dialogues, tokens, the target's fingerprint."""
    facts = {"source": manifest.source_digest, "dialogues": manifest.dialogues, "tokens": manifest.tokens}
    facts |= {WEIGHTS: manifest.target_fingerprint}
    return facts | ({"template_date": manifest.template_date} if manifest.template_date else {})


def begun_on(run: Path) -> str | None:
    """The date in the dialogues of the run in ``run``, if its chat template prints one; else None."""
    date = read_object(run / "run.json").get("data", {}).get("train", {}).get("template_date")
    return None if date is None else str(date)


def check_continues(run: Path, now: dict[str, Any]) -> None:
    """Raise ValueError if the dialogues, their batches or the base of ``lora`` changed since the run in ``run`` began.

    The position in the data would then skip dialogues and repeat others. ``now``: content of the new run.json.
    """
    before = read_info(run)
    if before.get("packing", 1) != PACKING:
        raise ValueError(
            f"--resume: the run in {run} was begun by a version that put the dialogues into other batches; finish it "
            f"with that version (commit {before.get('commit')}), or train again with another out="
        )
    for split, data in now["data"].items():
        then = before.get("data", {}).get(split, {})
        weights, known = data[WEIGHTS], then.get(WEIGHTS, data[WEIGHTS])
        if not same_weights(known, weights, str(run)):
            raise ValueError(
                f"--resume: the {split} features are of another target than the run in {run} began with (fingerprint "
                f"{weights} now, {known} then); restore that target and its features, or use another out="
            )
        then = {**then, WEIGHTS: weights}
        if {**data, **then} != data:  # runs of earlier versions recorded no date and no target
            raise ValueError(
                f"--resume: the {split} dialogues changed since the run in {run} began ({then} then, {data} now); "
                "restore the data file or the features, or use another out="
            )
    then, base = before.get("base"), now.get("base")
    if base is not None and then is not None and base["fingerprint"] != then["fingerprint"]:
        raise ValueError(
            f"--resume: init_from {base['name']!r} is another drafter (fingerprint {base['fingerprint']}) than the "
            f"adapter in {run} was begun on ({then['fingerprint']}); restore it, or use another out="
        )


@cache
def _commit() -> str | None:
    """The commit of the code that this process imported."""
    return git_commit(Path(__file__).resolve().parent)


def how_to_repeat(config: Config, arguments: list[str], *libraries: str) -> dict[str, Any]:
    """How to run a training program again; ``libraries``: whose versions matter beside torch's."""
    return {
        "config": config.model_dump(mode="json"),
        "arguments": arguments,
        "commit": _commit(),
        "versions": library_versions("torch", "transformers", *libraries),
    }


def run_folder_bytes(config: TrainConfig, module: "nn.Module") -> int:
    """Bytes of a run folder: the kept states, one being written, and of exports and best weights the old and the new.

    A state holds weights, two moments and perhaps averaged weights in float32. An export is bf16, or the module's
    ``export_bytes``. The best weights have the precision of the run.
    """
    count = trained_parameters(module)
    state = (12 if config.weight_average is None else 16) * count
    best = (4 if config.computes_in == "float32" else 2) * sum(weights.numel() for weights in module.parameters())
    files = int(getattr(module, "export_bytes", 2 * count)) + (best if config.keeps_best else 0)
    return (KEPT_STATES + 1) * state + 2 * files


def trained_parameters(module: "nn.Module") -> int:
    """The number of weights that training changes."""
    return sum(weights.numel() for weights in module.parameters() if weights.requires_grad)


def check_run_disk(config: TrainConfig, module: "nn.Module") -> None:
    """Raise ValueError unless the states and exports of ``module`` fit on the run folder's disk."""
    run = config.out
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_relative_to(run / CACHE)]
    there = sum(path.stat().st_size for path in files)
    what = f"the run folder {run} (states and exports of {trained_parameters(module):,} trained parameters)"
    check_room(run, run_folder_bytes(config, module) - there, what, "give an `out` on another disk, or make room")


def check_installed(config: TrainConfig) -> None:
    """Raise ValueError if a library or a tracker is missing, which a run imports only at its first use."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise ValueError(f"not installed: {', '.join(missing)}; pip install -e '.[train]'")
    check_trackers(config)


def check_trackers(config: TrainConfig) -> None:
    """Raise ValueError if the package of a tracker is missing."""
    if missing := [name for name in config.trackers if find_spec(name) is None]:
        rest = ",".join(name for name in config.trackers if name not in missing)
        names = ", ".join(missing)
        raise ValueError(f"trackers: not installed: {names}; pip install {' '.join(missing)}, or trackers=[{rest}]")


class Metrics:
    """metrics.jsonl, TensorBoard and other trackers. A resumed run first deletes the lines after its state.

    The file is locked until ``close``, so that other processes see that the run is alive.

    Args:
        trackers: started objects of accelerate's tracker classes.
    """

    def __init__(self, run: Path, step: int, tensorboard: bool = True, trackers: Sequence[Any] = ()) -> None:
        self.trackers = list(trackers)
        self.path = run / METRICS
        rows = [row for row in read_metrics(run) if row["step"] <= step]
        replace_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = self.path.open("a")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Append one line; an OSError, for example of a full disk, names the file."""
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        for tracker in list(self.trackers):
            try:
                tracker.log(values, step=step)
            except Exception as error:  # noqa: BLE001 - a tracker's server may fail in any way, and the training goes on
                self.trackers.remove(tracker)
                warning = f"warning: {tracker.name} gets no more figures: {type(error).__name__}: {error}"
                print(warning, file=sys.stderr)

    def close(self) -> None:
        """Unlock the file, and end the trackers' runs."""
        self._file.close()
        if self.board:
            self.board.close()
        for tracker in self.trackers:
            tracker.finish()


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(file.read_text())
        return value if isinstance(value, dict) else {}
    return {}


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl, without one that a kill cut off."""
    path = run / METRICS
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
