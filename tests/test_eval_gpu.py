"""`make gpu`: its commands are ones that their programs take, its page says what was met, a killed run goes on."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_exact
import gpu_quantised
import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from simulated_cuda import simulated_cuda

import eval.gpu
import eval.roofline
import eval.speed
import train.bench.report
import train.tools.curve
import train.tools.throughput
from data_prep.configs import FeaturesConfig
from drafters.config import from_overrides, load_config
from eval.configs import LosslessConfig, SpeedConfig
from eval.gpu import GOALS, PARTS
from eval.report.goals import Ending, Section, judge
from eval.report.gpu_parts import LEARNED
from train.configs import schema_of
from train.preflight.command import parse_arguments

# Files that the programs name themselves.
MEASURED_ELSEWHERE = "roofline-llama-7b.json roofline-llama-7b-int8.json roofline-llama-7b-int4.json report.json "
MEASURED_ELSEWHERE += "lossless.json manifest.json"


def made(name: str, *words: str, needs: tuple[str, ...] = (), seconds: int = 60) -> Section:
    """A part that runs a line of Python."""
    return Section(name, "a test", [[sys.executable, "-c", *words]], "found.json", seconds, needs=needs)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_programs_take_the_commands(part: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option, a key or a value that its program refuses: on a GPU the part would end in seconds, and
    nothing would be measured. Also a part of more than four minutes."""
    ran: list[str] = []
    programs: dict[str, tuple[Any, str]] = {
        "eval.roofline": (eval.roofline, "eval.rooflines.shape_page.measure_and_write"),
        "eval.speed": (eval.speed, "eval.report.measured.measure_and_report"),
        "train.tools.throughput": (train.tools.throughput, "train.bench.report.measure"),
    }
    for name, (_, step) in programs.items():
        monkeypatch.setattr(step, lambda *given, name=name, **more: ran.append(name) or 0)
    monkeypatch.setattr(SpeedConfig, "check_paths", lambda config: None)  # heads and prompts of earlier parts
    monkeypatch.chdir(eval.gpu.ROOT)
    assert part.seconds <= 240 and part.result in " ".join(part.commands[-1]) + MEASURED_ELSEWHERE
    for command in part.commands:
        line = [word.replace("{out}", str(tmp_path)) for word in command]
        if line[0] in ("cp", "touch") or line[2] in ("data_prep.stdlib_corpus", "drafters.export"):
            continue  # the rehearsal below runs them
        if line[1] != "-m" and line[1].startswith("train/"):
            given = parse_arguments(None, line[2:])
            load_config(schema_of(Path(line[1]).stem), given.config, given.overrides)
        elif line[1] != "-m":
            assert (eval.gpu.ROOT / line[1]).is_file()
        elif line[2] == "data_prep.features":
            load_config(FeaturesConfig, line[4], line[5:])
        elif line[2] == "eval.lossless":
            from_overrides(LosslessConfig, [f"target.path={line[4]}", "drafter.drafter=dspark", *line[7:]])
        elif line[2] == "train.tools.curve":
            with monkeypatch.context() as elsewhere, pytest.raises(ValueError, match="no folder runs/gpu"):
                elsewhere.chdir(tmp_path)
                train.tools.curve.main(line[3:])
        else:
            assert not programs[line[2]][0].main(line[3:])
            assert ran.pop().startswith(line[2])


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_blocks_have_the_size_of_the_recipe(method: str) -> None:
    """Catches a training speed at blocks of two tokens beside a published one at blocks of seven."""
    recipe = yaml.safe_load((eval.gpu.ROOT / f"configs/{method}/qwen3-8b.yaml").read_text())
    (part,) = (part for part in PARTS if part.name == f"blocks-{method}")
    assert f"block_size={recipe['head']['block_size']}" in part.commands[0]


def test_the_first_part_on_the_simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a fault in the first part, which would cost time on a rented GPU. Products replace flex_attention,
    which has no backward pass on a CPU, so that they are equal."""
    few = {name: gpu_exact.METHODS[name] for name in ("autoregressive", "kangaroo")}
    monkeypatch.setattr(gpu_exact, "METHODS", few)
    monkeypatch.setattr(gpu_exact, "PROMPTS", gpu_exact.PROMPTS[:1])
    monkeypatch.setattr(gpu_exact, "flex_block_attention", gpu_exact.block_attention)
    monkeypatch.setattr(gpu_exact, "blocks", partial(gpu_exact.blocks, 2, 1, 16, (40, 20)))
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 97}
    monkeypatch.setattr(gpu_exact, "OWN", gpu_exact.OWN[:1])
    monkeypatch.setattr(gpu_exact, "own_forwards", partial(gpu_exact.own_forwards, sizes=small))
    (tmp_path / "exact").mkdir()
    with simulated_cuda():
        gpu_exact.main(["--out", str(tmp_path / "exact" / "exact.json"), "--new-tokens", "6"])
    outcomes = {"exact": Ending(ended="done")}
    judged = [judge(goal, PARTS, tmp_path, outcomes) for goal in GOALS if goal.part == "exact"]
    assert [met for _, met in (*judged[:4], judged[5])] == ["yes"] * 5 and judged[0][0] == "0"  # others compare times


def test_quantised_targets_on_a_cpu(tmp_path: Path) -> None:
    """Catches a fault in the part, and goals that do not find their figures."""
    sizes = ["hidden_size=128", "intermediate_size=160", "num_hidden_layers=2", "num_attention_heads=4"]
    words = ["--new-tokens", "4", *sizes, "num_key_value_heads=2", "vocab_size=512"]
    (tmp_path / "quantised").mkdir()
    gpu_quantised.main(["--out", str(tmp_path / "quantised/quantised.json"), "--folder", str(tmp_path), *words])
    outcomes = {"quantised": Ending(ended="done")}
    judged = {goal.text: judge(goal, PARTS, tmp_path, outcomes) for goal in GOALS if goal.part == "quantised"}
    assert judged["fp8: logits from transformers' forward, of the largest"][1] == "yes"
    assert float(judged["fp8: tokens/s over bf16's"][0]) > 0
    if find_spec("compressed_tensors") is None:
        assert "pip install compressed-tensors" in judged["compressed w4a16: tokens/s over bf16's"][1]


def test_a_part_without_quantised_targets_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part that counts as done although it measured bf16 only."""

    def measure(path: Path, new_tokens: int) -> dict[str, Any]:
        if path.name == "bf16":
            return {}
        raise ValueError(f"{path.name} needs a package")

    monkeypatch.setattr(gpu_quantised, "measure", measure)
    monkeypatch.setattr(gpu_quantised, "KINDS", dict.fromkeys(gpu_quantised.KINDS))
    monkeypatch.setattr(gpu_quantised, "write_target", lambda shape, out, changes: None)
    with pytest.raises(SystemExit, match="no quantised target was measured: fp8: ValueError: fp8 needs a package"):
        gpu_quantised.main(["--out", str(tmp_path / "quantised.json"), "--folder", str(tmp_path)])


def test_heads_of_trainings_that_were_cut_off_are_not_measured() -> None:
    """Catches a head that was cut off after its first export, beside others trained for the whole time."""
    parts = {part.name: part for part in PARTS}
    for name in LEARNED:
        *_, mark, copy = parts[f"learned-{name}"].commands
        assert mark[0] == "touch" and copy[0] == "cp", "nothing is marked before the training has ended"
        assert mark[1] in parts["learned-tau"].files
    assert parts["learned-dspark"].commands[1][1] in parts["learned-lossless"].files


TINY = "hidden_size=64 intermediate_size=64 num_hidden_layers=6 num_attention_heads=4 num_key_value_heads=2 head_dim=16"
SMALLER = {
    "limit=200": "limit=12", "heldout_dialogues=16": "heldout_dialogues=4", "batch_tokens=8192": "batch_tokens=1024",
    "minutes=1": "steps=2",
}  # fmt: skip


@pytest.mark.long
def test_rehearsal_of_a_recipe_on_a_cpu(tmp_path: Path) -> None:
    """Catches a fault between two steps of the recipe: features, training, export, its check."""
    (part,) = (part for part in PARTS if part.name == "rehearsal")
    more = {
        "gpu_target.py": [*TINY.split(), "vocab_size=4200"],
        "dspark.py": ["head.mask_token_id=4150", "layers=1", "anchors=16"],
    }
    lines = []
    for line in part.commands:
        line = [SMALLER.get(word, word).replace("runs/", f"{tmp_path}/") for word in line]
        lines.append([*line, *more.get(Path(line[1]).name, [])])
    parts = [replace(part, commands=lines, remakes=())]
    ending = eval.gpu.run_part(parts[0], tmp_path / "out" / "rehearsal")
    assert ending.ended == "done", ending.reason
    speed = next(goal for goal in GOALS if goal.part == "rehearsal")
    assert float(judge(speed, parts, tmp_path / "out", {"rehearsal": ending})[0].replace(",", "")) > 0


def test_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a finished part that is measured again, one that failed and is not, and one that hangs for ever."""
    write = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.write_text('{}'); q = p.with_name('times'); "
    write += "q.write_text(q.read_text() + 'x' if q.exists() else 'x')"
    fails = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); c = p.with_name('cure'); "
    fails += "sys.exit('no such luck') if not c.exists() else c.rename(p)"
    parts = [
        made("good", write, "{out}/found.json"),
        made("bad", fails, "{out}/found.json"),
        made("slow", "import time; time.sleep(60)", seconds=1),
        made("poor", "pass", needs=("no_such_module",)),
        made("empty", "pass"),
    ]
    monkeypatch.setattr(eval.gpu, "PARTS", parts)
    monkeypatch.setattr(eval.gpu, "GOALS", [])
    parts.append(replace(parts[0], name="bare", files=("no/such/answers",)))
    ended = {
        part.name: each for part, each in zip(parts, eval.gpu.run(parts, tmp_path, [], None).values(), strict=True)
    }
    assert [each.ended for each in ended.values()] == ["done", "failed", "out of time", "skipped", "failed", "skipped"]
    assert ended["bad"].reason.endswith("no such luck") and ended["empty"].reason == "it left no found.json"
    assert ended["bare"].reason.startswith("there is no no/such/answers")
    assert "no_such_module" in ended["poor"].reason and ended["slow"].seconds < 20
    (tmp_path / "bad" / "cure").write_text("{}")
    again = eval.gpu.run(parts[:2], tmp_path, [], None)
    assert again["bad"].ended == "done" and (tmp_path / "good" / "times").read_text() == "x"
    assert again["slow"].ended == "out of time", "what was not asked for keeps its outcome"
    monkeypatch.setattr(eval.gpu, "gpu_folder", lambda: "here")
    assert eval.gpu.main(["--out", str(tmp_path), "--only", "good", "--again", "good"]) == 0, "slow was not asked for"
    assert eval.gpu.main(["--out", str(tmp_path), "--only", "good", "empty"]) == 1
    assert (tmp_path / "good" / "times").read_text() == "xx"
    assert eval.gpu.run(parts[:1], tmp_path, ["good"], 0.5) and (tmp_path / "good" / "times").read_text() == "xx"
    assert "| slow | a test | out of time" in (tmp_path / "gpu.md").read_text()


def test_other_commands_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part that counts as done although its commands have changed, also in a call for another part; one that
    is repeated because its folder was moved; and an old result that counts as the new one."""
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    old = [made(name, write, "{out}/found.json", "1") for name in ("one", "two")]
    new = [made(name, write, "{out}/found.json", "2") for name in ("one", "two")]
    monkeypatch.setattr(eval.gpu, "PARTS", old)
    monkeypatch.setattr(eval.gpu, "GOALS", [])
    eval.gpu.run(old, tmp_path / "first", [], None)
    (tmp_path / "first").rename(tmp_path / "moved")
    began = eval.gpu.run_part
    monkeypatch.setattr(eval.gpu, "run_part", lambda part, folder: pytest.fail("repeated"))
    eval.gpu.run(old, tmp_path / "moved", [], None)
    monkeypatch.setattr(eval.gpu, "run_part", began)
    monkeypatch.setattr(eval.gpu, "PARTS", new)
    assert eval.gpu.run(new[:1], tmp_path / "moved", [], None).keys() == {"one"}
    assert (tmp_path / "moved" / "one" / "found.json").read_text() == "2"
    assert "| two | a test | not run yet" in (tmp_path / "moved" / "gpu.md").read_text()
    silent = [made("one", "pass", "{out}/found.json")]
    assert eval.gpu.run(silent, tmp_path / "moved", ["one"], None)["one"].reason == "it left no found.json"


def test_a_missing_package_is_named() -> None:
    """Catches a stack trace on a machine that has torch but not our other packages."""
    code = "import sys, runpy; sys.modules['pydantic'] = None; sys.argv = ['eval.gpu', '--list']; "
    code += "runpy.run_module('eval.gpu', run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=eval.gpu.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and ran.stderr.startswith("error: not installed: pydantic; docs/gpu.md"), ran
    assert ran.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_part_dies_with_eval_gpu(tmp_path: Path) -> None:
    """Catches a part that lives on after kill -9 of eval.gpu, keeps the GPU and writes into a folder in use again."""
    part = "import os, pathlib, time; pathlib.Path('{out}/pid').write_text(str(os.getpid())); time.sleep(60)"
    code = "import sys, pathlib; from eval.gpu import Section, run_part; line = [sys.executable, '-c', sys.argv[1]]; "
    code += "run_part(Section('slow', 'a test', [line], 'found.json', 60), pathlib.Path(sys.argv[2]))"
    process = subprocess.Popen([sys.executable, "-c", code, part, str(tmp_path)], cwd=eval.gpu.ROOT)
    pid = tmp_path / "pid"
    assert wait_for(lambda: pid.is_file() and pid.read_text() != "")
    child = psutil.Process(int(pid.read_text()))
    process.kill()
    process.wait()
    assert wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_for(happened: Callable[[], bool], seconds: float = 30) -> bool:
    """Return whether ``happened`` becomes true in time."""
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)
    return happened()


def test_wheels_are_complete() -> None:
    """Catches a package that a new version of DeepSpeed or pydantic needs, on a machine that cannot fetch it."""
    lines = (eval.gpu.ROOT / "configs/gpu/wheels.txt").read_text().splitlines()
    brought = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    there = {"torch", "numpy", "packaging", "psutil", "tqdm"}  # with torch, transformers and accelerate
    for package in ("deepspeed", "pydantic", "pydantic-core", "typing-inspection"):
        needed = [Requirement(line) for line in requires(package) or []]
        plain = {canonicalize_name(each.name) for each in needed if not each.marker or each.marker.evaluate()}
        assert plain <= brought | there, package


def test_gpu_data_is_what_the_parts_read() -> None:
    """Catches data of another model, which no part of eval.gpu reads."""
    line = ["make", "--dry-run", "gpu-data", "MODEL=qwen"]
    ran = subprocess.run(line, cwd=eval.gpu.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode and "eval.gpu reads SmolLM2" in ran.stderr
