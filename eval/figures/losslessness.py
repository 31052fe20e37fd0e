"""Test a drafter's texts against the target: greedy ones by its argmax, sampled ones by its probabilities.

The target runs as plain forwards of transformers' own model over whole texts, without our loop, cache or rules.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters import Sampling, TargetModel
from drafters.loop.state import padded
from eval.figures import divergence
from eval.figures.goodness_of_fit import POWER, Fit, count_tail, places, uniformity
from eval.measure.watched import PREFILL, Known

# As divergence.TOLERANCE, except for float32: another implementation sums in another order, which moves a logit by some
# roundings of 24 bits.
ROUNDING = divergence.TOLERANCE | {torch.float32: 64 / 2**24}
DEEPEST = 3  # places after this many or more accepted draft tokens are one group
ELEMENTS = 1 << 23  # of logits computed at once
AT_THE_EDGE = 1e-3  # share of tokens that rounding may move across the edge of top-k or top-p
ORDERS = ("target", "draft")
LOST = "are not what their steps committed"


@dataclass
class Texts:
    """Prompts and a drafter's new tokens; ``known``: ``Known`` of every sampled token."""

    prompts: list[list[int]] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)
    known: list[list[Known]] = field(default_factory=list)


def logits_of(target: TargetModel, texts: Texts) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the text, logits ``[new tokens, V]``) of every text."""
    longest = max(len(prompt) + len(new) for prompt, new in zip(texts.prompts, texts.new, strict=True))
    some = max(1, ELEMENTS // (longest * target.vocab_size))
    for start in range(0, len(texts.new), some):
        chosen = slice(start, start + some)
        rows = [prompt + new for prompt, new in zip(texts.prompts[chosen], texts.new[chosen], strict=True)]
        # Padding on the right does not affect causal attention.
        logits = target.model(padded(rows, target.device), use_cache=False).logits
        for index in range(start, start + len(rows)):
            first = len(texts.prompts[index]) - 1
            yield index, logits[index - start, first : first + len(texts.new[index])].float()


def broken_ends(texts: Texts, eos: frozenset[int], limit: int) -> dict[str, int]:
    """Count texts that continue after EOS, end early without EOS, or are longer than the limit."""
    counts = {"go on after EOS": 0, "end early without EOS": 0, "longer than the limit": 0}
    for new in texts.new:
        counts["go on after EOS"] += any(token in eos for token in new[:-1])
        counts["end early without EOS"] += len(new) < limit and not (new and new[-1] in eos)
        counts["longer than the limit"] += len(new) > limit
    return {name: count for name, count in counts.items() if count}


@torch.inference_mode()
def greedy_fit(target: TargetModel, texts: Texts, eos: frozenset[int], limit: int) -> dict[str, Any]:
    """Return every token that is not the target's argmax given the text before it, and whether rounding explains it."""
    divergences = []
    for index, logits in logits_of(target, texts):
        new = torch.tensor(texts.new[index], device=logits.device)
        best, second = logits.topk(2).values.T
        gap = best - logits.gather(1, new[:, None])[:, 0]
        tolerance = ROUNDING[target.dtype] * logits.abs().amax(1)
        columns = zip(gap.tolist(), (best - second).tolist(), tolerance.tolist(), strict=True)
        for position, (below, margin, allowed) in enumerate(columns):
            if below > 0:
                place = {"prompt": index, "position": position, "margin": margin, "gap": below}
                divergences.append(place | {"tolerance": allowed, "explained": below < allowed})
    broken = broken_ends(texts, eos, limit)
    unexplained = sum(not each["explained"] for each in divergences)
    return {
        "texts": len(texts.new),
        "tokens": sum(map(len, texts.new)),
        "exact_texts": len(texts.new) - len({each["prompt"] for each in divergences}),
        "divergences": divergences,
        "unexplained": unexplained,
        "broken_ends": broken,
        "passed": not unexplained and not broken,
    }


@dataclass
class Sample:
    """Columns over all sampled tokens: places on [0, 1) by both orders, and what was known before each was drawn."""

    target: np.ndarray
    draft: np.ndarray  # nan if nothing was drafted
    accepted: np.ndarray
    before: np.ndarray  # PREFILL if there was no step before
    previous: np.ndarray  # place of the previous token, nan for a text's first


@torch.inference_mode()
def sampled_fit(
    target: TargetModel,
    batches: Iterable[Texts],
    sampling: Sampling,
    eos: frozenset[int],
    limit: int,
    alpha: float,
    seed: int,
) -> dict[str, Any]:
    """Test whether sampled texts are drawn from the target's distributions.

    Args:
        limit: largest number of new tokens. alpha: probability that a lossless drafter fails.
    """
    generator = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = []
    ends, expected_ends, outside, texts = 0, 0.0, 0, 0
    broken: dict[str, int] = {}
    for batch in batches:
        for name, count in broken_ends(batch, eos, limit).items():
            broken[name] = broken.get(name, 0) + count
        texts += len(batch.new)
        for index, logits in logits_of(target, batch):
            p, new = sampling.probabilities(logits).double(), batch.new[index]
            if len(batch.known[index]) != len(new):
                broken[LOST] = broken.get(LOST, 0) + 1
                continue
            tokens = torch.tensor(new, device=p.device)
            ends += sum(token in eos for token in new)
            expected_ends += float(p[:, sorted(eos)].sum())
            outside += int((p.gather(1, tokens[:, None]) == 0).sum())
            parts.append(_columns(p, tokens, batch.known[index], generator))
    nothing = [np.empty(0)] * len(fields(Sample))
    sample = Sample(*(np.concatenate(column) for column in zip(nothing, *parts, strict=True)))
    allowed = AT_THE_EDGE * len(sample.target) if sampling.top_k or sampling.top_p < 1 else 0.0
    return {
        "texts": texts,
        "tokens": len(sample.target),
        "broken_ends": broken,
        "outside": outside,
        "ends": {"observed": ends, "expected": expected_ends},
        **judge(sample, ends, expected_ends, alpha),
        "outside_allowed": allowed,
    }


def _columns(p: Tensor, tokens: Tensor, known: Sequence[Known], generator: np.random.Generator) -> list[np.ndarray]:
    """Return the columns of ``Sample`` for one text."""
    by_target = places(p, p, tokens, generator).cpu().numpy()
    by_draft = np.full(len(tokens), np.nan)
    drafted = [index for index, each in enumerate(known) if each.q is not None]
    if drafted:
        q = torch.stack([each.q for each in known if each.q is not None]).to(p)
        # Tokens that the draft overestimates come first: faulty rules accept or reject these wrongly.
        order = torch.where(p[drafted] > 0, q / p[drafted], 0.0)
        by_draft[drafted] = places(p[drafted], order, tokens[drafted], generator).cpu().numpy()
    accepted = np.array([each.accepted for each in known])
    before = np.array([PREFILL if each.before is None else each.before for each in known])
    return [by_target, by_draft, accepted, before, np.concatenate([[np.nan], by_target[:-1]])]


def strata(sample: Sample) -> dict[str, np.ndarray]:
    """Return groups of tokens by name; each group was known before its tokens were drawn."""
    accepted, before = np.minimum(sample.accepted, DEEPEST), np.minimum(sample.before, DEEPEST)
    more = {depth: " or more" if depth == DEEPEST else "" for depth in range(DEEPEST + 1)}
    groups = {"all": np.ones(len(accepted), dtype=bool), "first token": accepted == PREFILL}
    groups |= {f"{depth}{more[depth]} accepted": accepted == depth for depth in more}
    for depth in more:
        groups |= {
            f"{depth}{more[depth]} accepted, {last}{more[last]} in the step before": (accepted == depth)
            & (before == last)
            for last in more
        }
    step = accepted != PREFILL
    groups |= {
        "drafted for": ~np.isnan(sample.draft),
        "after the draft's end": np.isnan(sample.draft) & step & (accepted > 0),
    }
    with np.errstate(invalid="ignore"):
        quarters = np.floor(sample.previous * 4)
    groups |= {f"token before in quarter {quarter + 1}": quarters == quarter for quarter in range(4)}
    return groups


def judge(sample: Sample, ends: int, expected_ends: float, alpha: float) -> dict[str, Any]:
    """Return all tests and one p-value: the smallest times their number (Bonferroni), for any dependence."""
    groups = strata(sample)
    most = len(groups) * len(ORDERS) + 1
    level = alpha / most
    tests: list[dict[str, Any]] = []
    untested: dict[str, int] = {}
    for name, chosen in groups.items():
        for order in ORDERS:
            column: np.ndarray = getattr(sample, order)[chosen]
            column = column[~np.isnan(column)]
            fit: Fit | None = uniformity(column, level)
            if fit is not None:
                tests.append({"tokens": name, "order": order, **asdict(fit)})
            elif order == ORDERS[0] and len(column):
                untested[name] = len(column)
    ends_p = count_tail(ends, expected_ends) if expected_ends else 1.0
    smallest = min([ends_p, *(test["p_value"] for test in tests)])
    deepest = [depth for depth in range(DEEPEST + 1) if any(t["tokens"].startswith(f"{depth}") for t in tests)]
    return {
        "tests": tests,
        "untested": untested,
        "ends_p_value": ends_p,
        "p_value": min(1.0, smallest * most),
        "alpha": alpha,
        "level": level,
        "power": POWER,
        "deepest": max(deepest, default=PREFILL),
    }
