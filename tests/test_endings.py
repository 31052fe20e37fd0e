"""Ctrl-C in a program: one true line, status 130, no stack trace, whenever it comes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

from train.core.runtime import free_port

ROOT = Path(__file__).parents[1]


def interrupted(command: list[str], when: Callable[[], bool], number: int = signal.SIGINT) -> tuple[int, str]:
    """Send the signal once ``when`` holds; the exit status and what stood on stderr."""
    environment = tiny_run.environment() | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 120
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def importing(module: str, begun: Path) -> dict[str, str]:
    """An environment where the import of ``module`` says that it has begun, by a file, and lasts."""
    folder = begun.parent / "slow"
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)\n"
    )
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and a config for each program, in one folder."""
    folder = tmp_path_factory.mktemp("work")
    tiny_run.save_target(folder / "target")
    return folder


COMMANDS = {
    "features": ["-m", "data_prep.features"],
    "speed": ["-m", "eval.speed"],
    "roofline": ["-m", "eval.roofline"],
    "eagle": [str(ROOT / "train" / "eagle.py")],
}


def config(name: str, folder: Path, work: Path) -> list[str]:
    """The arguments of a program."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}\n')
    if name == "roofline":
        return ["--shape", "llama-5m", f"out={folder / 'out'}", "new_tokens=512", "rounds=99", "stock=false"]
    target = str(work / "target")
    values: dict[str, Any] = {
        "features": {"target": target, "splits": {"train": str(prompts)}, "out": str(folder / "out")},
        "speed": {
            "target": {"path": target},
            "prompts": {"file": str(prompts)},
            "drafters": [{"drafter": "prompt_lookup"}],
            "out": str(folder / "out"),
        },
        "eagle": tiny_run.settings(target, folder, folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values[name]))
    return ["--config", str(folder / "run.yaml")]


@pytest.mark.parametrize("name", COMMANDS)
def test_while_torch_is_imported(name: str, tmp_path: Path, work: Path) -> None:
    """Catches a stack trace, or an ImportError that the interruption of an import came out as."""
    begun = tmp_path / "begun"
    command = [sys.executable, *COMMANDS[name], *config(name, tmp_path, work)]
    environment = {**os.environ, **importing("torch", begun)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not begun.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    (line,) = errors.splitlines()
    assert line.startswith("interrupted; nothing was begun. To start again: python")
    assert line.endswith(command[-1])
    assert not (tmp_path / "out").exists()


PROGRAM = """
import os, signal, sys, threading, time
from drafters.cli.program import keeping, run_program

def main():
    with keeping(lambda: "three shards are kept"):
        try:
            os.kill(os.getpid(), signal.{name})
            time.sleep(60)
        finally:
            print("closed")
            {again}

threading.Thread(target=time.sleep, args=(60,)).start()  # as an upload that cannot be stopped
run_program(main)
"""


@pytest.mark.parametrize(
    ("name", "again", "status", "line"),
    [
        ("SIGINT", "", 130, "interrupted; three shards are kept"),
        ("SIGTERM", "", 143, "interrupted; three shards are kept"),
        ("SIGINT", "os.kill(os.getpid(), signal.SIGTERM)", 130, "interrupted; three shards are kept"),
        ("SIGINT", "os.kill(os.getpid(), signal.SIGINT)", 130, "interrupted twice, so left at once"),
    ],
)
def test_what_is_kept(name: str, again: str, status: int, line: str) -> None:
    """Catches files that are not closed, a wait for a thread, and a launcher's SIGTERM that cuts the closing short."""
    code = PROGRAM.format(name=name, again=again or "pass")
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-uc", code], env=environment, capture_output=True, text=True)
    assert done.returncode == status and done.stdout == "closed\n"
    assert done.stderr.startswith(line) and "Traceback" not in done.stderr
    assert time.monotonic() - began < 40


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_under_deepspeed(tmp_path: Path) -> None:
    """Catches an interrupted run under the launcher that does not say what is saved, or says it on every rank."""
    target, begun = tiny_run.save_target(tmp_path / "target"), tmp_path / "begun"
    stores = tiny_run.write_stores(tmp_path / "features", target)
    line = tiny_run.command("eagle", tmp_path, tiny_run.settings(target.name, stores, tmp_path / "out"))
    process = subprocess.Popen(
        ["deepspeed", "--num_gpus", "1", "--master_port", free_port(), *line[1:]],
        env=tiny_run.environment() | importing("tensorboard", begun),  # which only a run that has begun imports
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not begun.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    sent = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the launchers get it, too
    said, _ = process.communicate(timeout=120)
    ours = [line for line in said.splitlines() if line.startswith("interrupted; ")]
    assert len(ours) == 1, said
    assert "to start again: deepspeed --num_gpus 1" in ours[0]
    assert time.monotonic() - sent < 15
