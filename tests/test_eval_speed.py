"""`python -m eval.speed` from a config file to a report, on a tiny target."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from test_eval_prompts import sharegpt, tiny_tokenizer, write
from transformers import PreTrainedModel

import eval.measure.lineup
import eval.speed
from drafters import Drafter, TargetModel
from drafters.loop.acceptance import Rule, Verdict
from drafters.loop.call import eos_ids
from drafters.loop.sampling import Sampling
from drafters.methods.autoregressive import AutoregressiveDrafter
from drafters.methods.speculative import SpeculativeDrafter
from eval.configs import TargetEntry
from eval.measure.models import answer_ends

ROW_KEYS = {
    "drafter", "temperature", "lossless", "tau", "tokens_per_second", "speedup", "exact_match", "draft_ms", "verify_ms",
    "other_ms", "prompts", "new_tokens", "tau_without_loops", "speedup_ci", "ctar", "n_alpha", "prefill_ms",
    "perplexity", "overhead", "target_forwards", "tau_by_prompt", "joint_alpha",
    "joules_per_token",
}  # fmt: skip

run = partial(programs.run, eval.speed.main)
pytestmark = pytest.mark.usefixtures("no_picture")  # that of ``finished``, which is made before, is drawn
PAGES = {"report.html", "report.json", "report.md", "prompts.csv"}


@pytest.fixture(scope="module")
def files(
    tiny_checkpoint: Callable[..., Path],
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """A target with its tokenizer, a draft model, and prompts."""
    folder = tmp_path_factory.mktemp("speed")
    tiny_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    records = [sharegpt(f"w{i} w{2 * i} w7", "w1") for i in range(8)]
    prompts = write(folder / "prompts.jsonl", records)
    return {"folder": folder, "target": folder / "target", "draft": tiny_checkpoint("llama", 1), "prompts": prompts}


def config_for(files: dict[str, Path], out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "target": {"path": str(files["target"]), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(files["prompts"]), "count": 4},
        "drafters": [
            {"label": "draft model", "drafter": "speculative", "draft_model": str(files["draft"]), "gamma": 3}
        ],
        "out": str(out),
        "max_new_tokens": 12,
        "rounds": 3,
        "warmup": 1,
        **changes,
    }


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One run over two temperatures and three rounds."""
    folder = tmp_path_factory.mktemp("run")
    assert run(config_for(files, folder / "out")) == 0
    return folder / "out", strict((folder / "out" / "report.json").read_text())


def test_report_has_every_field(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a report that another program cannot rely on: a missing key, a NaN, a row too many or too few."""
    out, report = finished
    assert {(row["drafter"], row["temperature"]) for row in report["rows"]} == {
        (name, temperature) for name in ("autoregressive", "draft model") for temperature in (0.0, 1.0)
    }
    assert all(row.keys() >= ROW_KEYS for row in report["rows"])
    facts = report["environment"]
    assert facts["dtype"] == "float32"
    assert facts["batch"] == 1
    assert facts["prompt_set"]["prompts"] == 4
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["config"]["drafters"][0]["gamma"] == 3  # the report has a drafter's own options, too
    assert all(row["perplexity"] > 1 for row in report["rows"])
    assert [b["temperature"] for b in report["baseline"]["temperatures"]] == [0.0, 1.0]
    assert all(b["stock_generate_tokens_per_second"] > 0 for b in report["baseline"]["temperatures"])
    assert "draft model" in (out / "report.md").read_text()
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_figures_agree_with_each_other_and_with_the_journal(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches step counts off by one, tokens of one side only, and a speedup over something else than the baseline."""
    out, report = finished
    plain = {row["temperature"]: row for row in report["rows"] if row["drafter"] == "autoregressive"}
    for row in report["rows"]:
        assert row["tau"] == pytest.approx(row["decoded_tokens"] / row["steps"])
        assert row["decoded_tokens"] == row["new_tokens"] - row["prompts"]
        step = sum(row[part] for part in ("draft_ms", "verify_ms", "other_ms"))
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["tau"] / step)
        assert 0 < row["overhead"] < 1
        assert (row["exact_match"] is None) == (row["temperature"] > 0)
    assert all((row["tau"], row["speedup"], row["speedup_ci"]) == (1.0, 1.0, [1.0, 1.0]) for row in plain.values())
    head, *lines = [json.loads(line) for line in (out / "measurements.jsonl").read_text().splitlines()]
    assert head["environment"]["commit"] == report["environment"]["commit"]
    assert len(lines) == (2 + 2 + 2) * 4 * 3  # two drafters and stock generate, two temperatures, prompts, rounds
    assert all(line["wall_seconds"] >= line["prefill_seconds"] + line["decode_seconds"] for line in lines)
    assert all(sum(line["committed"]) == line["new_tokens"] - 1 for line in lines if "committed" in line)
    greedy = {(line["method"], line["index"], line["round"]): line for line in lines if line["temperature"] == 0}
    pairs = [
        [
            tuple(greedy[name, i, round_]["decode_seconds"] for name in ("draft model", "autoregressive"))
            for i in range(4)
        ]
        for round_ in range(3)
    ]
    typical = [sorted(rounds, key=lambda pair: pair[1] / pair[0])[1] for rounds in zip(*pairs, strict=True)]
    expected = sum(plain for _, plain in typical) / sum(own for own, _ in typical)  # the tokens are the same
    assert report["rows"][1]["speedup"] == pytest.approx(expected)


def test_float32_is_exact(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a loop whose plain decoding differs from stock generate's, or a drafter that differs from it."""
    _, report = finished
    greedy = [row for row in report["rows"] if row["temperature"] == 0]
    assert [row["exact_match"] for row in greedy] == [1.0, 1.0]
    assert report["baseline"]["stock_generate_exact_match"] == 1.0


class Wrong(AutoregressiveDrafter):
    """Commits token 50 at every step."""

    def rule(self, sampling: Sampling) -> Rule:
        right = super().rule(sampling)

        def wrong(*arguments: Any) -> Verdict:
            verdict = right(*arguments)
            verdict.tokens[0][-1] = 50
            return verdict

        return wrong


def make_wrong(name: str, target: TargetModel, **options: Any) -> Drafter:
    return Wrong.from_options(target) if name == "speculative" else AutoregressiveDrafter.from_options(target)


def test_a_wrong_drafter_is_caught(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an exact_match that is computed from the method's own output, or that is not shown."""

    monkeypatch.setattr(eval.measure.lineup, "make_drafter", make_wrong)
    config = config_for(files, tmp_path / "out", temperatures=[0.0], rounds=1)
    assert run(config) == 0
    report = strict((tmp_path / "out" / "report.json").read_text())
    plain, wrong = report["rows"]
    assert (plain["exact_match"], wrong["exact_match"]) == (1.0, 0.0)
    assert wrong["divergences"]["unexplained"] == 4
    assert "a fault in the method" in (tmp_path / "out" / "report.md").read_text()
    assert "a fault in the method" in capsys.readouterr().out


def test_an_answer_ends_where_the_template_says(files: dict[str, Path], tmp_path: Path) -> None:
    """Catches speeds of text behind the answers: of a target whose EOS is not its template's end of turn."""
    shutil.copytree(files["target"], tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{% endfor %}", "{{ '<pad> ' }}{% endfor %}")
    tokenizer.save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    own = eos_ids(target, None)
    ends = [answer_ends(TargetEntry(path=str(path)), target) for path in (files["target"], target.name)]
    assert ends == [own, own | {tokenizer.pad_token_id}] and tokenizer.pad_token_id not in own


def test_a_failed_run_leaves_the_report_before_it_and_its_own_journal(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a good report deleted when the next run starts, and a journal lost to the run after it; without plain
    decoding nothing can be said."""
    out = tmp_path / "out"
    config = config_for(files, out, temperatures=[0.0], rounds=1, max_new_tokens=4)
    assert run(config) == 0
    finished = {path.name: path.read_bytes() for path in out.iterdir()}
    assert finished.keys() == PAGES | {"speedup.png", "measurements.jsonl"}

    propose, steps = AutoregressiveDrafter.propose, 0

    def fail(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 8:  # the warm-up and a prompt have at most three each
            raise torch.OutOfMemoryError("out of memory")
        return propose(*arguments)

    monkeypatch.setattr(AutoregressiveDrafter, "propose", fail)
    for _ in range(2):
        assert run(config) == 1
        assert "out of memory" in capsys.readouterr().err
        left = {path.name: path.read_bytes() for path in out.iterdir()}
        assert left.items() >= finished.items()
        assert len(left) == len(finished) + 1


def test_a_drafter_that_fails_has_no_figures_and_the_others_go_on(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a night's run ended by one drafter, a failure that counts as a speed, and one that is run on and on."""
    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:  # the warm-up and a prompt have at most three each
            raise torch.OutOfMemoryError("out of memory")
        return propose(*arguments)

    propose = SpeculativeDrafter.propose
    monkeypatch.setattr(SpeculativeDrafter, "propose", fail)
    config = config_for(files, tmp_path / "out", temperatures=[0.0], rounds=1, max_new_tokens=4)
    config["drafters"].append({"drafter": "prompt_lookup"})
    assert run(config) == 0
    report = strict((tmp_path / "out" / "report.json").read_text())
    assert [row["drafter"] for row in report["rows"]] == ["autoregressive", "prompt_lookup"]
    (failure,) = report["failures"]
    assert failure["drafter"] == "draft model" and "OutOfMemoryError: out of memory (" in failure["reason"]
    assert calls == 6
    assert "draft model, T = 0: no figures, it failed on prompt" in (tmp_path / "out" / "report.md").read_text()


def test_stock_acceleration_is_reported_beside_the_drafters(files: dict[str, Path], tmp_path: Path) -> None:
    """Catches rows of transformers' own methods without a mark, with a tau that was not measured, or left unpaired."""
    stock = [
        {"label": "assisted", "assistant_model": str(files["draft"]), "num_assistant_tokens": 3},
        {"label": "lookup", "prompt_lookup_num_tokens": 3},
    ]
    config = config_for(files, tmp_path / "out", stock=stock, rounds=1)
    config["prompts"]["count"] = 2
    assert run(config) == 0
    report = strict((tmp_path / "out" / "report.json").read_text())
    rows = {(row["drafter"], row["temperature"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 8
    for label in ("assisted", "lookup"):
        greedy, sampled = rows[label, 0.0], rows[label, 1.0]
        assert greedy["stock"] and greedy["lossless"]
        assert (greedy["exact_match"], sampled["exact_match"]) == (1.0, None)
        assert greedy["tau"] is greedy["draft_ms"] is greedy["overhead"] is None
        assert greedy["speedup"] > 0 and sampled["speedup"] > 0
        base = rows["autoregressive", 0.0]["tokens_per_second"]
        assert greedy["speedup"] == pytest.approx(greedy["tokens_per_second"] / base)
        assert greedy["perplexity"] == pytest.approx(rows["autoregressive", 0.0]["perplexity"])
        assert f"| {label} (stock) | 0 | - |" in (tmp_path / "out" / "report.md").read_text()
    assert not rows["draft model", 0.0]["stock"]
