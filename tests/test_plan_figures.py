"""The figures of train.start, computed by hand or by another route."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_start import DATA, config_of, known, plan

from drafters.config import validate
from train.configs import StartConfig
from train.plan import rates
from train.plan.facts import Model, look_at_model, to_be_asked
from train.plan.shares import fixed_steps, share_out


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Model:
    return replace(look_at_model(str(target_folder)), longest=1024, answer=256)


def start(**changes: Any) -> StartConfig:
    return validate(StartConfig, {"target": "t", "data": "d", "out": "o", "minutes": 100} | changes, "test")


# ------------------------------------------------------------------------------------------- shares of the time


def test_the_shares_by_hand(model: Model) -> None:
    """Catches answers, features or passes that are left out of a token's time, and held-out dialogues that cost none.

    Half of the tokens are answers at 800 tokens/s, a tenth more for held-out ones; features at 5,000 and five passes of
    training at 2,000 tokens/s.
    """
    data = replace(DATA, tokens=10**9, answers=5 * 10**8)
    found, fixed = share_out(start(), model, data, known(), 2000.0), fixed_steps(6000.0, "eagle", model, data, known())
    left = 6000.0 - fixed.seconds
    per_token = 1.1 * 0.5 / 800 + 1 / 5000 + 5 / 2000
    assert found.tokens == pytest.approx(left / per_token)
    assert found.answering == pytest.approx(0.5 / 800 * found.tokens)
    assert found.training == pytest.approx(5 / 2000 * found.tokens)
    assert found.heldout == 200
    # The target also asks: 0.1 s for each of 10,000 questions of 10^5 tokens. Its own answers take no time.
    asked = share_out(start(), model, replace(data, asking=0.1), known(), 2000.0)
    left = 6000.0 - fixed.seconds - 10.0  # one more program starts
    assert asked.tokens == pytest.approx(left / (per_token + 1.1 * 0.1 / 10**5))
    own = share_out(start(), model, replace(data, own=True), known(), 2000.0)
    assert own.answering == 0.0 and own.tokens == pytest.approx((left + 10.0) / (1 / 5000 + 5 / 2000))
    few = share_out(start(), model, replace(data, tokens=1000, answers=500), known(), 2000.0)
    others = fixed.seconds + 1000 * (1.1 * 0.5 / 800 + 1 / 5000)
    assert few.tokens == 1000 and few.training == pytest.approx(6000.0 - others)


def test_what_can_be_asked_by_hand(model: Model) -> None:
    """Catches tokens without the questions, unusable questions, and dialogues that there is no time to answer.

    A question of 64 tokens, of which every second can be used, and an answer of 256 take 384 tokens at 800 a second.
    """
    found = to_be_asked("asked.jsonl", 90.0, model, known())
    assert found.dialogues == found.turns == int(5400 / (384 / 800)) == 11_250
    assert (found.tokens, found.answers) == (11_250 * 320, 11_250 * 256)
    assert found.asking == 128 / 800 and found.read.endswith("up to 11,250 questions")


def test_the_seconds_of_the_steps_by_hand(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a step without the start of its program, held-out answers that take no time, and another rate."""
    given = {"minutes": 100, "tokens": 10**9, "answers": 5 * 10**8, "dialogues": 10**6}
    took = plan(model, monkeypatch, tmp_path, **given).seconds
    data = replace(DATA, tokens=10**9, answers=5 * 10**8, dialogues=10**6)
    shares = share_out(start(), model, data, known(), 2000.0)
    assert took == {
        "split": 2 * 1.0,
        "answers": pytest.approx(1.1 * 0.5 * shares.tokens / 800 + 2 * 10),
        "features": pytest.approx(10 + shares.tokens / 5000),
        "train": pytest.approx(10 + 5 * shares.tokens / 2000),
        "speed": shares.report,
        "lossless": shares.certificate,
        "card": 5.0,
    }
    asked = plan(model, monkeypatch, tmp_path, asking=0.1, **given)
    fewer = share_out(start(), model, replace(data, asking=0.1), known(), 2000.0)
    count = round(1.1 * 10**6 * fewer.tokens / 10**9)
    assert config_of(asked, "magpie")["count"] == count
    assert asked.seconds["ask"] == pytest.approx(0.1 * count + 10)


# ------------------------------------------------------------------------------------------- measured rates


class Clock:
    """Seconds that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rates.time, "perf_counter", lambda: self.now)


def test_the_rate_of_forwards_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rate of one row, and the slower of two runs: eight rows of 500 tokens in 4 s, after 10 s."""
    clock, seconds = Clock(monkeypatch), iter([10.0, 4.0])

    def features(block: torch.Tensor) -> Any:
        assert block.shape == (rates.FORWARD // 500, 500)
        clock.now += next(seconds)
        return SimpleNamespace(features=torch.zeros(1, 1, 1))

    target: Any = SimpleNamespace(vocab_size=7, device=torch.device("cpu"), features=features)
    assert rates.prefilled(target, 500) == 8 * 500 / 4.0


def test_the_rate_of_the_lossless_test_by_hand(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches batches of one size only, and texts that nobody judges: half of the tokens at 10 tokens/s in small
    batches, half at 40 in large ones, and all judged at 100."""
    monkeypatch.setattr(rates.TargetModel, "from_pretrained", lambda *given, **named: None)
    monkeypatch.setattr(rates, "make_drafter", lambda *given, **named: None)
    monkeypatch.setattr(rates, "prefilled", lambda target, length: 100.0)
    monkeypatch.setattr(rates, "decoded", lambda target, chain, some, *given: 40.0 if len(some) == 16 else 10.0)
    assert rates.exact_rate(model, [5] * 9) == pytest.approx(1 / (0.5 / 10 + 0.5 / 40 + 1 / 100))
