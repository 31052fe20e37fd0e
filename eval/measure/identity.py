"""Identity of runs: config, code, commit, machine, models and prompts. Only runs of one identity are in one report."""

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
    """Return code, commit, machine and files, before a model is loaded.

    ``paths`` are all models, checkpoints and phrase pools; ``device`` and ``threads`` are as configured.
    """
    facts = machine(resolve_device(device))
    return {
        **{name: value for name, value in facts.items() if name != "dirty"},  # the digest of the code is more precise
        "threads": threads or facts["threads"],
        "code": code_digest(),
        # Distinguishes equal machines without their names in a published report.
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "files": digest([_state(path) for path in sorted(set(paths))]),
    }


def differing(one: Identity, other: Identity) -> list[str]:
    """Return the names of config keys and other facts that differ."""
    flat = [{**identity.get("config", {}), **identity} for identity in (one, other)]
    names = dict.fromkeys(name for identity in flat for name in identity if name != "config")
    return [name for name in names if flat[0].get(name) != flat[1].get(name)]


def digest(value: Any) -> str:
    """Return a hash of a JSON value in eight hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def code_digest() -> str:
    """Return a hash of the code: a commit does not identify it if the tree has changes, or outside of git."""
    hasher = hashlib.sha256()
    for package in (drafters, data_prep, eval):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            hasher.update(f"{package.__name__}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return hasher.hexdigest()[:16]


def _state(path: str) -> list[Any]:
    """Return the sizes and times of change of a model or file (or the Hub's commit)."""
    here = Path(path)
    if not here.exists():  # a Hub repository; the cached file's folder is named after the commit
        return [path, str(try_to_load_from_cache(path, "config.json"))]
    files = sorted(file for file in here.iterdir() if file.is_file()) if here.is_dir() else [here]
    return [path, [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
