"""Everything that only a GPU can measure, in parts, the most important first, and one page of goals.

    python -m eval.gpu [--out FOLDER] [--only PART ...] [--again PART ...] [--minutes M] [--list]

Each part is a process with a time limit; all limits together are under 40 minutes. The same command resumes: a part
that is done is not repeated, a part that failed or was killed is. The page says what a part lacks.

Contents: PARTS (the commands), GOALS (the figures and their bounds), then the functions that run them.
"""

import contextlib
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

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder, replace_json, replace_text
from eval.report.goals import Ending, Goal, Section, page, read_endings
from eval.report.tables import tail

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
CORPUS = "runs/stdlib"  # the configs read it there

_ROOFLINE = "python -m eval.roofline --shape llama-7b out={out}"
_TRAINING = "python -m train.tools.throughput --rounds 7 --steps 8 --out {out}/throughput.json --shape hidden=4096"
_CORPUS = f"python -m data_prep.stdlib_corpus --out {CORPUS}"
_FEATURES = "--config configs/features/stdlib.yaml device=cuda"
_EAGLE = "train/eagle.py --config configs/eagle/stdlib.yaml out={out}/run features={out}/features"


def _lines(*commands: str) -> list[list[str]]:
    return [[PYTHON if word == "python" else word for word in command.split()] for command in commands]


PARTS = [
    Section("exact", "every method's tokens on captured forwards are the CPU's; memory does not grow",
         _lines("python tests/gpu_exact.py --out {out}/exact.json"), "exact.json", 180,
         needs=("pytest",)),
    Section("roofline", "decoding against the memory bandwidth: 6.7B Llama shape, bf16, 1k context",
         _lines(f"{_ROOFLINE} compiled=false"), "roofline-llama-7b.json", 400),
    Section("train-7b", "training beside the plain formulation: the head of a 7B target",
         _lines(f"{_TRAINING},vocab=32000,heads=32,kv_heads=32,intermediate=11008"), "throughput.json", 200),
    Section("train-128k", "training beside the plain formulation: a vocabulary of 128k",
         _lines(f"{_TRAINING},vocab=128256,heads=32,kv_heads=8,intermediate=14336"), "throughput.json", 240),
    Section("speed", "the shipped models, every method, greedy and sampled",
         _lines(_CORPUS, "python -m eval.speed --config configs/speed/stdlib.yaml target.device=cuda prompts.count=8 "
                         "out={out}"), "report.json", 420),
    Section("fused", "the same decoding without graphs",
         _lines(f"{_ROOFLINE} engine=fused stock=false"), "roofline-llama-7b.json", 130),
    Section("int8", "weights in int8", _lines(f"{_ROOFLINE} quantize=int8"), "roofline-llama-7b-int8.json", 130),
    Section("int4", "weights in int4", _lines(f"{_ROOFLINE} quantize=int4"), "roofline-llama-7b-int4.json", 130),
    Section("compiled", "stock generate on a compiled static cache",
         _lines(f"{_ROOFLINE} compiled=true rows=[1] batches=[1] rounds=1"), "roofline-llama-7b.json", 180),
    Section("run", "memory and speed of a training run (its estimate is in the part's log)",
         _lines(_CORPUS, f"python -m data_prep.features {_FEATURES} limit=500 heldout_dialogues=16 "
                "out={out}/features",
                f"python {_EAGLE} --dry-run --measure", f"deepspeed {_EAGLE} minutes=1"),
         "run/summary.json", 200, needs=("deepspeed", "datasets")),
]  # fmt: skip

Figure = Callable[[dict[str, Any]], float | None]


def _row(method: str, key: str) -> Figure:
    return lambda report: next((row.get(key) for row in report["rows"] if row["method"] == method), None)


def _rows(count: int) -> Figure:
    return lambda report: next((row["seconds"] for row in report["verification_seconds"] if row["rows"] == count), None)


def _ratio(above: Figure, below: Figure) -> Figure:
    def figure(report: dict[str, Any]) -> float | None:
        one, other = above(report), below(report)
        return one / other if one and other else None

    return figure


def _unexplained(report: dict[str, Any]) -> float:
    rows = [row for row in report["rows"] if row["lossless"] and row.get("divergences")]
    return float(sum(r["divergences"]["unexplained"] for r in rows if tail(r["divergences"], r["prompts"]) is None))


def _fastest(report: dict[str, Any]) -> float:
    return max(row["speedup"] for row in report["rows"] if row["lossless"] and row["temperature"] == 0)


_SPEED = _row("plain decoding", "tokens_per_second")
_TREE, _KANGAROO = "EAGLE static tree, replay", "Kangaroo, exit 2, replay"
_STOCK = _row("stock generate", "tokens_per_second")
_COMPILED = _row("stock generate, compiled static cache", "tokens_per_second")
_SHARE, _WHOLE = "{:.1%}", "{:.0f}"
GOALS = [
    Goal("exact", "runs whose tokens are not the CPU's", lambda f: sum(not row["same"] for row in f["rows"]), 0, False,
         _WHOLE),
    Goal("exact", "forwards captured for an EAGLE tree", lambda f: f["steady"]["captured"], 1, form=_WHOLE),
    Goal("exact", "device memory segments more after a prompt in the steady state",
         lambda f: f["steady"]["segments_after"] - f["steady"]["segments_before"], 0, False, _WHOLE),
    Goal("exact", "DFlash's flex_attention from matrix products, of the largest gradient",
         lambda f: max(f["blocks"]["apart"]), 0.02, False, "{:.4f}"),
    Goal("exact", "time of DFlash's attention by matrix products over flex_attention",
         lambda f: f["blocks"]["products"]["seconds"] / f["blocks"]["flex"]["seconds"], 2.0),
    Goal("roofline", "plain decoding, of the measured bandwidth", _row("plain decoding", "roofline_share"), 0.80,
         form=_SHARE),
    Goal("roofline", "plain decoding over stock eager generate", _ratio(_SPEED, _STOCK), 4.0),
    Goal("roofline", "26 rows against one row", _ratio(_rows(26), _rows(1)), 1.15, False),
    Goal("roofline", "60 rows against one row", _ratio(_rows(60), _rows(1)), 1.30, False),
    Goal("roofline", "EAGLE static tree over plain decoding", _row(_TREE, "speedup"), 2.6),
    Goal("roofline", "EAGLE static tree, of its formula's limit", _row(_TREE, "limit_share"), 0.92, form=_SHARE),
    Goal("roofline", "EAGLE static tree, host time of a step", _row(_TREE, "overhead"), 0.03, False, _SHARE),
    Goal("roofline", "Kangaroo, of its formula's limit", _row(_KANGAROO, "limit_share"), 0.92, form=_SHARE),
    Goal("roofline", "EAGLE in batches of four over plain decoding", _row(f"{_TREE}, batch 4", "speedup"), 2.0),
    Goal("train-7b", "MFU for the head of a 7B target", lambda f: f[f["sides"][0]]["mfu"], 0.45, form=_SHARE),
    Goal("train-7b", "tokens/s over the plain formulation", lambda f: f["ratio"]),
    Goal("train-128k", "tokens/s over the plain formulation at a vocabulary of 128k", lambda f: f["ratio"], 1.5),
    Goal("train-128k", "peak memory, of the plain formulation's", lambda f: f.get("peak_ratio"), 1 / 3, False),
    Goal("speed", "divergences of lossless methods that no tie explains", _unexplained, 0, False, _WHOLE),
    Goal("speed", "the fastest lossless method over plain decoding, greedy", _fastest),
    Goal("fused", "plain decoding without graphs, tokens/s", _SPEED, form="{:.1f}"),
    Goal("int8", "plain decoding in int8, tokens/s", _SPEED, form="{:.1f}"),
    Goal("int4", "plain decoding in int4, tokens/s", _SPEED, form="{:.1f}"),
    Goal("compiled", "plain decoding over compiled stock generate", _ratio(_SPEED, _COMPILED)),
    Goal("run", "a training run's tokens/s", lambda f: f["speed"]["tokens_per_second"], form="{:,.0f}"),
    Goal("run", "a training run's peak memory, GB", lambda f: f["speed"]["peak_memory_gb"]),
]  # fmt: skip


def run_part(part: Section, folder: Path) -> Ending:
    """Run the part's commands; their output goes to log.txt in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [[word.replace("{out}", str(folder)) for word in words] for words in part.commands]
    ended, reason = "done", ""
    began = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        for line in lines:
            if "data_prep.stdlib_corpus" in line and (ROOT / CORPUS / "heldout.jsonl").is_file():
                continue
            status = _run(line, log, part.seconds - (time.monotonic() - began))
            if status is None:
                ended, reason = "out of time", f"stopped after {part.seconds} s; run the same command to resume"
                break
            if status and "--dry-run" not in line:  # the status of a dry run says what is missing
                ended, reason = "failed", f"{shlex.join(line[1:4])} ended with status {status}"
                break
    if ended == "done" and not (folder / part.result).is_file():
        ended, reason = "failed", f"it left no {part.result}"
    printed = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if ended != "done" and printed:
        reason += f": {printed[-1].strip()[:200]}"
    shown = [shlex.join(["python", *line[1:]] if line[0] == PYTHON else line) for line in lines]
    seconds = round(time.monotonic() - began, 1)
    return Ending(ended=ended, reason=reason, seconds=seconds, commands=shown)


def _run(line: list[str], log: Any, seconds: float) -> int | None:
    """Return the exit status, or None after the time limit; a process group of its own is killed as a whole."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
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
    """Run the parts that are not done, and write the page after each."""
    began = time.monotonic()
    outcomes = read_endings(out / "parts.json")
    for number, part in enumerate(parts, 1):
        if part.name in outcomes and outcomes[part.name].ended == "done" and part.name not in again:
            continue
        if lacking := [name for name in part.needs if find_spec(name) is None]:
            reason = f"needs {' and '.join(lacking)}, not installed here"
            outcome = Ending(ended="skipped", reason=reason)
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
    """Run the chosen parts; the exit status is 1 if a part failed."""
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
    return int(any(outcome.ended in ("failed", "out of time") for outcome in outcomes.values()))


if __name__ == "__main__":
    run_program(main)
