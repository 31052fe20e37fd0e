"""`python -m eval.lossless`: a right drafter passes, planted faults do not, and the power is as stated."""

import json
import math
import types
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distribution
import numpy as np
import pytest
import tiny_run
import torch
from programs import status
from torch import Tensor

from drafters import Drafter, TargetModel
from drafters.config import Config
from drafters.heads.eagle.module import EagleHead
from drafters.hub.checkpoint import make_config, save_checkpoint
from drafters.loop import acceptance
from drafters.loop import state as loop
from drafters.loop.acceptance import Rule, Verdict, verify_greedy, verify_sampled
from drafters.loop.sampling import Sampling, draw_without_replacement
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.cache import KVCache
from eval import lossless
from eval.configs import LosslessConfig
from eval.figures import certificate as made
from eval.figures.goodness_of_fit import count_tail, detectable, uniformity

# Three children of the root, three of its first, three of that one's first: siblings, and a chain of three.
PARENTS, GROUPS, SIBLINGS = (ROOT, ROOT, ROOT, 0, 0, 0, 3, 3, 3), (0, 0, 0, 1, 1, 1, 2, 2, 2), 3
EOS = 1
TOO_SURE = 4.0  # times the log of q: often rejected, so that the siblings of a likely token matter
ACCEPT = "accept = turn & (uniform.gather(2, node) * q.gather(2, x) < p.gather(2, x))"


@lru_cache(maxsize=2)
def toy(ends: bool = False) -> TargetModel:
    """The toy of tests/distribution.py, whose EOS is one of five tokens, or without one: texts as long as can be."""
    target: TargetModel = distribution.toy.__wrapped__()
    target.model.generation_config.eos_token_id = EOS if ends else None
    return target


@lru_cache(maxsize=1)
def bigrams() -> Tensor:
    """log q ``[V, V]`` by the last token: the toy's own distributions, averaged over other texts."""
    texts = torch.randint(distribution.VOCAB, (64, 24), generator=torch.Generator().manual_seed(7))
    p = toy().model(texts).logits.softmax(-1)
    return torch.stack([p[texts == token].mean(0) for token in range(distribution.VOCAB)]).log()


class Table(Drafter):
    """Draws a tree without replacement from bigrams; ``fault`` and ``verify`` plant a mistake."""

    name = "table"
    max_batch = None
    max_draft = len(PARENTS)

    def __init__(
        self, fault: str = "", verify: Rule = verify_sampled, ends: bool = False, sharper: float = 1.5
    ) -> None:
        super().__init__(toy(ends), Config())
        self.fault, self.verify, self.sharper = fault, verify, sharper
        self.accepted: list[int] = []

    def rule(self, sampling: Sampling) -> Rule:
        return verify_greedy if sampling.greedy else self.verify

    def begin(self, state: DecodeState, output: Any) -> None:
        self.accepted = [0] * state.batch

    def propose(self, state: DecodeState) -> DraftTree:
        last, tokens, q = state.roots[:, 0], [], []
        for _ in range(3):
            logits = self.sharper * bigrams()[last]
            q.append(state.sampling.probabilities(logits))
            drawn, _ = draw_without_replacement(q[-1].clamp_min(1e-9), SIBLINGS, state.generator)
            drawn = q[-1].topk(SIBLINGS).indices if self.fault == "top-k" else drawn
            if self.fault == "temperature":
                q[-1] = logits.softmax(-1)
            tokens.append(drawn)
            last = drawn[:, 0]
        rows = torch.stack(q, 1)
        rows = rows.roll(1, 1) if self.fault == "q row" else rows
        return DraftTree.from_parents(torch.cat(tokens, 1), PARENTS, q=rows, q_row=GROUPS)

    def observe(self, state: DecodeState, draft: DraftTree, output: Any, verdict: Verdict) -> None:
        self.accepted = [len(rows) - 1 for rows in verdict.rows]


def certificate(drafter: Table, seed: int = 0, texts: int = 64, **options: Any) -> dict[str, Any]:
    """What ``certify`` says of a drafter of the toy's."""
    settings = {"target": {"path": "toy"}, "drafter": {"drafter": "table"}, "rounded": None, "batch": 64}
    settings |= {"new_tokens": 28}
    config = LosslessConfig(**settings | {"texts": texts, "seed": seed, "greedy_tokens": 16} | options)
    lineup: Any = SimpleNamespace(fresh=lambda temperature: {"table": drafter})
    found = made.certify(config, drafter.target, lineup, [[1, 3], [2, 4, 0], [3]] * 4)
    return found | made.judged(found["greedy"], found["sampled"])


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches alone: these texts are many, and verified by one of the two walks."""
    monkeypatch.setattr(made, "_sizes", lambda drafter, most: repeat(most))


def wrong(old: str, new: str, rule: str = "verify_sampled") -> Rule:
    """A rule of drafters/loop/acceptance.py, with a mistake in its text."""
    source = Path(acceptance.__file__).read_text()
    assert source.count(old) == 1, f"the text to break occurs {source.count(old)} times in acceptance.py: {old}"
    module = types.ModuleType("drafters.decoding.wrong")
    module.__package__ = "drafters.decoding"
    exec(compile(source.replace(old, new), "wrong", "exec"), module.__dict__)
    found: Rule = getattr(module, rule)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_right_drafter_passes(seed: int) -> None:
    """Catches a test that finds fault with everything: a p of another text, places that are not uniform, strata that
    are chosen by the token itself.
    """
    temperature = (1.0, 0.7, 1.0)[seed]
    verdict = "not shown" if seed == 2 else "lossless"  # texts that end are short
    found = certificate(Table(ends=seed == 2), seed, 96, temperature=temperature, batch=48)
    assert found["verdict"] == verdict, found["reasons"]
    assert found["sampled"]["p_value"] > 0.01 and found["greedy"][0]["divergences"] == []


# The mistake in the rule's text, and texts enough to find it.
RULES = {
    "q of siblings that were drawn before is not left out": ("q = without(q, x)", "q = q", 192),
    "residual not renormalised": ("p = torch.where(turn, residual(p, q), p)", "p = (p - q).clamp_min(1e-9)", 64),
    "residual of p itself": ("p = torch.where(turn, residual(p, q), p)", "p = p", 128),
    "bonus after the row before": ("token.gather(1, at)[:, 0]", "token.gather(1, (at - 1).clamp_min(0))[:, 0]", 64),
    "accepts where it should reject": (ACCEPT, ACCEPT.replace(" < ", " > "), 64),
    "accepts by p alone": (ACCEPT, ACCEPT.replace(" * q.gather(2, x)", ""), 64),
    "p of the row before": (
        "sampling.probabilities(logits[some])",
        "sampling.probabilities(logits[some].roll(1, 1))",
        64,
    ),
}


@pytest.mark.parametrize("fault", RULES)
def test_a_wrong_rule_fails(fault: str, side_by_side: None) -> None:
    """Catches a certificate that signs any of these."""
    old, new, texts = RULES[fault]
    found = certificate(Table(verify=wrong(old, new), sharper=TOO_SURE), texts=texts)
    assert found["verdict"] == "not lossless" and found["greedy"][0]["passed"]


@pytest.mark.parametrize(
    ("fault", "texts", "temperature"), [("q row", 192, 1.0), ("top-k", 64, 1.0), ("temperature", 64, 2.0)]
)
def test_a_wrong_draft_fails(fault: str, texts: int, temperature: float, side_by_side: None) -> None:
    """Catches a certificate that signs q of another depth, top-k children taken for samples, or a q of temperature 1
    for tokens that were drawn at another.
    """
    found = certificate(Table(fault, sharper=TOO_SURE), texts=texts, temperature=temperature)
    assert found["verdict"] == "not lossless"


def test_a_wrong_rule_row_by_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a certificate of large batches alone, which are verified by other code than single rows."""
    monkeypatch.setattr(made, "_sizes", lambda drafter, most: repeat(acceptance.FEW_ROWS))
    assert certificate(Table(verify=wrong("p.copy_(left)", "pass"), sharper=TOO_SURE))["verdict"] == "not lossless"


def test_what_is_wrong_after_a_rejection_alone_fails(side_by_side: None) -> None:
    """Catches strata that know nothing of the step before: overall, the mistake is a small one."""
    drafter = Table()

    def verify(draft: Any, logits: Tensor, *rest: Any) -> Verdict:
        after = torch.tensor([accepted == 1 for accepted in drafter.accepted])
        return verify_sampled(draft, torch.where(after[:, None, None], 2 * logits, logits), *rest)

    drafter.verify = verify
    found = certificate(drafter, texts=192)
    assert found["verdict"] == "not lossless"
    worst = min(found["sampled"]["tests"], key=lambda test: test["p_value"])
    assert worst["tokens"] == "0 accepted, 1 in the step before"


def test_stale_cache_rows_fail(side_by_side: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a certificate that believes the loop's own logits, whose cache holds rejected rows in place of others."""
    monkeypatch.setattr(KVCache, "commit", lambda cache, rows: cache.commit_first([len(kept) for kept in rows]))
    found = certificate(Table(), texts=64)
    assert found["verdict"] == "not lossless" and not found["greedy"][0]["passed"]
    assert found["sampled"]["p_value"] < 1e-9


@pytest.mark.parametrize(
    "until", [lambda tokens, stop: [token for token in tokens if token not in stop], lambda tokens, stop: tokens]
)
def test_wrong_ends_fail(until: Any, side_by_side: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a certificate that signs an EOS that is cut away, or one within a draft that ends nothing."""
    monkeypatch.setattr(loop, "until", until)
    found = certificate(Table(ends=True), texts=64)
    assert found["verdict"] == "not lossless"
    assert any("texts" in reason for reason in found["reasons"] if reason.startswith("sampled"))


def test_an_eos_that_is_never_drawn_fails(side_by_side: None) -> None:
    """Catches a certificate without a count of ends: an EOS is one token of many, and rare."""

    def verify(draft: Any, logits: Tensor, *rest: Any) -> Verdict:
        logits[..., EOS] -= 3
        return verify_sampled(draft, logits, *rest)

    found = certificate(Table(verify=verify, ends=True), texts=64)
    assert found["sampled"]["ends_p_value"] < found["sampled"]["level"]


def test_greedy_is_held_to_the_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a greedy part that compares nothing, or lets a bonus of the wrong row pass for rounding."""
    rule = wrong("return best, choices[best]", "return best, choices[max(best - 1, 0)]", "verify_greedy")
    monkeypatch.setattr(Table, "rule", lambda drafter, sampling: rule if sampling.greedy else verify_sampled)
    found = certificate(Table(), texts=4)
    part = found["greedy"][0]
    assert found["verdict"] == "not lossless" and part["unexplained"] == len(part["divergences"]) > 0
    assert f"{part['unexplained']:,} tokens are not the target's argmax" in found["reasons"][0]


def test_drafts_that_are_never_accepted_show_nothing(side_by_side: None) -> None:
    """Catches a signature under a test that no draft token came through."""
    found = certificate(Table(sharper=-2.0), texts=64)
    assert found["verdict"] == "not shown" and "after 2 accepted draft tokens" in found["reasons"][0]


def test_tails_of_a_count_by_enumeration() -> None:
    """Catches a tail without the observed number itself, and one of the two tails only; Poisson's terms, added up."""
    for expected in (0.5, 3.0, 7.25):
        terms = [math.exp(-expected) * expected**n / math.factorial(n) for n in range(60)]
        for observed in (0, 1, 3, 9):
            few, many = sum(terms[: observed + 1]), sum(terms[observed:])
            assert count_tail(observed, expected) == pytest.approx(min(1.0, 2 * min(few, many)), rel=1e-6)


def test_power_is_as_stated() -> None:
    """Catches a noncentral chi-square, a quantile or a factor that is off: what is said to be caught must be, and what
    is half of it mostly not; and a level that is not kept.
    """
    generator, count, level = np.random.default_rng(0), 2000, 1e-4
    distance = detectable(count, level)

    def caught(off: float) -> int:
        full = generator.random((400, count)) < 0.5 + off  # half of the bins too full
        drawn = (generator.random((400, count)) + np.where(full, 0, 1)) / 2
        fits = [uniformity(row, level) for row in drawn]
        return sum(fit is not None and fit.p_value < level for fit in fits)

    assert caught(distance) >= 390
    assert 4 < caught(distance / 2) < 200
    p_values = [fit.p_value for fit in (uniformity(row, level) for row in generator.random((1000, 400))) if fit]
    assert len(p_values) == 1000 and 25 <= sum(p < 0.05 for p in p_values) <= 75
    assert uniformity(generator.random(100), level) is None


def test_the_program_certifies_by_name_and_by_folder(tmp_path: Path) -> None:
    """Catches a command line that loads something else than it says, a page without its figures, a lossy method that
    gets a certificate, and a status of 0 for what was not shown.
    """
    target = tiny_run.save_target(tmp_path / "target")
    save_checkpoint(tmp_path / "head", EagleHead(target.config), make_config("eagle", {"tree": "chain"}, target))
    few = ["begun=2", "begun_tokens=4", "greedy_tokens=6", "texts=3", "new_tokens=6", "batch=2"]
    found = {}
    for drafter in ("prompt_lookup", tmp_path / "head", "mjgd"):
        arguments = ["--target", target.name, "--drafter", drafter, *few, "rounded=bfloat16", f"out={tmp_path / 'out'}"]
        assert status(lossless.main, *arguments) == 1
        found = json.loads((tmp_path / "out" / "lossless.json").read_text())
        page = (tmp_path / "out" / "lossless.md").read_text()
        if drafter == "mjgd":
            assert found["verdict"] == "lossy by design" and found["sampled"] is None
            assert page.startswith("# mjgd: lossy by design\n")
            continue
        assert found["verdict"] == "not shown" and found["drafter"]["drafter"] in ("prompt_lookup", "eagle")
        assert [part["dtype"] for part in found["greedy"]] == ["float32", "bfloat16"]
        assert found["greedy"][0]["tokens"] == 12 and found["greedy"][0]["passed"]
        assert found["sampled"]["texts"] == 4 and found["environment"]["config"]["begun"] == 2
        assert "| float32 | 2 | 12 | 2 | 0 | 0 |" in page and "--drafter" in page
    assert found["environment"]["target"]["name"] == target.name


def test_auto_is_certified_by_fixed_shapes(tmp_path: Path) -> None:
    """Catches a verdict that hangs on what auto chooses on this machine, which may be to draft nothing."""
    target = tiny_run.save_target(tmp_path / "target")
    save_checkpoint(tmp_path / "head", EagleHead(target.config), make_config("eagle", {}, target))
    few = ["begun=2", "begun_tokens=4", "greedy_tokens=6", "texts=3", "new_tokens=6", "batch=2", "rounded=null"]
    arguments = ["--target", target.name, "--drafter", str(tmp_path / "head"), *few, f"out={tmp_path / 'out'}"]
    assert status(lossless.main, *arguments) == 1
    found = json.loads((tmp_path / "out" / "lossless.json").read_text())
    assert [shape["name"] for shape in found["shapes"]] == ["eagle tree=chain", "eagle tree=static", "eagle"]
    assert [shape["sampled"]["longest_draft"] for shape in found["shapes"][:2]] == [5, 5]
    assert found["greedy"] == found["shapes"][0]["greedy"] and found["sampled"] == found["shapes"][0]["sampled"]
    assert found["reasons"][0].startswith("eagle tree=chain: sampled: too few")
    assert "# Certified: eagle tree=static, not shown" in (tmp_path / "out" / "lossless.md").read_text()
