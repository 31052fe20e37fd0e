"""The loop: its limits and refusals, and, end to end, output distributed as the target's own for every drafter.

The measure of a distribution is distribution.py's. Rules and drafts that are wrong on purpose must fail it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, checked_commits, prompt, rows_of, target_of
from distribution import LIMIT, WARPS, deviation, toy
from rigged import eagle, medusa

from drafters import Drafter, TargetModel, generate
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.loop.acceptance import Rule, verify_sampled
from drafters.methods.autoregressive import AutoregressiveDrafter
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.methods.speculative import SpeculativeDrafter

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]


def kangaroo_toy(target: TargetModel) -> KangarooDrafter:
    torch.manual_seed(4)
    return KangarooDrafter(
        target,
        KangarooAdapter(target.config, KangarooShape(exit_layer=1)),
        KangarooOptions(eta=0.3, max_draft_tokens=3),
    )


MAKERS: dict[str, Callable[[TargetModel], Drafter]] = {
    "autoregressive": AutoregressiveDrafter.from_options,
    "speculative": lambda target: SpeculativeDrafter.from_options(target, draft_model=toy(1, 1), gamma=3),
    "eagle chain": lambda target: eagle(target, None, "chain", depth=3),
    "eagle static": lambda target: eagle(target, None, "static", paths=PATHS),
    "eagle dynamic": lambda target: eagle(target, None, "dynamic", depth=3, top_k=3, nodes=8),
    "kangaroo": kangaroo_toy,
    "medusa chain": lambda target: medusa(target, None, "chain", heads=3),
    "medusa static": lambda target: medusa(target, None, "static", paths=PATHS),
}


@pytest.mark.parametrize(("name", "warp"), [*((name, 1) for name in MAKERS), ("eagle static", 0)])
def test_output_is_distributed_as_the_targets(name: str, warp: int) -> None:
    """Catches any bias of a method at T > 0: a q of another node or without its warps, a bonus from the wrong row."""
    found = deviation(MAKERS[name](toy()), WARPS[warp])
    assert found < LIMIT, f"chi-square is {found:.1f} standard deviations above its mean"


class Wrong:
    """Mistakes in the draft's q, as a rule put around the right one."""

    @staticmethod
    def deterministic_as_sampled(draft, logits, see, sampling, generator):  # noqa: ANN001, ANN205
        if draft.size:
            draft.q = sampling.probabilities(logits)
            draft.q_row = draft.parents + 1
        return verify_sampled(draft, logits, see, sampling, generator)

    @staticmethod
    def q_of_the_next_row(draft, logits, see, sampling, generator):  # noqa: ANN001, ANN205
        if draft.size:
            draft.q = draft.q.roll(1, dims=1)
        return verify_sampled(draft, logits, see, sampling, generator)

    @staticmethod
    def q_of_the_first_token(draft, logits, see, sampling, generator):  # noqa: ANN001, ANN205
        if draft.size:
            draft.q_row = torch.zeros_like(draft.q_row)
        return verify_sampled(draft, logits, see, sampling, generator)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("eagle dynamic", Wrong.deterministic_as_sampled),
        ("eagle static", Wrong.q_of_the_next_row),
        ("speculative", Wrong.q_of_the_first_token),
    ],
)
def test_the_measurement_sees_wrong_rules(name: str, wrong: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a distribution test that cannot fail."""
    drafter = MAKERS[name](toy())
    monkeypatch.setattr(drafter, "rule", lambda sampling: wrong)
    assert deviation(drafter, WARPS[0], tokens=8_000) > 10.0


def plain() -> tuple[TargetModel, Drafter]:
    target = target_of("llama")
    return target, AutoregressiveDrafter.from_options(target)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[]], {}, "empty"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "empty"),
        (torch.tensor([5, 6]), {}, r"\[batch, tokens\]"),
        ([[5, tiny.VOCAB_SIZE]], {}, "97"),
        ([[-1, 5]], {}, "-1"),
        ([[5]], {"max_new_tokens": 0}, "at least 1, found 0"),
        ([[5]], {"temperature": -0.1}, "temperature"),
        ([[5]], {"top_p": 0.0}, "top_p"),
        ([[5, 6], [7]], {"prompt_lengths": [2]}, "prompt_lengths"),
        ([[5, 6], [7]], {"prompt_lengths": [2, 0]}, "empty"),
        ([[5]], {"temperature": "0.5"}, "temperature must be a number .*found '0.5'"),
        ([[5]], {"top_k": 2.5}, "top_k must be a whole number"),
        ([[5]], {"max_new_tokens": 5.0}, "max_new_tokens must be a whole number, found 5.0"),
        ([[5]], {"seed": 1 << 64}, "seed must fit in 64 bits"),
        ([[5.0]], {}, "input_ids must be whole numbers"),
        ("Hello", {}, "input_ids must be whole numbers"),
        ({"input_ids": torch.tensor([[5]])}, {}, r"try generate\(target, drafter, \*\*inputs\)"),
        ([[5, 6]], {"prompt_lengths": [3]}, "prompt_lengths says 3 for a row of 2 ids"),
        ([[5]], {"eos_token_id": [1, -1]}, "eos_token_id is -1"),
        ([[5] * 200], {"max_new_tokens": 57}, "200 tokens and max_new_tokens=57 exceed the 256.*at most 56"),
    ],
)
def test_bad_input_is_refused(ids: Any, options: dict[str, Any], message: str) -> None:
    """Catches an error from deep inside the model, or none at all, where the request was wrong."""
    target, drafter = plain()
    with pytest.raises(ValueError, match=message):
        generate(target, drafter, ids, **options)


def test_eos_comes_from_the_generation_config() -> None:
    """Catches an EOS that is ignored unless it is passed, one that no token has, ``[]`` that does not switch it off."""
    target, drafter = plain()
    free = rows_of(generate(target, drafter, [prompt(9)], max_new_tokens=30, eos_token_id=NO_EOS))[0]
    eos = free[6]
    before = target.model.generation_config.eos_token_id
    try:
        for setting in (eos, [eos, 96]):
            target.model.generation_config.eos_token_id = setting
            stopped = generate(target, drafter, [prompt(9)], max_new_tokens=30)
            assert rows_of(stopped)[0] == free[: free.index(eos) + 1]
        target.model.generation_config.eos_token_id = [1, 5000]
        with pytest.raises(ValueError, match="eos_token_id in the generation config of .* is 5000, but .* has 97"):
            generate(target, drafter, [[5]])
        assert rows_of(generate(target, drafter, [prompt(9)], max_new_tokens=30, eos_token_id=NO_EOS))[0] == free
    finally:
        target.model.generation_config.eos_token_id = before


def test_first_token_eos() -> None:
    """Catches a generation that goes on after the prefill's own token ended it."""
    target, drafter = plain()
    first = rows_of(generate(target, drafter, [prompt(9)], max_new_tokens=1))[0]
    result = generate(target, drafter, [prompt(9)], max_new_tokens=9, eos_token_id=first)
    assert rows_of(result) == [first] and result.trace.steps == [] and result.trace.tau == 1.0


def test_a_draft_cut_by_eos_leaves_no_rows() -> None:
    """Catches cache rows of tokens behind an EOS, which a row of a batch would carry along until the others end."""
    target = target_of("llama")
    free = rows_of(
        generate(target, AutoregressiveDrafter.from_options(target), [prompt(9)], max_new_tokens=9, eos_token_id=NO_EOS)
    )
    with checked_commits() as seen:
        drafter = SpeculativeDrafter.from_options(target, draft_model=target, gamma=6)
        result = generate(target, drafter, [prompt(9)], max_new_tokens=20, eos_token_id=free[0][3])
    assert rows_of(result)[0] == free[0][: free[0].index(free[0][3]) + 1] and seen.accepted == 6


def test_global_random_state_is_untouched() -> None:
    """Catches draws from the global generator: two methods in one process would disturb each other."""
    target = target_of("llama")
    before = torch.get_rng_state()
    for drafter in (
        AutoregressiveDrafter.from_options(target),
        SpeculativeDrafter.from_options(target, draft_model=target, gamma=2),
    ):
        generate(target, drafter, [prompt(5)], max_new_tokens=6, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
