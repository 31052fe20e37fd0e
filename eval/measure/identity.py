"""What runs must have in common to stand in one report: config, code, commit, machine, models and prompts.

Runs of two identities are never mixed: not in a report that a kill interrupted, nor among the values of a sweep.
"""

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

import data_prep
import drafters
import eval
from drafters.common.machine import machine
from drafters.model.files import resolve_device

Identity = dict[str, Any]


def conditions(paths: Iterable[str], device: str | None, threads: int | None) -> Identity:
    """Code, commit, machine and files: what is known before a model is loaded.

    Args:
        paths: of everything that is loaded: models, checkpoints, phrase pools.
        device: as configured. threads: as configured.

    Raises:
        ValueError: there is no such device.
    """
    found = machine(resolve_device(device))
    return {
        **{name: value for name, value in found.items() if name != "dirty"},  # the code's digest says more
        "threads": threads or found["threads"],
        "code": code_digest(),
        # Tells machines of one kind apart, without their names in a report that is published.
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "files": digest([_state(path) for path in sorted(set(paths))]),
    }


def differing(one: Identity, other: Identity) -> list[str]:
    """What two identities differ in: names of the config's keys, and of what else was compared."""
    flat = [{**identity.get("config", {}), **identity} for identity in (one, other)]
    names = dict.fromkeys(name for identity in flat for name in identity if name != "config")
    return [name for name in names if flat[0].get(name) != flat[1].get(name)]


def digest(value: Any) -> str:
    """A hash of anything that JSON can hold, in eight hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def code_digest() -> str:
    """A hash of the code that measures: a commit does not tell it while the tree has changes, or outside of git."""
    found = hashlib.sha256()
    for package in (drafters, data_prep, eval):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{package.__name__}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _state(path: str) -> list[Any]:
    """A model or file by size and time of change (or the Hub's commit): trained further, it is another one."""
    here = Path(path)
    if not here.exists():  # a Hub repository; the cached file lies in a folder that is named after the commit
        return [path, str(try_to_load_from_cache(path, "config.json"))]
    files = sorted(file for file in here.iterdir() if file.is_file()) if here.is_dir() else [here]
    return [path, [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
