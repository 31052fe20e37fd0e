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
from drafters.model.files import resolve_device
from drafters.provenance import machine

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
    kept = ("commit", "cpu", "cpu_cores", "gpu", "platform", "versions")
    return {name: found[name] for name in kept} | {
        "threads": threads or found["threads"],
        "code": code_digest(),
        "host": host_digest(),
        "files": files_digest(paths),
    }


def differing(one: Identity, other: Identity) -> list[str]:
    """What two identities differ in: names of the config's keys, and of what else was compared."""
    flat = [{**identity.get("config", {}), **identity} for identity in (one, other)]
    names = dict.fromkeys(name for identity in flat for name in identity if name != "config")
    return [name for name in names if flat[0].get(name) != flat[1].get(name)]


def digest(value: Any) -> str:
    """Of anything that JSON can hold: eight hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def code_digest() -> str:
    """Of the code that measures, which a commit does not tell while the tree has changes, or outside of git."""
    found = hashlib.sha256()
    for package in (drafters, data_prep, eval):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{package.__name__}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def host_digest() -> str:
    """Tells machines of one kind apart, without their names in a report that is published."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def files_digest(paths: Iterable[str]) -> str:
    """Of models and other files by size and time of change (or the Hub's commit): one trained on is another one."""
    return digest([_state(path) for path in sorted(set(paths))])


def _state(path: str) -> list[Any]:
    here = Path(path)
    if not here.exists():  # a Hub repository; the cached file lies in a folder that is named after the commit
        return [path, str(try_to_load_from_cache(path, "config.json"))]
    files = sorted(file for file in here.iterdir() if file.is_file()) if here.is_dir() else [here]
    return [path, [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
