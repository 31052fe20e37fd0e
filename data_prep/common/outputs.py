"""Names of the files of data_prep.regenerate and data_prep.magpie: the output, its sidecar, and the journals."""

from pathlib import Path


def sidecar(out: str) -> Path:
    """``<out>.json`` with the settings and counts of a finished output."""
    return Path(f"{out}.json")


def unfinished(out: str) -> Path:
    """The folder of the journals of an unfinished output."""
    return Path(f"{out}.unfinished")


def is_finished(out: str) -> bool:
    """Whether the output and its sidecar exist."""
    return sidecar(out).is_file() and Path(out).is_file()


def check_own(out: str) -> None:
    """Raise ValueError if ``out`` exists without a sidecar or journals: another program wrote it."""
    if Path(out).exists() and not sidecar(out).exists() and not unfinished(out).exists():
        raise ValueError(f"out: {out} exists and was not written by this program; give another file or delete it")
