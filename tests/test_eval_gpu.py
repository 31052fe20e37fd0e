"""`make gpu`: its commands are ones that their programs take, its page says what was met, a killed run goes on."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import gpu_exact
import pytest
from changed import changes, check_refusals
from simulated_cuda import simulated_cuda

import eval.gpu
import eval.roofline
import eval.speed
import train.bench.report
import train.tools.throughput
from data_prep.configs import FeaturesConfig
from drafters.config import load_config
from eval.gpu import GOALS, PARTS
from eval.report.goals import Ending, Section, judge, read_ending
from eval.report.goals import page as page_of
from train.configs import schema_of
from train.preflight.command import parse_arguments

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "2-core-cpu"
EXAMPLES = {
    "roofline": RESULTS / "roofline-llama-500m.json",
    "fused": RESULTS / "roofline-llama-25m.json",
    "train-7b": RESULTS / "train-throughput-eagle.json",
    "speed": RESULTS / "exactness-float32" / "report.json",
}


def made(name: str, *words: str, needs: tuple[str, ...] = (), seconds: int = 60) -> Section:
    """A part that runs a line of Python."""
    return Section(name, "a test", [[sys.executable, "-c", *words]], "found.json", seconds, needs=needs)


def test_limits() -> None:
    """Catches a part that no single call of ten minutes could finish, and a whole that is longer than was said."""
    assert all(part.seconds < 9 * 60 for part in PARTS) and sum(part.seconds for part in PARTS) <= 40 * 60
    assert {goal.part for goal in GOALS} == {part.name for part in PARTS}
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_programs_take_the_commands(part: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option, a key or a value that its program refuses: on a GPU the part would end in seconds, and
    nothing would be measured."""
    ran: list[str] = []
    steps = {
        "eval.roofline": "eval.rooflines.shape_page.measure_and_write",
        "eval.speed": "eval.report.measured.measure_and_report",
        "train.tools.throughput": "train.bench.report.measure",
    }
    for name, step in steps.items():
        monkeypatch.setattr(step, lambda *given, name=name, **more: ran.append(name) or 0)
    monkeypatch.setattr(FeaturesConfig, "check", lambda config: None)  # that the corpus was written
    monkeypatch.chdir(eval.gpu.ROOT)
    programs = {
        "eval.roofline": eval.roofline,
        "eval.speed": eval.speed,
        "train.tools.throughput": train.tools.throughput,
    }
    line = [word.replace("{out}", str(tmp_path)) for word in part.commands[-1]]
    if line[1] == "-m":
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("")
        more = [f"prompts.file={prompts}"] if line[2] == "eval.speed" else []
        assert not programs[line[2]].main([*line[3:], *more])
        assert len(ran) == 1 and ran[0].startswith(line[2])
    elif "train/eagle.py" in line:
        for words in (line, [word.replace("{out}", str(tmp_path)) for word in part.commands[-2]]):
            given = parse_arguments(None, words[words.index("train/eagle.py") + 1 :])
            load_config(schema_of("eagle"), given.config, given.overrides)
    else:
        assert line[1] == "tests/gpu_exact.py"


def test_the_first_part_on_the_simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a fault in the first part, which would cost time on a rented GPU. Products replace flex_attention,
    which has no backward pass on a CPU, so that they are equal and none is faster."""
    few = {name: gpu_exact.METHODS[name] for name in ("autoregressive", "kangaroo")}
    monkeypatch.setattr(gpu_exact, "METHODS", few)
    monkeypatch.setattr(gpu_exact, "PROMPTS", gpu_exact.PROMPTS[:1])
    monkeypatch.setattr(gpu_exact, "flex_block_attention", gpu_exact.block_attention)
    monkeypatch.setattr(gpu_exact, "blocks", partial(gpu_exact.blocks, 2, 1, 16, (40, 20)))
    (tmp_path / "exact").mkdir()
    with simulated_cuda():
        gpu_exact.main(["--out", str(tmp_path / "exact" / "exact.json"), "--new-tokens", "6"])
    outcomes = {"exact": Ending(part="exact", ended="done")}
    judged = [judge(goal, PARTS, tmp_path, outcomes) for goal in GOALS if goal.part == "exact"]
    assert [met for _, met in judged] == [*["yes"] * 4, "**no**"] and judged[0][0] == "0"


def test_the_page(tmp_path: Path) -> None:
    """Catches a figure that is not where a goal looks for it in the JSON that programs write, and a missing one shown
    as met."""
    outcomes = {}
    for part in PARTS:
        if part.name in EXAMPLES:
            (tmp_path / part.name).mkdir()
            shutil.copy(EXAMPLES[part.name], tmp_path / part.name / part.result)
            outcomes[part.name] = Ending(part=part.name, ended="done", seconds=7.0, commands=["python -m x"])
    outcomes["run"] = Ending(part="run", ended="skipped", reason="needs deepspeed, not installed here")
    page = page_of(PARTS, GOALS, tmp_path, outcomes)
    table = [line for line in page.split("goals met")[0].splitlines() if line.startswith("| ")][2:]
    assert len(table) == len(GOALS)
    lines = {line.split(" | ")[1]: line for line in table}
    for goal in GOALS:
        measured, met = judge(goal, PARTS, tmp_path, outcomes)
        if goal.part in EXAMPLES and "memory" not in goal.text and "MFU" not in goal.text:  # which a CPU does not know
            assert measured and met in ("yes", "**no**", ""), (goal.text, met)
        elif goal.part not in EXAMPLES:
            assert not measured and met != "yes"
    found = json.loads(EXAMPLES["roofline"].read_text())
    plain, stock = (
        next(row["tokens_per_second"] for row in found["rows"] if row["method"] == name)
        for name in ("plain decoding", "stock generate")
    )
    assert f"| ≥ 4.00 | {plain / stock:.2f} |" in lines["plain decoding over stock eager generate"]
    assert "skipped, needs deepspeed" in lines["a training run's tokens/s"]
    assert "not run yet" in lines["forwards captured for an EAGLE tree"]
    held = [goal for goal in GOALS if goal.bound is not None]
    met = sum(judge(goal, PARTS, tmp_path, outcomes)[1] == "yes" for goal in held)
    assert f"{met} of {len(held)} goals met." in page


def test_damaged_results_are_said(tmp_path: Path) -> None:
    """Catches a stack trace that loses the page of hours, for a part of a result that is missing or of another type."""
    goal = next(goal for goal in GOALS if goal.part == "roofline" and goal.bound is not None)
    outcomes, file = (
        {"roofline": Ending(part="roofline", ended="done")},
        tmp_path / "roofline" / "roofline-llama-7b.json",
    )
    row = {"method": "plain decoding", "roofline_share": 0.9}
    right = {"rows": [row]}
    told = set()
    file.parent.mkdir()
    for content in [right, *(changed for _, _, changed in changes(right)), [], 3]:
        file.write_text(json.dumps(content))
        measured, met = judge(goal, PARTS, tmp_path, outcomes)
        assert (met == "yes") == (content == right or measured == "150.0%"), content
        told.add(met)
    assert "not measured: roofline-llama-7b.json does not hold it (found 'text' instead of a number)" in told
    ending = file.with_name("part.json")
    kept = Ending(part="x", ended="done", seconds=1.5, commands=["ls"]).model_dump()
    assert (
        check_refusals(kept, ending, lambda: read_ending(ending)) == 26
    )  # all but values of the right type and missing defaults


def test_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a finished part that is measured again, one that failed and is not, and one that hangs for ever."""
    write = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.write_text('{}'); q = p.with_name('times'); "
    write += "q.write_text(q.read_text() + 'x' if q.exists() else 'x')"
    fails = "import sys, pathlib; sys.exit('no such luck') if not pathlib.Path(sys.argv[1]).exists() else 0"
    parts = [
        made("good", write, "{out}/found.json"),
        made("bad", fails, "{out}/found.json"),
        made("slow", "import time; time.sleep(60)", seconds=1),
        made("poor", "pass", needs=("no_such_module",)),
        made("empty", "pass"),
    ]
    monkeypatch.setattr(eval.gpu, "PARTS", parts)
    monkeypatch.setattr(eval.gpu, "GOALS", [])
    ended = {
        part.name: each for part, each in zip(parts, eval.gpu.run(parts, tmp_path, [], None).values(), strict=True)
    }
    assert [each.ended for each in ended.values()] == ["done", "failed", "out of time", "skipped", "failed"]
    assert ended["bad"].reason.endswith("no such luck") and ended["empty"].reason == "it left no found.json"
    assert "no_such_module" in ended["poor"].reason and ended["slow"].seconds < 20
    (tmp_path / "bad" / "found.json").write_text("{}")
    again = eval.gpu.run(parts[:2], tmp_path, [], None)
    assert again["bad"].ended == "done" and (tmp_path / "good" / "times").read_text() == "x"
    assert again["slow"].ended == "out of time", "what was not asked for keeps its outcome"
    eval.gpu.run(parts[:1], tmp_path, ["good"], None)
    assert (tmp_path / "good" / "times").read_text() == "xx"
    assert eval.gpu.run(parts[:1], tmp_path, ["good"], 0.5) and (tmp_path / "good" / "times").read_text() == "xx"
    assert "| slow | a test | out of time" in (tmp_path / "gpu.md").read_text()
