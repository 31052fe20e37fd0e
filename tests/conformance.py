"""The conformance suite: what holds for every drafter, with any draft. One line puts a drafter under it:

    TestMyDrafter = conformance.suite(lambda target: MyDrafter.from_options(target, depth=5))

The name must begin with ``Test``. Give several factories to cover a drafter's options, and rig at least one of them so
that drafts are accepted (a copy of the target as draft model, an oracle as head): a drafter whose every token is
rejected passes much of what follows by default. ``accepts`` makes the suite check that the rig works.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from drafters import Drafter, GenerateResult, TargetModel, generate
from drafters.loop import generate as loop
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.running import RunningCache
from drafters.policy import costs

Make = Callable[[TargetModel], Drafter]
Build = Callable[[str], PreTrainedModel]
NO_EOS: list[int] = []
# Mistral without windows has Llama's layers: only plain decoding is held to all of tiny.FAMILIES.
FAMILIES = tuple(family for family in tiny.FAMILIES if family != "mistral")


@lru_cache(maxsize=32)
def target_of(family: str, build: Build = tiny.build) -> TargetModel:
    """The suite's target, shared by every test: do not change it."""
    return TargetModel(build(family), name=f"tiny-{family}")


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids without the special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, tiny.VOCAB_SIZE, (length,), generator=generator).tolist()


@lru_cache(maxsize=4096)
def _greedy(target: TargetModel, ids: tuple[int, ...]) -> list[int]:
    """The known part of a prompt's continuation; ``plain_greedy`` extends it."""
    return []


def plain_greedy(target: TargetModel, ids: list[int], new_tokens: int) -> list[int]:
    """The argmax continuation by whole forwards of the stock model: no cache, no loop of ours."""
    known = _greedy(target, tuple(ids))
    with torch.inference_mode():
        while len(known) < new_tokens:
            logits = target.model(torch.tensor([[*ids, *known]]), use_cache=False).logits
            known.append(int(logits[0, -1].argmax()))
    return known[:new_tokens]


@lru_cache(maxsize=256)
def stock_generate(target: TargetModel, ids: tuple[int, ...], new_tokens: int) -> list[int]:
    """What transformers' ``generate`` makes of a prompt, with the EOS of the generation config."""
    given = torch.tensor([ids])
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(given)}
    return target.model.generate(given, max_new_tokens=new_tokens, **options)[0, len(ids) :].tolist()


@lru_cache(maxsize=32)
def in_bfloat16(target: TargetModel) -> TargetModel:
    """The target in bfloat16, shared by every suite on it."""
    return TargetModel(copy.deepcopy(target.model).to(torch.bfloat16), name="tiny-bf16")


def rows_of(result: GenerateResult) -> list[list[int]]:
    """Token ids of each row without the filling."""
    return [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]


@contextmanager
def each_draft(drafter: Any, look: Callable[[DecodeState, DraftTree], None]) -> Iterator[None]:
    """Call ``look`` with the state and the draft at each ``propose`` in the block."""
    propose = drafter.propose

    def looked(state: DecodeState) -> DraftTree:
        draft = propose(state)
        look(state, draft)
        return draft

    with mock.patch.object(drafter, "propose", looked):
        yield


def path_of(draft: DraftTree, node: int, row: int = 0) -> list[int]:
    """Tokens from the root's child to ``node``."""
    if node == ROOT:
        return []
    return [*path_of(draft, int(draft.parents[row, node]), row), int(draft.tokens[row, node])]


def check_children(
    state: DecodeState, draft: DraftTree, logits: Callable[[list[int]], Tensor], row: int = 0, **tolerance: float
) -> None:
    """The children of each node are the likeliest tokens of ``logits(path)``, or their q is that of these logits."""
    nodes: dict[int, list[int]] = {}
    for node in range(draft.size):
        nodes.setdefault(int(draft.parents[row, node]), []).append(node)
    for parent, children in nodes.items():
        expected = logits(path_of(draft, parent, row))
        if draft.q is None:
            assert draft.tokens[row, children].tolist() == expected.topk(len(children)).indices.tolist()
            continue
        assert draft.q_row is not None
        wanted = state.sampling.probabilities(expected)
        for node in children:
            found = draft.q[row, draft.q_row[row, node]]
            torch.testing.assert_close(found, wanted, **{"atol": 1e-4, "rtol": 1e-3} | tolerance)


@contextmanager
def checked_commits(tolerance: float = 1e-4) -> Iterator[SimpleNamespace]:
    """After every commit, compare the target's cache, running states too, with a fresh prefill by the stock model."""
    seen = SimpleNamespace(commits=0, accepted=0)
    commit = loop._commit

    def check(state: DecodeState, *args: Any) -> Any:
        steps = commit(state, *args)
        seen.commits += 1
        seen.accepted += sum(step.accepted for step in steps)
        for row, tokens in enumerate(state.tokens):
            known = len(tokens) - 1
            assert state.cache.lengths[row] == known, "the cache must hold every token but the last"
            running = isinstance(state.cache, RunningCache)
            fresh = DynamicCache(config=state.target.config if running else None)
            known_ids = torch.tensor([tokens[:known]], device=state.target.device)
            state.target.model(known_ids, past_key_values=fresh, use_cache=True)
            attending = [at for at, layer in enumerate(fresh.layers) if getattr(layer, "keys", None) is not None]
            for kind in ("keys", "values"):  # layers in one comparison, which costs as one
                ours = getattr(state.cache, kind)[: state.target.num_layers]
                found = torch.stack([ours[at][row, :, :known] for at in attending])
                theirs = torch.stack([getattr(fresh.layers[at], kind)[0] for at in attending])
                torch.testing.assert_close(found, theirs, atol=tolerance, rtol=tolerance)
            for at, (_, own) in ((at, kept[-1]) for at, kept in (state.cache._kept.items() if running else ())):
                for kind in ("conv_states", "recurrent_states"):
                    for number, value in getattr(fresh.layers[at], kind).items():
                        found, gap = getattr(own, kind)[number], {"atol": tolerance, "rtol": tolerance}
                        assert (found is None) == (value is None)
                        if value is not None:
                            torch.testing.assert_close(found[row], value[0], **gap)
        return steps

    def measured(*given: Any) -> Any:  # its steps are over a cache of zeros
        with mock.patch.object(loop, "_commit", commit):
            return loop.step(*given)

    with mock.patch.object(loop, "_commit", check), mock.patch.object(costs, "step", measured):
        yield seen


def suite(
    make: Make,
    *,
    accepts: str | None = None,
    build: Build = tiny.build,
    families: tuple[str, ...] = FAMILIES,
    longest_draft: int = 6,
    remembers: bool = False,
    whole: bool = True,
) -> type:
    """The suite for one factory; bind it to a name that begins with ``Test``.

    Args:
        make: the drafter for a target. Called afresh by every test.
        accepts: what greedy steps on llama must do: "all" (all of each draft), "some", "none"; None: anything.
        build: family -> HF model, where the rig needs a target of its own.
        longest_draft: tokens the longest accepted path may have.
        remembers: the drafter learns across prompts on purpose, so a second prompt may go otherwise than a fresh start.
        whole: False for ``brief``: a further shape of a drafter, without stop rules, seeds, dtypes and refusals.
    """
    fields: dict[str, Any] = {"make": staticmethod(make), "build": staticmethod(build), "accepts": accepts}
    fields |= {"families": families, "longest_draft": longest_draft, "remembers": remembers}
    return type("ConformanceSuite", (Conformance if whole else Brief,), fields)


brief = partial(suite, whole=False)


class Brief:
    """Drafts and what is committed. Lossy drafters are held to everything but equality with plain decoding."""

    make: Make
    build: Build
    accepts: str | None
    families: tuple[str, ...]
    longest_draft: int
    remembers: bool

    def target(self, family: str = "llama") -> TargetModel:
        return target_of(family, self.build)

    def run(
        self, target: TargetModel, ids: list[int], drafter: Drafter | None = None, **options: Any
    ) -> GenerateResult:
        options = {"eos_token_id": NO_EOS, "max_new_tokens": 16} | options
        return generate(target, drafter or self.make(target), [ids], **options)

    def expected(self, target: TargetModel, drafter: Drafter, ids: list[int], new_tokens: int) -> list[int] | None:
        """The only right greedy output; None for lossy drafters, who may choose."""
        return plain_greedy(target, ids, new_tokens) if drafter.lossless else None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if metafunc.function.__name__ == "test_greedy_is_plain_decoding":
            metafunc.parametrize("family", metafunc.cls.families)

    def test_greedy_is_plain_decoding(self, family: str) -> None:
        """Catches any wrong mask, position, cache row or window: a shifted row soon changes the argmax."""
        target = self.target(family)
        drafter = self.make(target)
        for length in (5, 19):
            ids = prompt(length)
            result = self.run(target, ids, drafter, max_new_tokens=24)
            assert result.lengths == [24]
            assert rows_of(result)[0] == (self.expected(target, drafter, ids, 24) or rows_of(result)[0])

    def test_edge_of_the_context(self) -> None:
        """Catches buffers a few rows short for a draft past the context, and a bound that is off by one."""
        target = self.target()
        drafter, ids = self.make(target), prompt(target.max_context - 8)
        tokens = rows_of(self.run(target, ids, drafter, max_new_tokens=8))[0]
        assert tokens == (self.expected(target, drafter, ids, 8) or tokens) and len(tokens) == 8
        with pytest.raises(ValueError, match=str(target.max_context)):
            self.run(target, ids, drafter, max_new_tokens=9)

    @pytest.mark.parametrize(("family", "temperature"), [("mistral-sliding", 0.0), ("llama", 1.0)])
    def test_cache_equals_fresh_prefill(self, family: str, temperature: float) -> None:
        """Catches rejected rows left in the cache, accepted ones at the wrong slot, keys at a wrong position."""
        target = self.target(family)
        with checked_commits() as seen:
            self.run(target, prompt(11), temperature=temperature, max_new_tokens=20, seed=3)
        assert seen.commits >= 1
        assert seen.accepted > 0 or self.accepts in (None, "none") or temperature > 0

    def test_no_state_leaks_between_prompts(self) -> None:
        """Catches a drafter's cache, features or path of the first prompt surviving into the second, undeclared."""
        target = self.target()
        used = self.make(target)
        assert used.remembers == self.remembers  # a speed test that goes on after a kill relies on it
        self.run(target, prompt(8), used, max_new_tokens=12)
        for seed, temperature in ((1, 0.0), (2, 1.0)):
            ids = prompt(8 + 3 * seed, seed)
            options = {"temperature": temperature, "max_new_tokens": 12}
            again, fresh = (self.run(target, ids, d, **options) for d in (used, self.make(target)))
            if self.remembers and temperature > 0:
                continue
            assert again.tokens.tolist() == fresh.tokens.tolist()
            assert self.remembers or again.trace.steps == fresh.trace.steps

    def test_batch(self) -> None:
        """Catches garbage above a drafter's batch, and rows that see each other's or padding's keys."""
        target = self.target()
        drafter = self.make(target)
        prompts = [prompt(4), prompt(11), prompt(7)]
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": NO_EOS}
        if drafter.max_batch is not None:
            too_many = [prompt(4)] * (drafter.max_batch + 1)
            with pytest.raises(ValueError, match=f"at most {drafter.max_batch} .*found {drafter.max_batch + 1}"):
                generate(target, drafter, too_many, **options)
            return
        rows = rows_of(generate(target, drafter, prompts, **options))
        for ids, row in zip(prompts, rows, strict=True):
            assert row == (self.expected(target, drafter, ids, 12) or row) and len(row) == 12

    def test_trace_and_acceptance(self) -> None:
        """Catches miscounted steps, and a rig that no longer accepts what the other tests need accepted."""
        target = self.target()
        drafter = self.make(target)
        trace = self.run(target, prompt(9), drafter, max_new_tokens=24).trace
        steps = trace.steps
        assert sum(step.committed for step in steps) == 23 and trace.forwards == len(steps)
        assert trace.tau == pytest.approx(23 / len(steps))
        assert all(step.accepted <= step.depth <= step.drafted <= drafter.max_draft for step in steps)
        assert all(step.committed == step.accepted + 1 for step in steps[:-1])
        assert max(step.accepted for step in steps) <= self.longest_draft
        if self.accepts == "all":
            assert all(step.accepted == step.depth for step in steps) and trace.tau > 2
        elif self.accepts == "some":
            assert any(step.accepted > 1 for step in steps) and any(step.accepted < step.depth for step in steps)
        elif self.accepts == "none":
            assert all(step.accepted == 0 for step in steps) and trace.tau == 1.0


class Conformance(Brief):
    """The whole suite: also stop rules, seeds, dtypes and refusals."""

    def test_greedy_is_stock_generate(self) -> None:
        """Catches stop rules unlike stock `generate`'s: EOS from the generation config, kept in the output."""
        target = self.target()
        drafter = self.make(target)
        if not drafter.lossless:
            pytest.skip("lossy: need not equal stock generate")
        for seed in range(2):
            ids = prompt(9, seed)
            stock = stock_generate(target, tuple(ids), 20)
            assert generate(target, drafter, [ids], max_new_tokens=20).tokens.tolist() == [stock]

    def test_eos_at_every_index(self) -> None:
        """Catches tokens kept, counted or streamed after an EOS inside a draft, at its end, or on the bonus."""
        target = self.target()
        drafter, ids = self.make(target), prompt(9)
        free = rows_of(self.run(target, ids, drafter))[0]
        expected = self.expected(target, drafter, ids, 16)
        for eos in dict.fromkeys(free[: self.longest_draft + 5]):  # as many as end a whole draft, and some
            streamed: list[int] = []
            result = self.run(
                target, ids, drafter, eos_token_id=eos, on_tokens=lambda row, new, into=streamed: into.extend(new)
            )
            tokens = rows_of(result)[0]
            assert eos not in tokens[:-1] and (tokens[-1] == eos or len(tokens) == 16)
            assert expected is None or tokens == expected[: expected.index(eos) + 1]
            assert streamed == tokens
            assert 1 + result.trace.decoded_tokens == len(tokens)

    def test_every_max_new_tokens(self) -> None:
        """Catches a limit overrun or undershot inside a draft, and drafters that crash with no room left."""
        target = self.target()
        drafter, ids = self.make(target), prompt(7)
        expected = self.expected(target, drafter, ids, self.longest_draft + 4)
        for limit in range(1, self.longest_draft + 4):
            for temperature in (0.0, 1.0) if limit < 4 else (0.0,):  # a limit cuts both alike
                result = self.run(target, ids, drafter, max_new_tokens=limit, temperature=temperature)
                assert result.lengths == [limit] and result.tokens.shape == (1, limit)
                assert 1 + result.trace.decoded_tokens == limit
                if temperature == 0 and expected is not None:
                    assert rows_of(result)[0] == expected[:limit]

    def test_seeds(self) -> None:
        """Catches random numbers from outside the generator (same seed differs) and a seed that is ignored."""
        target = self.target()
        for options in ({}, {"top_k": 20, "top_p": 0.9}):
            options |= {"temperature": 1.0, "max_new_tokens": 10}
            first, *others = (rows_of(self.run(target, prompt(6), seed=seed, **options))[0] for seed in (5, 5, 6))
            assert first == others[0]
            assert first != others[1] or first != rows_of(self.run(target, prompt(6), seed=7, **options))[0]
            assert all(len(run) == 10 and min(run) >= 0 and max(run) < target.vocab_size for run in (first, *others))

    def test_sampled_run_stops_at_eos(self) -> None:
        """Catches a stop rule that only the greedy path has, or that knows one EOS of several."""
        target = self.target()
        eos = list(range(0, target.vocab_size, 6))
        lengths = set()
        for seed in range(8):
            if seed > 4 and len(lengths) > 1:
                break
            tokens = rows_of(self.run(target, prompt(6), temperature=1.0, seed=seed, eos_token_id=eos))[0]
            lengths.add(len(tokens))
            assert not set(eos) & set(tokens[:-1])
            assert tokens[-1] in eos or len(tokens) == 16
        assert len(lengths) > 1

    def test_low_temperature_is_greedy(self) -> None:
        """Catches a sampled path that verifies against another node's logits: near T = 0 it must follow the argmax."""
        target = self.target()
        drafter, ids = self.make(target), prompt(9)
        if not drafter.lossless:
            pytest.skip("lossy: need not equal plain decoding")
        tokens = rows_of(self.run(target, ids, drafter, temperature=1e-5))[0]
        assert tokens == plain_greedy(target, ids, 16)

    def test_prompt_of_one_token(self) -> None:
        """Catches drafters that look back further than the prompt goes."""
        target = self.target()
        drafter = self.make(target)
        tokens = rows_of(self.run(target, [5], drafter))[0]
        assert tokens == (self.expected(target, drafter, [5], 16) or tokens) and len(tokens) == 16
        assert self.run(target, [5], drafter, temperature=1.0, max_new_tokens=8).lengths == [8]

    def test_other_target_is_refused(self) -> None:
        """Catches a drafter silently run with a target it was not built for."""
        with pytest.raises(ValueError, match="built for target"):
            self.run(self.target("qwen3"), prompt(4), self.make(self.target()))

    def test_bfloat16(self) -> None:
        """Catches float32 probabilities or features meeting bfloat16 weights: a dtype error on every real model."""
        target = in_bfloat16(self.target())
        for temperature in (0.0, 1.0):
            assert self.run(target, prompt(6), temperature=temperature, max_new_tokens=10).lengths == [10]
