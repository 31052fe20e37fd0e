"""`python -m eval.speed` from a config file to a report, on a tiny target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_eval_prompts import sharegpt, tiny_tokenizer, write
from transformers import PreTrainedModel

import eval.speed
from drafters import Drafter, TargetModel
from drafters.autoregressive import AutoregressiveDrafter
from drafters.decoding.acceptance import Rule, Verdict
from drafters.decoding.sampling import Sampling
from eval.measure import Limits, stock_method

ROW_KEYS = {
    "drafter", "temperature", "lossless", "tau", "tokens_per_second", "speedup", "exact_match", "draft_ms", "verify_ms",
    "other_ms", "prompts", "new_tokens", "tau_without_loops", "speedup_ci", "ctar", "n_alpha", "prefill_ms",
}  # fmt: skip


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
        "rounds": 2,
        "warmup": 1,
        **changes,
    }


def run(config: dict[str, Any], folder: Path, *overrides: str) -> int:
    path = folder / "speed.yaml"
    path.write_text(yaml.safe_dump(config))
    return eval.speed.main(["--config", str(path), *overrides])


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One run over two temperatures and two rounds."""
    folder = tmp_path_factory.mktemp("run")
    assert run(config_for(files, folder / "out"), folder) == 0
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
    assert facts["config"]["drafters"][0]["gamma"] == 3  # a drafter's own options stand in the report, too
    assert report["baseline"]["stock_generate_tokens_per_second"] > 0
    assert "draft model" in (out / "report.md").read_text()
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_figures_agree_with_each_other_and_with_the_journal(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches step counts off by one, tokens of one side only, and a speedup over something else than the baseline."""
    out, report = finished
    plain = {row["temperature"]: row for row in report["rows"] if row["drafter"] == "autoregressive"}
    for row in report["rows"]:
        assert row["tau"] == pytest.approx(row["decoded_tokens"] / row["steps"])
        assert row["decoded_tokens"] == row["new_tokens"] - row["prompts"]
        base = plain[row["temperature"]]["tokens_per_second"]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / base)
        step = sum(row[part] for part in ("draft_ms", "verify_ms", "other_ms"))
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["tau"] / step)
        assert (row["exact_match"] is None) == (row["temperature"] > 0)
    assert all((row["tau"], row["speedup"], row["speedup_ci"]) == (1.0, 1.0, [1.0, 1.0]) for row in plain.values())
    lines = [json.loads(line) for line in (out / "measurements.jsonl").read_text().splitlines()]
    assert len(lines) == (2 + 2 + 1) * 4 * 2  # two drafters at two temperatures, stock generate at one
    assert all(line["wall_seconds"] >= line["prefill_seconds"] + line["decode_seconds"] for line in lines)
    assert all(sum(line["committed"]) == line["new_tokens"] - 1 for line in lines if "committed" in line)


def test_float32_is_exact(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a loop whose plain decoding differs from stock generate's, or a drafter that differs from it."""
    _, report = finished
    greedy = [row for row in report["rows"] if row["temperature"] == 0]
    assert [row["exact_match"] for row in greedy] == [1.0, 1.0]
    assert report["baseline"]["stock_generate_exact_match"] == 1.0


def test_a_wrong_drafter_is_caught(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an exact_match that is computed from the method's own output, or that nobody gets to see."""

    class Wrong(AutoregressiveDrafter):
        def rule(self, sampling: Sampling) -> Rule:
            right = super().rule(sampling)

            def wrong(*arguments: Any) -> Verdict:
                verdict = right(*arguments)
                verdict.tokens[0][-1] = 50
                return verdict

            return wrong

    def make(name: str, target: TargetModel, **options: Any) -> Drafter:
        return Wrong(target) if name == "speculative" else AutoregressiveDrafter(target)

    monkeypatch.setattr(eval.speed, "make_drafter", make)
    config = config_for(files, tmp_path / "out", temperatures=[0.0], rounds=1)
    assert run(config, tmp_path) == 0
    report = strict((tmp_path / "out" / "report.json").read_text())
    plain, wrong = report["rows"]
    assert (plain["exact_match"], wrong["exact_match"]) == (1.0, 0.0)
    assert wrong["divergences"]["unexplained"] == 4
    assert "a fault in the method" in (tmp_path / "out" / "report.md").read_text()
    assert "a fault in the method" in capsys.readouterr().out


def test_lossy_methods_are_marked(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a lossy method that stands among lossless ones without its mark."""
    monkeypatch.setattr("drafters.speculative.SpeculativeDrafter.lossless", False)
    config = config_for(files, tmp_path / "out", temperatures=[0.0], rounds=1)
    assert run(config, tmp_path) == 0
    assert "draft model (lossy)" in (tmp_path / "out" / "report.md").read_text()
    assert "draft model (lossy)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_new_token=3", "did you mean 'max_new_tokens'"),
        ("prompts.file=nowhere.jsonl", "no prompt file at nowhere.jsonl"),
        ('drafters=[{"drafter": "egle"}]', "no drafter 'egle'"),
        ('drafters=[{"drafter": "eagle", "checkpoint": "./nowhere"}]', "do not exist: eagle: checkpoint './nowhere'"),
        ('drafters=[{"drafter": "autoregressive", "gamma": 3}]', "unknown key 'gamma'"),
        ('drafters=[{"drafter": "eagle"}, {"drafter": "eagle"}]', "set label"),
        ("max_new_tokens=255", "too_long"),
        ("temperatures=[0.0, 0.0]", "must be different"),
    ],
)
def test_bad_input_is_one_message_before_anything_runs(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    """Catches a mistake found only when its drafter's turn comes, after hours, or an older report left to mislead."""
    assert run(config_for(files, tmp_path / "out"), tmp_path, override) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stock_generate_is_timed_without_its_prefill(tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Catches a baseline whose time includes the prefill while the methods' does not."""
    model = tiny_model("llama")
    target = TargetModel(model)
    ids = list(range(3, 60))
    tokens, prefill, decode, _ = stock_method(target, Limits(6))(ids, 0)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=2)
    assert tokens == expected[0, len(ids) :].tolist()
    assert prefill > 0
    assert decode > 0
    _, _, nothing, _ = stock_method(target, Limits(1))(ids, 0)
    assert nothing < prefill
