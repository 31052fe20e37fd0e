"""Everything that only a GPU can measure, in parts, the most important first, and one page of goals.

    python -m eval.gpu [--out FOLDER] [--only PART ...] [--again PART ...] [--minutes M] [--list]

Each part is a process of at most four minutes. The same command resumes: a part that is done is not repeated, a part
that failed, was killed or has other commands now is. The page says what a part lacks. ``eval/report/gpu_parts.py`` has
the commands and goals.
"""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    from drafters.cli.program import CommandLine, command, keeping, run_program
    from drafters.common.files import check_folder, replace_json, replace_text
    from eval.report.goals import Ending, Section, page, read_endings
    from eval.report.gpu_parts import GOALS, PARTS, PYTHON
except ModuleNotFoundError as error:
    sys.exit(f"error: not installed: {error.name}; docs/gpu.md lists the packages")

ROOT = Path(__file__).resolve().parents[1]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def run_part(part: Section, folder: Path) -> Ending:
    """Run the part's commands; their output goes to log.txt in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / part.result).unlink(missing_ok=True)  # of an earlier run
    for other in part.remakes:
        shutil.rmtree(ROOT / other, ignore_errors=True)
    lines = [[word.replace("{out}", str(folder)) for word in words] for words in part.commands]
    ended, reason = "done", ""
    began = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        for line in lines:
            if "data_prep.stdlib_corpus" in line and (ROOT / line[-1] / "heldout.jsonl").is_file():
                continue
            status = _run(line, log, part.seconds - (time.monotonic() - began))
            if status is None:
                ended, reason = "out of time", f"stopped after {part.seconds} s; run the same command to resume"
                break
            if status and "eval.lossless" not in line:  # whose status is its verdict, which a goal reads
                ended, reason = "failed", f"{shlex.join(line[1:4])} ended with status {status}"
                break
    if ended == "done" and not (folder / part.result).is_file():
        ended, reason = "failed", f"it left no {part.result}"
    printed = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if ended != "done" and printed:
        reason += f": {printed[-1].strip()[:200]}"
    seconds = round(time.monotonic() - began, 1)
    return Ending(ended=ended, reason=reason, seconds=seconds, commands=part.shown)


def _run(line: list[str], log: Any, seconds: float) -> int | None:
    """Return the exit status, or None after the time limit; a process group of its own is killed as a whole.

    On Linux the process is killed with this one, so that it does not keep the GPU and write into a folder in use again.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    die = (lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)) if sys.platform == "linux" else None
    process = subprocess.Popen(
        line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True, preexec_fn=die
    )
    try:
        return process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(patience)


def run(parts: list[Section], out: Path, again: list[str], minutes: float | None) -> dict[str, Ending]:
    """Run the parts that are not done with their present commands, and write the page after each."""
    began = time.monotonic()
    shown = {part.name: part.shown for part in PARTS}
    outcomes = read_endings(out / "parts.json")
    for name in [name for name, each in outcomes.items() if each.commands and each.commands != shown.get(name)]:
        del outcomes[name]  # measured by other commands, so its figures are not those of the present goals
    for number, part in enumerate(parts, 1):
        if part.name in outcomes and outcomes[part.name].ended == "done" and part.name not in again:
            continue
        if lacking := [name for name in part.needs if find_spec(name) is None]:
            reason = f"needs {' and '.join(lacking)}, not installed here"
            outcome = Ending(ended="skipped", reason=reason)
        elif absent := [name for name in part.files if not (ROOT / name).exists()]:
            outcome = Ending(ended="skipped", reason=f"there is no {absent[0]} (docs/gpu.md)")
        elif minutes is not None and 60 * minutes - (time.monotonic() - began) < part.seconds:
            print(f"{part.name}: not begun, its limit of {part.seconds} s is more than is left", flush=True)
            continue
        else:
            print(f"{number}/{len(parts)} {part.name}: {part.about} (at most {part.seconds} s)", flush=True)
            outcome = run_part(part, out / part.name)
        print(f"    {outcome.ended} {outcome.reason}", flush=True)
        outcomes[part.name] = outcome
        replace_json(out / "parts.json", {name: each.model_dump() for name, each in outcomes.items()})
        replace_text(out / "gpu.md", page(PARTS, GOALS, out, outcomes))
    replace_text(out / "gpu.md", page(PARTS, GOALS, out, outcomes))
    return outcomes


def gpu_folder() -> str:
    """Return a folder's name for this machine, from another process, so that no GPU memory stays allocated here."""
    question = (
        "import torch; from eval.rooflines.shape_page import machine_folder as f; print(f(), torch.cuda.device_count())"
    )
    answer = subprocess.run([PYTHON, "-c", question], cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ValueError(f"torch cannot be asked what this machine has: {answer.stderr.strip().splitlines()[-1]}")
    name, gpus = answer.stdout.split()[-2:]
    if not int(gpus):
        raise ValueError("no GPU is visible, and all parts need one; --list shows the commands")
    return name


def main(argv: list[str] | None = None) -> int:
    """Run the chosen parts; the exit status is 1 if one of them failed."""
    names = [part.name for part in PARTS]
    parser = CommandLine("eval.gpu", __doc__)
    parser.add_argument("--out", type=Path, help="folder (default: docs/results/<machine>/gpu)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help="parts to run")
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="PART", help="parts to repeat")
    parser.add_argument(
        "--minutes", type=float, help="time for all parts; a part whose limit is longer than the rest is not begun"
    )
    parser.add_argument("--list", action="store_true", help="show the parts and their commands, and run none")
    options = parser.parse(argv)
    if options.list:
        for part in PARTS:
            print(f"{part.name} ({part.seconds} s): {part.about}")
            print(*(f"    {shlex.join(line)}" for line in part.commands), sep="\n")
        return 0
    here = gpu_folder()
    out = options.out or ROOT / "docs" / "results" / here / "gpu"
    check_folder(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if part.name in options.only]
    with keeping(lambda: f"finished parts are kept in {out}; to resume: {command()}"):
        outcomes = run(chosen, out.resolve(), options.again, options.minutes)
    print(f"{out / 'gpu.md'}")
    asked = [outcomes[part.name].ended for part in chosen if part.name in outcomes]
    return int("failed" in asked or "out of time" in asked)


if __name__ == "__main__":
    run_program(main)
