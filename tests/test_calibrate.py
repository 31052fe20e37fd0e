"""train.tools.calibrate: temperatures of a block drafter's estimated acceptance."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from rigged import dflash, dspark, eagle

from drafters import TargetModel, generate, load_drafter
from drafters.policy.truncation import OnlineAcceptance, Truncation
from train.tools import calibrate
from train.watch import calibration
from train.watch.calibration import Drafts, area_under_curve, calibration_error, figures, fit

PLANTED = [0.5, 1.0, 2.5, 4.0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return tiny_run.save_target(tmp_path_factory.mktemp("target") / "target", "llama")


@pytest.fixture(scope="module")
def features(target: TargetModel) -> Path:
    lengths = {"train": [9], "heldout": [7 + number % 5 for number in range(30)]}
    return tiny_run.write_stores(Path(target.name).with_name("features"), target, lengths)


def planted(drafts: int, seed: int, temperatures: list[float]) -> Drafts:
    """Drafts whose acceptance at each position is sigmoid(logit / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 + 2.5 * torch.randn(drafts, len(temperatures), generator=generator)
    right = torch.rand(logits.shape, generator=generator) < (logits / torch.tensor(temperatures)).sigmoid()
    return Drafts(logits, right.long().cumprod(1).sum(1))


def test_planted_temperatures_are_found() -> None:
    """Catches a temperature that multiplies, one that is fitted without the positions before it, outcomes of another
    position, and an error that stays as it was."""
    found = fit(planted(40_000, 0, PLANTED), True)
    assert found == pytest.approx(PLANTED, rel=0.2)
    judged = figures(planted(20_000, 1, PLANTED), True, found)
    for before, after, planted_one in zip(judged["ece_before"], judged["ece_after"], PLANTED, strict=True):
        assert after < 0.02 and (planted_one == 1.0 or after < 0.6 * before)
    assert judged["pooled"]["ece_after"] < 0.3 * judged["pooled"]["ece_before"]
    assert all(after > before - 0.005 for before, after in zip(judged["auc_before"], judged["auc_after"], strict=True))


def test_positions_that_few_drafts_reach() -> None:
    """Catches a temperature fitted on a handful of drafts."""
    drafts = planted(400, 0, [2.0, 1.0, 1.0])
    drafts.accepted.clamp_(max=1)  # nothing reaches the last position
    assert drafts.reached[1] > calibration.FEWEST > drafts.reached[2] == 0
    found = fit(drafts, True)
    assert found[2] == found[1] and found[0] == pytest.approx(2.0, rel=0.4)


def test_max_q_is_bounded_as_truncate_reads_it() -> None:
    """Catches temperatures that are fitted on logits of max q above 8, which the online estimate takes for 8."""
    generator = torch.Generator().manual_seed(0)
    logits = 10 + 4 * torch.rand(4000, 1, generator=generator)
    right = torch.rand(logits.shape, generator=generator) < torch.tensor(8.0 / 4.0).sigmoid()
    drafts = Drafts(logits, right.long().sum(1))
    assert fit(drafts, False) == pytest.approx([4.0], rel=0.1)
    assert fit(drafts, True)[0] > 5.5
    judged = figures(drafts, False, fit(drafts, False))
    assert judged["ece_after"][0] < 0.02 < judged["ece_before"][0]


def test_figures_by_hand() -> None:
    """Catches bins that cut off 1, an error that is not weighted by its bin, and ties that count as right."""
    chances = torch.tensor([0.99, 1.0, 0.5, 0.5, 0.01])
    right = torch.tensor([True, False, True, False, False])
    # Bins: (1.99 - 1), (1.0 - 1), (0.01 - 0).
    assert calibration_error(chances, right) == pytest.approx((0.99 + 0.0 + 0.01) / 5)
    # Pairs of a right and a wrong one: 0.99 against 1.0, 0.5, 0.01; 0.5 against 1.0, 0.5, 0.01.
    assert area_under_curve(chances, right) == pytest.approx((0 + 1 + 1 + 0 + 0.5 + 1) / 6)
    assert area_under_curve(chances, torch.ones(5, dtype=torch.bool)) is None
    drafts = Drafts(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    assert drafts.survived.tolist() == [[False, False], [True, False], [True, True]] and drafts.reached == [3, 2]


def test_truncation_reads_the_temperatures() -> None:
    """Catches temperatures that are saved and never read, or that learning from outcomes ignores."""
    logits = [2.0, -1.0, 4.0]
    expected = [torch.tensor(one / scale).sigmoid().item() for one, scale in zip(logits, [2.0, 0.5, 4.0], strict=True)]
    for trained in (True, False):
        policy = Truncation(3, trained, [2.0, 0.5, 4.0])
        assert policy.acceptance(logits) == pytest.approx(expected)
    assert OnlineAcceptance(1).values([1.0]) == pytest.approx([torch.tensor(0.3).sigmoid().item()])


def run(folder: Path, features: Path, *more: str) -> None:
    calibrate.main(["--checkpoint", str(folder), "--features", str(features), *more])


MANY = ("--prompts", "30", "--new-tokens", "30", "--temperature", "3")  # hot, so that random heads are accepted


@pytest.mark.parametrize("make", [dspark, dflash])
def test_a_checkpoint(
    target: TargetModel, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any
) -> None:
    """Catches figures of other drafts than the loop's, temperatures that a folder does not load with, and tokens that
    change."""
    make(target, None, "chain").save_pretrained(tmp_path)
    way: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": []}
    prompts = [[5, 6, 7], [8, 9]]
    before = generate(target, load_drafter(str(tmp_path), target, tree="chain"), prompts, **way)
    run(tmp_path, features, *MANY)
    drafter: Any = load_drafter(str(tmp_path), target, tree="chain", truncate=True)
    found = json.loads((tmp_path / "confidence.json").read_text())
    assert drafter.policy.temperatures == found["temperatures"] and len(found["temperatures"]) == drafter.shaper.depth
    assert found["pooled"]["ece_after"] < 0.7 * found["pooled"]["ece_before"] and found["num_samples"] > 100
    assert "pooled" in (shown := capsys.readouterr().out) and f"{found['pooled']['ece_after']:.4f}" in shown
    after = generate(target, load_drafter(str(tmp_path), target, tree="chain"), prompts, **way)
    assert after.tokens.tolist() == before.tokens.tolist() and after.trace.steps == before.trace.steps
    run(tmp_path, features, *MANY)  # again: from the same estimates
    assert json.loads((tmp_path / "confidence.json").read_text()) == found


def test_what_cannot_be_calibrated(target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches hours of decoding before an error, temperatures of a dozen drafts, and a negative number of tokens in a
    message."""
    with pytest.raises(ValueError, match=r"holds no config.json; give the folder"):
        run(tmp_path, features)
    eagle(target, None, "chain").save_pretrained(tmp_path / "eagle")
    with pytest.raises(ValueError, match=r"a drafter of type 'eagle', which estimates no acceptance; give a dflash"):
        run(tmp_path / "eagle", features)
    dspark(target, None, "chain").save_pretrained(tmp_path / "dspark")
    with pytest.raises(ValueError, match=r"half of the 2 prompts.*and a temperature needs 100; raise --prompts"):
        run(tmp_path / "dspark", features, "--prompts", "2", "--new-tokens", "9")
    with pytest.raises(ValueError, match=r"gave 0 drafts of a whole block"):
        run(tmp_path / "dspark", features, "--new-tokens", "3")
    with pytest.raises(ValueError, match=r"--features: none of the 30 .* of 1 to 1 tokens .*; lower --new-tokens"):
        run(tmp_path / "dspark", features, "--new-tokens", "255")
    for tokens, shown in ((256, "256"), (10**9, "1,000,000,000")):
        with pytest.raises(ValueError, match=f"--new-tokens is {shown}, and the context has 256 .*; give at most 255"):
            run(tmp_path / "dspark", features, "--new-tokens", str(tokens))
    for temperature in ("-1.0", "nan", "inf"):
        with pytest.raises(ValueError, match=f"--temperature is {temperature}; give 0"):
            run(tmp_path / "dspark", features, "--temperature", temperature)
    for wrong in ([1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0]):
        with pytest.raises(ValueError, match=r"confidence_temperatures"):
            load_drafter(str(tmp_path / "dspark"), target, confidence_temperatures=wrong)
