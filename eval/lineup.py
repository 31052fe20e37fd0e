"""The configured drafters, built afresh for every round; what they only read, the draft models, is loaded once."""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from drafters import Drafter, TargetModel, drafter_class, make_drafter
from drafters.config import Config

FOLDER_OPTIONS = ("checkpoint", "draft_model")


class DrafterEntry(Config):
    """One row of the report. Every other key is an option of the drafter; learned ones take ``checkpoint``."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str = Field(description="the method: the name of its file in drafters/")
    label: str | None = Field(None, description="its name in the report; default: the method's")
    temperatures: list[float] | None = Field(None, description="default: all of the run's")

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.label or self.drafter

    @property
    def options(self) -> dict[str, Any]:
        """For ``make_drafter``."""
        return dict(self.model_extra or {})


class Lineup:
    """Builds drafters, so that none in a round has met a prompt before.

    All are built once at the start, which finds what is wrong with them; these are the ones that the first call of
    ``fresh`` for each hands out. Whoever gets drafters from there is the only one to hold them.

    Args:
        target: every drafter's; draft models come in its dtype, on its device.

    Raises:
        ValueError: some cannot be built; one message names them all.
    """

    def __init__(self, entries: list[DrafterEntry], target: TargetModel) -> None:
        self._entries, self._target = entries, target
        self._draft_models: dict[str, TargetModel] = {}  # by path; dtype and device are the target's
        self._unused: dict[str, Drafter] = {}
        problems = []
        for entry in entries:
            try:
                self._unused[entry.name] = self._build(entry)
            except ValueError as error:
                problems.append(f"{entry.name}: {error}")
        if problems:
            raise ValueError("cannot build the drafters\n  " + "\n  ".join(problems))
        self.max_context = min(drafter.max_context for drafter in self._unused.values())

    def fresh(self, temperature: float) -> dict[str, Drafter]:
        """The drafters of a temperature by their names in the report; none has seen a prompt."""
        wanted = [e for e in self._entries if e.temperatures is None or temperature in e.temperatures]
        return {e.name: self._unused.pop(e.name) if e.name in self._unused else self._build(e) for e in wanted}

    def _build(self, entry: DrafterEntry) -> Drafter:
        options = entry.options
        path = options.get("draft_model")
        if isinstance(path, str) and "draft_model" in drafter_class(entry.drafter).options.model_fields:
            options["draft_model"] = self._draft_model(path)
        return make_drafter(entry.drafter, self._target, **options)

    def _draft_model(self, path: str) -> TargetModel:
        if path not in self._draft_models:
            loaded = TargetModel.from_pretrained(path, dtype=self._target.dtype, device=self._target.device)
            self._draft_models[path] = loaded
        return self._draft_models[path]


def check_entries(entries: list[DrafterEntry], target_path: str) -> None:
    """What can be found out before the target is loaded.

    Raises:
        ValueError: unknown drafters, or folders that are not there.
    """
    folders = {"target.path": target_path}
    for entry in entries:
        drafter_class(entry.drafter)
        folders |= {f"{entry.name}: {key}": entry.options[key] for key in FOLDER_OPTIONS if key in entry.options}
    missing = [f"{key} {path!r}" for key, path in folders.items() if _is_missing_folder(str(path))]
    if missing:
        raise ValueError(
            f"these folders do not exist: {', '.join(missing)}; train or fetch them first, or mend the path"
        )


def _is_missing_folder(path: str) -> bool:
    """A name like ``checkpoints/x`` could be a Hub repository's; where ``checkpoints`` is a folder here, it is not."""
    here = Path(path)
    return not here.exists() and (here.is_absolute() or path.startswith(".") or Path(here.parts[0]).is_dir())
