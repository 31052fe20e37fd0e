"""A program of this checkout, run with the Python of another environment."""

import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def start(python: Path, module: str, log: Path) -> subprocess.Popen[str]:
    """``python -m module`` in a session of its own, with pipes to its stdin and stdout; stderr goes to ``log``.

    Raises:
        OSError: it cannot be started, or the log not be written.
    """
    # Of this environment's no library: its own ones stand beside that Python, and this project's are the checkout's.
    path = os.pathsep.join([str(python.absolute().parent), os.environ.get("PATH", "")])
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONNOUSERSITE": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    pipes |= {"encoding": "utf-8", "errors": "replace"}
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen([str(python), "-m", module], **pipes, stderr=file, env=env, start_new_session=True)
