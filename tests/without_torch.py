"""Runs a program on several command lines where torch cannot be imported; prints how each ended, as JSON.

python tests/without_torch.py eval.speed '[["--help"], ["--config", "none.yaml"]]'
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "matplotlib", "numpy")


def run(program: str, arguments: list[str]) -> str:
    """What it printed, the words that it ended with last."""
    sys.argv = [program, *arguments]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            ended = ""
        except SystemExit as stop:
            ended = stop.code if isinstance(stop.code, str) else ""
        except ImportError as error:
            ended = f"ImportError: {error}"
    return screen.getvalue() + ended


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name in HEAVY:
        sys.modules[name] = None  # type: ignore[assignment]
    program, cases = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps([run(program, case) for case in cases]))
