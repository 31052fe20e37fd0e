"""Whose tokens a batch waits for."""

import random
from types import SimpleNamespace
from typing import Any

import conformance
import pytest
import torch
from conformance import NO_EOS, prompt, target_of
from drafters.loop.waiting import CAME, LEAST, Hindsight, trials, weights
from drafters.policy.weighing import Scales
from rigged import auto_eagle
from test_hybrid import CHAIN, costs, hybrid, taught

from drafters import Sampling, TargetModel, generate, generate_many
from drafters.drafting.retrieval import NOTHING, Found
from drafters.loop.state import DecodeState
from drafters.methods.prompt_lookup import PromptLookupDrafter
from drafters.policy.shape import Chooser


def test_a_row_counts_as_it_is_likely_to_be_the_last() -> None:
    """Catches the row that is ahead counted as the one that is behind, weights that do not add up, and a pace believed
    after a step or two.

    At last, by drawing: rows that copy six tokens in some steps, of which one does so more often.
    """
    assert weights([0, 0, 0], [63, 63, 63], 0) == [1.0, 1.0, 1.0]
    assert weights([5, 40], [60, 25], 20) == pytest.approx([2.0, 0.0], abs=0.1)
    early = weights([1, 3], [60, 60], 2)
    assert 1.0 < early[0] < 1.7 and sum(early) == pytest.approx(2.0)
    assert weights([20, 20], [8, 40], 20)[1] == pytest.approx(2.0, abs=0.1)  # its limit is farther away
    draw, last = random.Random(0), 0
    for _ in range(4000):
        steps = []
        for often in (0.1, 0.2):
            left, count = 60, 0
            while left > 0:
                left, count = left - (6 if draw.random() < often else 1), count + 1
            steps.append(count)
        last += steps[0] > steps[1]
    assert weights([1500, 2000], [60, 60], 1000)[0] / 2 == pytest.approx(last / 4000, abs=0.1)


@pytest.mark.parametrize("room", [64, 256, 1024])
def test_what_is_said_to_be_the_last_row_is(room: int) -> None:
    """Catches one lucky copy among the first steps that makes the other row all that counts, however far its end is.

    Two rows of one kind: six tokens in a tenth of the steps.
    """
    draw, said, was = random.Random(1), 0.0, 0

    def tokens() -> int:
        return 6 if draw.random() < 0.1 else 1

    for _ in range(600):
        made = [sum(tokens() for _ in range(10)) for _ in range(2)]
        left, steps = [room - each for each in made], [0, 0]
        known = weights(made, left, 10)
        for row in range(2):
            while left[row] > 0:
                left[row], steps[row] = left[row] - tokens(), steps[row] + 1
        likely = 0 if known[0] > known[1] else 1
        said += known[likely] / 2
        was += steps[likely] > steps[1 - likely]
    assert said < was + 0.15 * 600


def test_finished_rows_and_those_that_are_refilled(target: TargetModel) -> None:
    """Catches a batch that waits for rows which have ended, and one whose rows go to others that waits at all."""
    prompts, how = [[1, 2], [3], [4, 5, 6]], (64, 16, Sampling(), torch.Generator(), frozenset[int]())
    state = DecodeState.of(target, prompts, *how)
    state.steps = 8
    for row, count in enumerate((9, 2, 12)):
        state.append(row, [7] * count)
    assert state.weights()[1] > 1.5 and sum(state.weights()) == pytest.approx(3)
    state.append(1, [7] * 14)
    assert state.finished == [False, True, False] and state.waits
    assert state.weights()[1] == 0.0 and sum(state.weights()) == pytest.approx(2)
    assert trials(state.weights()) == pytest.approx([each / max(state.weights()) for each in state.weights()])
    assert max(trials(state.weights())) == 1.0
    state.append(0, [7] * 7)
    state.append(2, [7] * 4)
    assert all(state.finished) and state.weights() == trials(state.weights()) == [0.0] * 3
    state.refilled = True
    assert state.weights() == [1.0] * 3 and not state.waits
    alone = DecodeState.of(target, prompts[:1], *how)
    assert alone.weights() == [1.0] and not alone.waits


def test_nothing_is_drafted_for_rows_that_nobody_waits_for() -> None:
    """Catches drafts that bring one row to its end early and the batch to its end late.

    Four rows of 64 tokens, of which one copies with success; a node costs a twentieth of a step.
    """

    def seconds(weighed: bool) -> float:
        scales = Scales(costs(0.05))
        for match in (3, 4, 5, 6):
            taught(scales.trust, match, 0.9)
        made, spent, steps = [0] * 4, 0.0, 0
        while (going := [row for row in range(4) if made[row] < 64]) != []:
            found = [CHAIN if row == 0 and row in going else NOTHING for row in range(4)]
            each = weights([made[row] for row in going], [64 - made[row] for row in going], steps)
            known = dict(zip(going, each, strict=True)) if weighed else {}
            kept = scales.best_parts(found, len(going), [known.get(row, 1.0) for row in range(4)])
            drafted = max(len(one.tokens) for one in kept)
            if not drafted:
                scales.note_plain()
            spent, steps = spent + 1 + 0.05 * drafted, steps + 1
            for row in going:
                made[row] += 1 + len(kept[row].tokens)
            scales.settle(len(kept[0].tokens))
        return spent

    assert seconds(weighed=True) < 65.5 < 66.5 < seconds(weighed=False)


def test_hindsight_goes_by_the_row_that_was_the_last() -> None:
    """Catches a share of what all rows got, of steps that promised nothing, of a batch that is not over, and distrust
    that never fades.

    By hand: two batches, in which 6 tokens were promised. The row that was ahead got 9 and the last row 1, then 6.
    """
    one = Hindsight()
    assert one.share == CAME
    for made in ([4, 1], [4, 2], [4, 1]):
        one.step(2.0, made, [False, False])
        one.step(0.0, [1, 1], [False, False])
    one.step(0.0, [0, 1], [True, False])
    assert one.share == CAME
    one.settle()
    after = (0.9 * 8 * CAME + 1) / (0.9 * 8 + 6)
    assert one.share == pytest.approx(after) and after < CAME
    one.settle()  # nothing has come since
    assert one.share == pytest.approx(after)
    one.step(6.0, [1, 7], [False, False])
    one.step(0.0, [0, 2], [True, False])
    one.settle()
    assert one.share == pytest.approx((0.9 * (0.9 * 8 * CAME + 1) + 6) / (0.9 * (0.9 * 8 + 6) + 6))
    for share, more in ((LEAST, 1), (1.0, 30)):
        for _ in range(60):
            one.step(8.0, [9, more], [True, False])
            one.settle()
        assert one.share == share
    for _ in range(120):
        one.step(0.0, [1, 1], [False, False])
        one.settle()
    assert one.share == pytest.approx(CAME, abs=0.05)


class _Knows(PromptLookupDrafter):
    """Finds what comes next in the first of several rows, and nothing in the others."""

    def retrieve(self, state: DecodeState, row: int = 0) -> Found:
        if row or state.prompt_lengths[row] == 4:
            return NOTHING
        return Found(conformance.plain_greedy(self.target, state.tokens[row], 4), [-1, 0, 1, 2], [0.9] * 4, 9)


def test_copies_are_weighed_by_hindsight_where_a_batch_waits() -> None:
    """Catches a share that is not counted, that is counted where rows are refilled, and one that does not decide.

    Copies are right for a row that is never the last: of a batch they are worth nothing, among prompts that come one
    after another they are.
    """
    target, how = target_of("llama"), {"max_new_tokens": 24, "eos_token_id": NO_EOS}
    drafter = hybrid(target, auto_eagle(target, None, costs(0.05)), _Knows.from_options(target), costs(0.05))
    prompts = [prompt(6, 1), prompt(5, 2)]
    expected = [conformance.plain_greedy(target, ids, 24) for ids in prompts]
    copied = [0.0]
    for _ in range(12):
        assert conformance.rows_of(generate(target, drafter, prompts, **how)) == expected
        (scales,) = drafter.weighing._scales.values()  # type: ignore[attr-defined]
        copied.append(scales.promised[0])
    assert scales.hindsight.share < 0.3 and copied[1] > copied[12] - copied[11]
    scales.hindsight.settle()
    waiting, before = iter(enumerate(prompts * 3)), scales.hindsight.share
    many = generate_many(target, drafter, lambda: next(waiting, None), batch=2, longest=8, **how)
    assert {tuple(one.tokens) for one in many} == {tuple(row) for row in expected}
    assert scales.hindsight.share == before and scales.promised[0] > copied[12] + 4


def test_a_shape_is_chosen_by_hindsight_where_a_batch_waits() -> None:
    """Catches a share that is not counted or not promised, one that alters itself, and one where nobody waits."""
    given, how = (2, Sampling(), 0), {"greedy": [[0.8]] * 3}
    dear, cheap = (Chooser(lambda *_, row=row: costs(row), 3, 3, 1, how) for row in (0.2, 0.02))  # type: ignore

    def shaped(waits: bool, tokens: int, chooser: Chooser = dear) -> Any:
        """The last shape of a batch whose last row gets so many tokens a step."""
        state: Any = SimpleNamespace(waits=waits, finished=[False, True])
        verdict: Any = SimpleNamespace(tokens=[[0] * tokens, [0]])
        chooser.begin(*given)
        for _ in range(20):
            shape = chooser.shape(*given)
            chooser.look_back(state, verdict)
        return shape

    alone = shaped(waits=False, tokens=1)
    assert alone.tokens == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    for _ in range(12):
        believed = shaped(waits=True, tokens=3)  # 2 came of the 1.952 promised
    assert believed.paths == alone.paths and believed.tokens == pytest.approx(alone.tokens, rel=0.02)
    for _ in range(40):
        none = shaped(waits=True, tokens=1)
    assert none.paths == ()
    assert shaped(waits=False, tokens=1).tokens == pytest.approx(alone.tokens)
    for _ in range(40):
        half = shaped(waits=True, tokens=2, chooser=cheap)
    assert half.paths == alone.paths and half.tokens == pytest.approx(2.0, rel=0.02)
