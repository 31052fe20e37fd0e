"""python -m eval.gate: what it accepts and refuses, by conversation; and whose answers a store has."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from test_eval_compare import report, tabled
from test_eval_prompts import sharegpt
from test_split import write

from data_prep import inspect
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.store.ownership import Ownership, ownership, spans
from data_prep.store.reader import FeatureStore
from drafters import TargetModel, generate, make_drafter
from drafters.config import validate
from eval.prompts.choice import PromptsConfig
from eval.prompts.prompts import load_prompts
from eval.report import gate
from eval.report.pairs import Read


def measured(tau: float, prompts: int, seed: int = 0) -> Read:
    """A report of a head with this tau, 10% more or less by conversation."""
    found, lines = tabled(report(0, prompts=prompts))
    noise = np.random.default_rng(seed).normal(1, 0.1, prompts)
    for line in (line for line in lines if line["drafter"] == "eagle"):
        line |= {"drafter": gate.LABEL, "tokens": 100.0, "forwards": 100 / (tau * noise[int(line["prompt"][1:])])}
    for row in (row for row in found["rows"] if row["drafter"] == "eagle"):
        row["drafter"] = gate.LABEL
    return found, lines


@pytest.mark.parametrize(
    ("prompts", "traffic", "guard", "accepted"),
    [
        (150, 1.08, 1.0, True),
        (150, 1.0, 1.0, False),  # no gain
        (150, 1.08, 0.97, False),  # a loss on the guard
        (5, 1.08, 1.0, False),  # five conversations cannot be significant
    ],
)
def test_what_is_accepted(prompts: int, traffic: float, guard: float, accepted: bool) -> None:
    """Catches a gate that compares means, that trusts a handful of conversations, or that ignores one of its sets."""
    pairs = {"traffic": (2.0, 2.0 * traffic), "guard": (2.0, 2.0 * guard)}
    rows = [
        gate.row(name, measured(before, prompts, 1), measured(after, prompts, 2), 4.0)
        for name, (before, after) in pairs.items()
    ]
    assert all(row.passed for row in rows) == accepted
    assert rows[0].change == pytest.approx(100 * (traffic - 1), abs=9) and rows[0].conversations == prompts
    said = gate.verdict(rows, accepted, Namespace(drafter="old", changed="new"))
    assert said.startswith("accepted: serve new" if accepted else "refused: old stays")
    assert list(gate.figures(rows)) == [f"tau on {n}, {prompts} conversations" for n in ("new traffic", "the guard")]


@pytest.mark.parametrize(("ratio", "status", "served"), [(1.08, 0, "new"), (0.97, 1, "old")])
def test_the_status_of_the_gate(
    ratio: float, status: int, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a refused head that train.adapt's script certifies and pushes, and a page that says otherwise."""
    reports = {"before": measured(2.0, 150, 1), "after": measured(2.0 * ratio, 150, 2)}
    monkeypatch.setattr(gate, "measure", lambda parsed, name, when, prompts, console: when)
    monkeypatch.setattr(gate, "read", lambda folder: reports[folder])
    parsed = Namespace(drafter="old", changed="new", most_loss=2.0, out=tmp_path, command=["eval.gate"])
    assert gate.run(parsed, {"traffic": PromptsConfig(file="traffic.jsonl")}) == status
    assert json.loads((tmp_path / "gate.json").read_text())["drafter"] == served
    assert ("refused: old stays" in (tmp_path / "gate.md").read_text()) == bool(status)


def test_prompts_of_the_traffic_are_taken_out_of_the_guard(
    target_folder: Path, tmp_path: Path, speed_config: Any
) -> None:
    """Catches a guard that was trained on, advice to lengthen it if all of it was, and a prompt that ends before the
    request that was served."""
    guard, traffic = tmp_path / "guard.jsonl", tmp_path / "traffic.jsonl"
    speed_config([], {})  # writes a target
    write(guard, [sharegpt(f"question {number}", "four") for number in range(6)])
    row = sharegpt(" QUESTION  2", "four")
    turns = [{"from": "gpt", "value": "one", "weight": 0}, {"from": "human", "value": "Why?"}]
    row["conversations"][1:1] = turns
    write(traffic, [row])
    tokenizer = load_tokenizer(str(target_folder)).tokenizer
    limits = {"warmup": 1, "max_new_tokens": 4, "max_context": 100}
    keys = {"file": str(guard), "apart_from": [str(traffic)]}
    found = load_prompts(validate(PromptsConfig, keys, "test"), tokenizer, **limits)
    assert found.skipped == {"asked_elsewhere": 1} and len(found.measured) == 4
    write(traffic, [row, *(sharegpt(f"question {number}", "four") for number in range(6))])
    with pytest.raises(ValueError, match=r"no prompt is left to measure, 6 are also in .*traffic.jsonl"):
        load_prompts(validate(PromptsConfig, keys, "test"), tokenizer, **limits)
    write(traffic, [row])
    served = load_prompts(validate(PromptsConfig, {"file": str(traffic)}, "test"), tokenizer, **limits | {"warmup": 0})
    assert [message["content"].strip() for message in served.measured[0].question] == ["QUESTION  2", "one", "Why?"]


@pytest.mark.parametrize(
    ("answers", "surprising", "is_own"),
    [(35, 2, True), (35, 4, True), (35, 6, False), (400, 20, True), (400, 36, False), (2000, 999, False)],
)
def test_few_answers_may_surprise_by_chance(answers: int, surprising: int, is_own: bool) -> None:
    """Catches a limit of 5% without an interval, which refuses a fifth of the genuine logs of 35 answers."""
    assert Ownership(answers, surprising=surprising).is_own == is_own


def test_whose_answers_they_are(target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches sampled answers that are taken for another model's, and another model's that are trained on."""
    plain = make_drafter("autoregressive", target)

    def answered(temperature: float) -> list[torch.Tensor]:
        keys: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "eos_token_id": []}
        prompts = [[5, 6, 7 + n] for n in range(40)]
        answers = (generate(target, plain, [p], seed=n, **keys).tokens[0] for n, p in enumerate(prompts))
        return [torch.cat([torch.tensor(p), answer]) for p, answer in zip(prompts, answers, strict=True)]

    greedy, sampled = answered(0.0), answered(1.0)
    other = [torch.cat([one[:3], two[3:]]) for one, two in zip(greedy, greedy[1:] + greedy[:1], strict=True)]
    masks = [torch.arange(33) >= 3] * 40
    found = {}
    for name, tokens in (("greedy", greedy), ("sampled", sampled), ("other", other)):
        tiny_run.write_store(tmp_path / name, target, tokens, masks)
        found[name] = ownership(FeatureStore.open(tmp_path / name))
    assert found["greedy"].agreeing == found["greedy"].tokens == 40 * 29  # the last token is left out
    assert found["sampled"].is_own and found["sampled"].agreeing < 0.9 * found["sampled"].tokens
    assert spans(torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)) == [(1, 3), (4, 5)]
    assert inspect.main([str(tmp_path / "sampled"), "--own"]) == 0
    assert "are the target's first choice" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the answers are not this target's own: .* a temperature above 1"):
        inspect.main([str(tmp_path / "other"), "--own"])
    tiny_run.write_store(tmp_path / "short", target, [ids[:4] for ids in greedy], [mask[:4] for mask in masks])
    with pytest.raises(ValueError, match="no answer has two tokens or more, so that none can be tested"):
        inspect.main([str(tmp_path / "short"), "--own"])
