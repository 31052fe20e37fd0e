"""`make gpu`: its commands are ones that their programs take, its page says what was met, a killed run goes on."""

import sys
from functools import partial
from pathlib import Path

import gpu_exact
import pytest
from simulated_cuda import simulated_cuda

import eval.gpu
import eval.roofline
import eval.speed
import train.bench.report
import train.tools.throughput
from data_prep.configs import FeaturesConfig
from drafters.config import load_config
from eval.gpu import GOALS, PARTS
from eval.report.goals import Ending, Section, judge
from train.configs import schema_of
from train.preflight.command import parse_arguments


def made(name: str, *words: str, needs: tuple[str, ...] = (), seconds: int = 60) -> Section:
    """A part that runs a line of Python."""
    return Section(name, "a test", [[sys.executable, "-c", *words]], "found.json", seconds, needs=needs)


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
    which has no backward pass on a CPU, so that they are equal."""
    few = {name: gpu_exact.METHODS[name] for name in ("autoregressive", "kangaroo")}
    monkeypatch.setattr(gpu_exact, "METHODS", few)
    monkeypatch.setattr(gpu_exact, "PROMPTS", gpu_exact.PROMPTS[:1])
    monkeypatch.setattr(gpu_exact, "flex_block_attention", gpu_exact.block_attention)
    monkeypatch.setattr(gpu_exact, "blocks", partial(gpu_exact.blocks, 2, 1, 16, (40, 20)))
    (tmp_path / "exact").mkdir()
    with simulated_cuda():
        gpu_exact.main(["--out", str(tmp_path / "exact" / "exact.json"), "--new-tokens", "6"])
    outcomes = {"exact": Ending(ended="done")}
    judged = [judge(goal, PARTS, tmp_path, outcomes) for goal in GOALS if goal.part == "exact"]
    assert [met for _, met in judged[:4]] == ["yes"] * 4 and judged[0][0] == "0"  # the last compares times


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
