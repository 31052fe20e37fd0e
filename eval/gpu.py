"""Everything that only a GPU can measure, in parts, the most important first, and one page of what was to be reached.

    python -m eval.gpu [--out FOLDER] [--only PART ...] [--again PART ...] [--minutes M] [--list]

Each part is a process of its own with a time limit; all limits together are under 40 minutes. Run again, it goes on: a
part that is done is not repeated, one that failed or was killed is. A part that lacks something says so on the page.

Contents: PARTS is what is run, GOALS what is to be reached, then what runs them. eval/report/gpu.py writes the page.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafters.files import replace_json, replace_text
from drafters.program import command, keeping, run_program
from eval.report.gpu import Goal, Outcome, Part, page

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
CORPUS = "runs/stdlib"  # where the configs look for it


def _module(name: str, *arguments: str) -> list[str]:
    return [PYTHON, "-m", name, *arguments]


def _roofline(*overrides: str) -> list[list[str]]:
    return [_module("eval.roofline", "--shape", "llama-7b", "out={out}", *overrides)]


def _training(shape: str) -> list[list[str]]:
    sizes = ["--tokens", "8192", "--rounds", "7", "--steps", "8", "--out", "{out}/throughput.json"]
    return [_module("train.throughput", "--shape", shape, *sizes)]


_CORPUS = _module("data_prep.stdlib_corpus", "--out", CORPUS)
_FEATURES = ["--config", "configs/features/stdlib.yaml", "device=cuda"]
_EAGLE = ["--config", "configs/eagle/stdlib.yaml", "out={out}/run", "features={out}/features"]

PARTS = [
    Part(
        "exact",
        "every method's tokens on captured forwards are the CPU's; memory stands still",
        [[PYTHON, "tests/gpu_exact.py", "--out", "{out}/exact.json"]],
        "exact.json",
        180,
    ),
    Part(
        "roofline",
        "decoding against the memory bandwidth: 6.7B Llama shape, bf16, 1k context",
        _roofline("compiled=false"),
        "roofline-llama-7b.json",
        400,
    ),
    Part(
        "train-7b",
        "training beside the plain formulation: the head of a 7B target",
        _training("hidden=4096,vocab=32000,heads=32,kv_heads=32,intermediate=11008"),
        "throughput.json",
        200,
    ),
    Part(
        "train-128k",
        "training beside the plain formulation: a vocabulary of 128k",
        _training("hidden=4096,vocab=128256,heads=32,kv_heads=8,intermediate=14336"),
        "throughput.json",
        240,
    ),
    Part(
        "dump",
        "writing features beside the bare target",
        [_CORPUS, _module("data_prep.throughput", *_FEATURES, "limit=2000", "--out", "{out}/dump.json")],
        "dump.json",
        180,
    ),
    Part(
        "speed",
        "the shipped models, every method, greedy and sampled",
        [
            _CORPUS,
            _module(
                "eval.speed",
                "--config",
                "configs/speed/stdlib.yaml",
                "target.device=cuda",
                "prompts.count=8",
                "out={out}",
            ),
        ],
        "report.json",
        420,
    ),
    Part(
        "fused",
        "the same decoding without graphs",
        _roofline("engine=fused", "stock=false"),
        "roofline-llama-7b.json",
        130,
    ),
    Part("int8", "weights in int8", _roofline("quantize=int8"), "roofline-llama-7b-int8.json", 130),
    Part("int4", "weights in int4", _roofline("quantize=int4"), "roofline-llama-7b-int4.json", 130),
    Part(
        "compiled",
        "stock generate on a compiled static cache",
        _roofline("compiled=true", "rows=[1]", "batches=[1]", "rounds=1"),
        "roofline-llama-7b.json",
        180,
    ),
    Part(
        "run",
        "memory and speed of a training run (its estimate is in the part's log)",
        [
            _CORPUS,
            _module("data_prep.features", *_FEATURES, "limit=500", "out={out}/features"),
            [PYTHON, "train/eagle.py", *_EAGLE, "--dry-run", "--measure"],
            ["deepspeed", "train/eagle.py", *_EAGLE, "minutes=1"],
        ],
        "run/summary.json",
        200,
        needs=("deepspeed", "datasets"),
    ),
]


def _row(method: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda found: next((row.get(key) for row in found["rows"] if row["method"] == method), None)


def _over_stock(name: str) -> Callable[[dict[str, Any]], float | None]:
    def figure(found: dict[str, Any]) -> float | None:
        ours, stock = _row("plain decoding", "tokens_per_second")(found), _row(name, "tokens_per_second")(found)
        return ours / stock if ours and stock else None

    return figure


def _verifying(rows: int) -> Callable[[dict[str, Any]], float | None]:
    def figure(found: dict[str, Any]) -> float | None:
        seconds = {row["rows"]: row["seconds"] for row in found["verification_seconds"]}
        return seconds[rows] / seconds[1]

    return figure


def _unexplained(found: dict[str, Any]) -> float:
    exact = [row["divergences"] for row in found["rows"] if row["lossless"] and row.get("divergences")]
    return float(sum(each["unexplained"] for each in exact))


def _fastest(found: dict[str, Any]) -> float:
    return max(row["speedup"] for row in found["rows"] if row["lossless"] and row["temperature"] == 0)


TREE, KANGAROO = "EAGLE static tree, replay", "Kangaroo, exit 2, replay"
GOALS = [
    Goal(
        "exact",
        "runs whose tokens are not the CPU's",
        lambda f: sum(not row["same"] for row in f["rows"]),
        0,
        False,
        "{:.0f}",
    ),
    Goal("exact", "forwards captured for an EAGLE tree", lambda f: f["steady"]["captured"], 1, form="{:.0f}"),
    Goal(
        "exact",
        "device memory segments more after a prompt in the steady state",
        lambda f: f["steady"]["segments_after"] - f["steady"]["segments_before"],
        0,
        False,
        "{:.0f}",
    ),
    Goal(
        "roofline",
        "plain decoding, of the measured bandwidth",
        _row("plain decoding", "roofline_share"),
        0.80,
        form="{:.1%}",
    ),
    Goal("roofline", "plain decoding over stock eager generate", _over_stock("stock generate"), 4.0),
    Goal("roofline", "26 rows against one row", _verifying(26), 1.15, False),
    Goal("roofline", "60 rows against one row", _verifying(60), 1.30, False),
    Goal("roofline", "EAGLE static tree over plain decoding", _row(TREE, "speedup"), 2.6),
    Goal("roofline", "EAGLE static tree, of its formula's limit", _row(TREE, "limit_share"), 0.92, form="{:.1%}"),
    Goal("roofline", "EAGLE static tree, host time of a step", _row(TREE, "overhead"), 0.03, False, "{:.1%}"),
    Goal("roofline", "Kangaroo, of its formula's limit", _row(KANGAROO, "limit_share"), 0.92, form="{:.1%}"),
    Goal("roofline", "EAGLE in batches of four over plain decoding", _row(f"{TREE}, batch 4", "speedup"), 2.0),
    Goal("train-7b", "MFU for the head of a 7B target", lambda f: f[f["sides"][0]]["mfu"], 0.45, form="{:.1%}"),
    Goal("train-7b", "tokens/s over the plain formulation", lambda f: f["ratio"]),
    Goal("train-128k", "tokens/s over the plain formulation at a vocabulary of 128k", lambda f: f["ratio"], 1.5),
    Goal("train-128k", "peak memory, of the plain formulation's", lambda f: f.get("peak_ratio"), 1 / 3, False),
    Goal("dump", "dump, of the bare target's tokens/s", lambda f: f["ratio"], 0.90, form="{:.1%}"),
    Goal("speed", "divergences of lossless methods that no tie explains", _unexplained, 0, False, "{:.0f}"),
    Goal("speed", "the fastest lossless method over plain decoding, greedy", _fastest),
    Goal(
        "fused", "plain decoding without graphs, tokens/s", _row("plain decoding", "tokens_per_second"), form="{:.1f}"
    ),
    Goal("int8", "plain decoding in int8, tokens/s", _row("plain decoding", "tokens_per_second"), form="{:.1f}"),
    Goal("int4", "plain decoding in int4, tokens/s", _row("plain decoding", "tokens_per_second"), form="{:.1f}"),
    Goal(
        "compiled", "plain decoding over compiled stock generate", _over_stock("stock generate, compiled static cache")
    ),
    Goal("run", "a training run's tokens/s", lambda f: f["speed"]["tokens_per_second"], form="{:,.0f}"),
    Goal("run", "a training run's peak memory, GB", lambda f: f["speed"]["peak_memory_gb"]),
]


# ------------------------------------------------------------------------------------------------------- running


def missing(part: Part, gpus: int) -> str | None:
    """What this machine lacks for a part."""
    modules = [name for name in part.needs if find_spec(name) is None]
    if modules:
        return f"needs {' and '.join(modules)}, not installed here"
    return f"needs {part.gpus} GPUs, found {gpus}" if gpus < part.gpus else None


def run_part(part: Part, folder: Path) -> Outcome:
    """Run its commands one after the other, into ``folder``; what they print goes to log.txt there."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [[word.replace("{out}", str(folder)) for word in words] for words in part.commands]
    outcome = Outcome(
        part.name, "done", commands=[shlex.join(["python", *x[1:]] if x[0] == PYTHON else x) for x in lines]
    )
    began = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        for line in lines:
            if "data_prep.stdlib_corpus" in line and (ROOT / CORPUS / "heldout.jsonl").is_file():
                continue
            left = part.seconds - (time.monotonic() - began)
            status = _run(line, log, left)
            if status is None:
                outcome.ended, outcome.reason = "out of time", f"stopped after {part.seconds} s; run again, it goes on"
                break
            if status and "--dry-run" not in line:  # which says with its status what is missing
                outcome.ended, outcome.reason = "failed", f"{shlex.join(line[1:4])} ended with status {status}"
                break
    if outcome.is_done and not (folder / part.result).is_file():
        outcome.ended, outcome.reason = "failed", f"it left no {part.result}"
    if not outcome.is_done and (last := _last_line(folder / "log.txt")):
        outcome.reason += f": {last}"
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _run(line: list[str], log: Any, seconds: float) -> int | None:
    """Its exit status; None where it had to be stopped. Its own process group, so that nothing of it stays."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
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


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


def read_outcome(folder: Path) -> Outcome | None:
    """How a part ended that ran before; None where it never did."""
    file = folder / "part.json"
    return Outcome(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def run(parts: list[Part], out: Path, again: list[str], minutes: float | None, gpus: int) -> dict[str, Outcome]:
    """Run what is not done; the page is written after every part."""
    began = time.monotonic()
    outcomes = {part.name: found for part in PARTS if (found := read_outcome(out / part.name))}
    for number, part in enumerate(parts, 1):
        known = outcomes.get(part.name)
        if known and known.is_done and part.name not in again:
            continue
        left = None if minutes is None else 60 * minutes - (time.monotonic() - began)
        if reason := missing(part, gpus):
            outcome = Outcome(part.name, "skipped", reason)
        elif left is not None and left < part.seconds:
            print(f"{part.name}: not begun, its limit of {part.seconds} s is more than is left", flush=True)
            continue
        else:
            print(f"{number}/{len(parts)} {part.name}: {part.about} (at most {part.seconds} s)", flush=True)
            outcome = run_part(part, out / part.name)
        print(f"    {outcome.ended} {outcome.reason}", flush=True)
        outcomes[part.name] = outcome
        (out / part.name).mkdir(parents=True, exist_ok=True)
        replace_json(out / part.name / "part.json", vars(outcome))
        replace_text(out / "gpu.md", page(PARTS, GOALS, out, outcomes))
    replace_text(out / "gpu.md", page(PARTS, GOALS, out, outcomes))
    return outcomes


# ------------------------------------------------------------------------------------------------------- command


def machine() -> tuple[str, int]:
    """A folder's name for this machine and its number of GPUs, asked of a process that leaves no memory behind.

    Raises:
        ValueError: no GPU is visible.
    """
    question = (
        "import torch; from eval.roofline_run import machine_folder; print(machine_folder(), torch.cuda.device_count())"
    )
    answer = subprocess.run([PYTHON, "-c", question], cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ValueError(f"torch cannot be asked what this machine has: {answer.stderr.strip().splitlines()[-1]}")
    name, gpus = answer.stdout.split()[-2:]
    if not int(gpus):
        raise ValueError("no GPU is visible here, and everything here needs one; --list shows what would be run")
    return name, int(gpus)


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status is 1 where a part failed."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m eval.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="folder (default: docs/results/<machine>/gpu)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help="parts to run")
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="PART", help="parts to repeat")
    parser.add_argument("--minutes", type=float, help="begin no part whose time limit is more than is left of these")
    parser.add_argument("--list", action="store_true", help="show the parts and their commands, and run none")
    given = parser.parse_args(argv)
    if given.list:
        for part in PARTS:
            print(f"{part.name} ({part.seconds} s): {part.about}")
            print(*(f"    {shlex.join(line)}" for line in part.commands), sep="\n")
        return 0
    name, gpus = machine()
    out = given.out or ROOT / "docs" / "results" / name / "gpu"
    out.mkdir(parents=True, exist_ok=True)
    with keeping(lambda: f"finished parts are kept in {out}; to go on: {command()}"):
        outcomes = run(
            [part for part in PARTS if part.name in given.only], out.resolve(), given.again, given.minutes, gpus
        )
    print(f"{out / 'gpu.md'}")
    return int(any(outcome.ended in ("failed", "out of time") for outcome in outcomes.values()))


if __name__ == "__main__":
    run_program(main)
