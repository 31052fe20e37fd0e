"""Hybrid: the conformance suite, a head that stays in step with what was copied, and the choice between the two."""

from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import conformance
import pytest
from conformance import NO_EOS, each_draft, prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy
from rigged import Cycling, auto_eagle, by_length, dflash, dspark, eagle, eagle3, goes_by, perturbed
from test_eagle import check_draft
from test_prompt_lookup import Primed

from drafters import Drafter, TargetModel, generate, generate_many, make_drafter
from drafters.config import UNSHIFTED
from drafters.drafting.retrieval import Copy
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import EagleDrafter
from drafters.methods.hybrid import HybridDrafter
from drafters.methods.prompt_lookup import PromptLookupDrafter
from drafters.model.cache import KVCache
from drafters.policy.costs import Curve
from drafters.policy.shape import Costs


def costs(row: float) -> Costs:
    """Of a machine where a row costs ``row`` plain steps, and a draft pass a tenth of one."""
    return Costs(Curve((1, 2), (1.0, 1.0 + row)), first=0.1, level=0.1, row=0.0)


def hybrid(target: TargetModel, head: Drafter, lookup: Drafter | None = None, row: float = 0.01) -> HybridDrafter:
    """One that chooses by these costs."""
    lookup = lookup or Primed.from_options(target, gamma=5)
    drafter = HybridDrafter.from_options(target, head=head, lookup=lookup)
    goes_by(drafter, costs(row))
    return drafter


def by_match(target: TargetModel, head: Drafter, lookup: Drafter | None = None, match: int = 3) -> HybridDrafter:
    lookup = lookup or Primed.from_options(target, gamma=3)
    return HybridDrafter.from_options(target, head=head, lookup=lookup, match=match)


TestHybrid = conformance.suite(
    lambda t: hybrid(t, auto_eagle(t, 0.4)), accepts="some", longest_draft=8,
    families=("llama", "mistral-sliding"),
)  # fmt: skip
TestByMatch = conformance.brief(
    lambda t: by_match(t, eagle(t, 0.4, "static")), accepts="some", longest_draft=5, families=("llama", "qwen3")
)


class Spoilt(PromptLookupDrafter):
    """Copies what the model says next, right in some steps and wrong in others."""

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        known = len(state.tokens[row])
        answer = conformance.plain_greedy(self.target, state.tokens[row], 2)
        wrong = (answer[1] + 1) % self.target.vocab_size
        drafts = ([answer[0], wrong], answer, [wrong, wrong])
        return Copy(drafts[known % 3], [-1, 0], [0.5, 0.5], known % 5)


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (1, 0.9), (3, 0.0)])
@pytest.mark.parametrize("make", [lambda t: eagle(t, None, "chain", depth=3), lambda t: auto_eagle(t, None, Cycling())])
def test_the_head_takes_in_what_was_copied(
    make: Callable[[TargetModel], EagleDrafter], rows: int, temperature: float
) -> None:
    """Catches features of copied steps that the head misses or takes in twice: only its acceptance would suffer."""
    target = target_of("llama")
    head = make(target)
    drafter = by_match(target, head, Spoilt.from_options(target))
    checked, copied = [], []

    def forced(state: DecodeState, draft: DraftTree) -> None:
        copied.append(not drafter._head_drafted)
        if drafter._head_drafted and draft.size:
            for row, finished in enumerate(state.finished):
                if not finished:
                    check_draft(head, state, draft, row)
            checked.append(copied[-2:-1])

    with each_draft(drafter, forced):
        for seed in range(2):
            prompts = [prompt(9 + 4 * row, seed) for row in range(rows)]
            options = {"max_new_tokens": 24, "eos_token_id": NO_EOS, "temperature": temperature, "seed": seed}
            generate(target, drafter, prompts, **options)  # type: ignore[arg-type]
    assert [True] in checked and [False] in checked


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches a choice between the two that hangs on what the head drew, and copies verified by the head's q."""
    target = toy()
    head = by_length("speculative", target, draft_model=toy(1, 1))
    lookup = PromptLookupDrafter.from_options(target, gamma=3, max_ngram=4)
    assert deviation(hybrid(target, head, lookup), WARPS[warp], tokens=2_000) < LIMIT


def test_an_eagle_head_sampled() -> None:
    """Catches a head's tree verified as a copy is."""
    target = toy()
    drafter = by_match(target, eagle(target, 0.6, "static"), match=2)
    assert deviation(drafter, WARPS[0], tokens=1_500) < LIMIT


def cache_of(drafter: Any) -> KVCache:
    """The cache of a draft model, or of a head."""
    found: KVCache = drafter._cache if hasattr(drafter, "_cache") else drafter.head.cache
    return found


@pytest.mark.parametrize("match", [3, "auto"])
def test_rows_of_a_batch_come_and_go(match: int | str) -> None:
    """Catches a row that is copied from its neighbour's text, a finished one that drafts, and a joined one for which
    the head or the lookup still has the answer before it."""
    target = target_of("llama")
    prompts = [prompt(4 + 3 * n % 11, n) for n in range(7)]
    expected = [conformance.plain_greedy(target, ids, 20) for ids in prompts]
    eos = [expected[1][4], expected[3][9]]
    ends = [next((place for place, token in enumerate(row) if token in eos), 19) + 1 for row in expected]
    expected = [row[:end] for row, end in zip(expected, ends, strict=True)]
    lookup = make_drafter("suffix", target, alpha=3.0, nodes=6)
    head = auto_eagle(target, 0.4, costs(0.25))
    drafter = hybrid(target, head, lookup, 0.25) if match == "auto" else by_match(target, head, lookup)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": eos}
    waiting = deque(enumerate(prompts))
    copied = []

    def noted(state: DecodeState, draft: DraftTree) -> None:
        copied.append(draft.extra.source == lookup.name)

    with each_draft(drafter, noted):
        for _ in range(2):  # the second time the answers are known
            found = generate(target, drafter, prompts, **options)
            assert conformance.rows_of(found) == expected
        whole = len(copied)
        next_prompt = lambda: waiting.popleft() if waiting else None  # noqa: E731
        many = generate_many(target, drafter, next_prompt, batch=3, longest=20, **options)
        assert [one.tokens for one in sorted(many, key=lambda one: int(str(one.key)))] == expected
    for some in (copied[:whole], copied[whole:]):
        assert True in some and False in some
    assert len({*ends}) > 2


class Wrong(PromptLookupDrafter):
    """Finds what the model does not say next."""

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        (right,) = conformance.plain_greedy(self.target, state.tokens[row], 1)
        return Copy([(right + 1) % self.target.vocab_size], [-1], [0.5], 4)


def test_each_where_it_is_right() -> None:
    """Catches a choice that stays with one of the two: for a text that has been read a random head must not draft, and
    what is always wrong must not be copied.
    """
    target = target_of("llama")
    options = {"max_new_tokens": 38, "eos_token_id": NO_EOS}  # as much as the primed ones have read
    for noise, kind, low, high in ((None, Primed, 0.3, 1.0), (0.0, Wrong, 0.0, 0.1)):
        head, lookup = auto_eagle(target, noise, costs(0.25)), kind.from_options(target, gamma=5)
        drafter, sources = hybrid(target, head, lookup, 0.25), []
        for seed in range(4):
            steps = generate(target, drafter, [prompt(8, seed)], **options).trace.steps  # type: ignore[arg-type]
            sources += [step.source for step in steps[len(steps) // 2 :]]
        assert low <= sources.count("prompt_lookup") / len(sources) <= high
        assert drafter.policy is not None and "of the steps copied" in drafter.policy.expected().choice


def test_from_a_config_and_what_is_refused() -> None:
    """Catches a nested entry that cannot be expressed, and heads and lookups that would break in the first step."""
    target = target_of("llama")
    model = {"drafter": "speculative", "draft_model": perturbed(target, 0.1), "gamma": "auto"}
    made = make_drafter("hybrid", target, head=model)
    assert isinstance(made, HybridDrafter) and made.lookup.name == "prompt_lookup" and made.max_draft == 16
    pool = {"drafter": "suffix"}
    assert make_drafter("hybrid", target, head=model, lookup=pool).remembers and not made.remembers
    with pytest.raises(ValueError, match="'lookahead' must draft every step"):
        make_drafter("hybrid", target, head={"drafter": "lookahead"})
    with pytest.raises(ValueError, match="'speculative' has a fixed shape"):
        make_drafter("hybrid", target, head=model | {"gamma": 3})
    with pytest.raises(ValueError, match="'speculative', which does not copy"):
        make_drafter("hybrid", target, head=model, lookup=model)
    with pytest.raises(ValueError, match="match"):
        make_drafter("hybrid", target, head=model, match=0)


@pytest.mark.parametrize("kind", ["eagle", "unshifted", "eagle3", "dflash", "dspark", "speculative"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_head_reads_many_copied_tokens_beside_a_longer_row(kind: str, ends: bool) -> None:
    """Catches a read as wide as the row that copied most, for which the cache of the longest row has no room; also
    where the row that copied most has ended."""
    target, new = target_of("llama"), 60
    heads: dict[str, Callable[[], Any]] = {
        "eagle": lambda: eagle(target, None, "chain", depth=2),
        "unshifted": lambda: eagle(target, None, "chain", depth=2, inputs=UNSHIFTED),
        "eagle3": lambda: eagle3(target, None, "chain", depth=2),
        "dflash": lambda: dflash(target, None, "chain", depth=2),
        "dspark": lambda: dspark(target, None, "chain", depth=2),
        "speculative": lambda: make_drafter("speculative", target, draft_model=perturbed(target, 0.3), gamma=2),
    }
    prompts = [[5] * 20, [7] * 20]
    answers = [conformance.plain_greedy(target, ids, new) for ids in prompts]
    eos = [next(token for token in answers[1][44:] if token not in answers[0] + answers[1][:44])] if ends else NO_EOS
    answers[1] = answers[1][: answers[1].index(eos[0]) + 1] if ends else answers[1]

    class Oracle(PromptLookupDrafter):
        """Right for row 0 at first, then for none of the two, then for row 1."""

        def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
            done = [len(tokens) - 20 for tokens in state.tokens]
            right = (row == 0 and done[0] < 40) or (row == 1 and done[0] > 46 and done[1] < (60 if ends else 44))
            tokens = answers[row][done[row] : done[row] + 5][: max(state.room(row) - 1, 0)] if right else []
            return Copy(tokens, list(range(-1, len(tokens) - 1)), [0.5] * len(tokens), 8 if tokens else 0)

    head = heads[kind]()
    drafter, widths, checked = by_match(target, head, Oracle.from_options(target)), [], []
    at, propose = KVCache.at, head.propose

    def noted(cache: KVCache, rows: int, offset: int = 0) -> KVCache:
        if cache is cache_of(head):
            widths.append(rows)
        return at(cache, rows, offset)

    def compared(state: DecodeState) -> DraftTree:
        draft = propose(state)
        if kind == "eagle" and not state.finished[0]:
            check_draft(head, state, draft, 0)
            checked.append(len(state.tokens[0]))
        return draft

    with mock.patch.object(KVCache, "at", noted), mock.patch.object(head, "propose", compared):
        found = generate(target, drafter, prompts, max_new_tokens=new, eos_token_id=eos)
    assert conformance.rows_of(found) == answers
    wide = [width for width in widths[widths.index(43) + 1 :] if width > 12]
    assert (wide == [] if ends else len(wide) == 2) and (kind != "eagle" or len(checked) > 4)
