"""Run a module of this checkout with the Python of another environment."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(python: Path, module: str, log: Path) -> subprocess.Popen[str]:
    """Start ``python -m module`` in its own session, with pipes for stdin and stdout and stderr in ``log``."""
    # The other environment's libraries and this checkout's modules, but not this environment's libraries.
    path = os.pathsep.join([str(python.absolute().parent), os.environ.get("PATH", "")])
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONNOUSERSITE": "1"}
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            encoding="utf-8",
            errors="replace",
            env=env,
            start_new_session=True,
        )
