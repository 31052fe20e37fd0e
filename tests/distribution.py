"""Is sampled output distributed as the target's own, at every place of a step?

Of every committed token the stock model says the distribution p given the text before it. By its place in its step (0:
the prefill's, 1: the first behind a root, ...) and the token before it, what was committed is compared with the sum of
those p by a chi-square statistic: a q of another depth shows only from the second place on. So whole texts are judged,
and a drafter whose drafts are hardly ever accepted to a depth of 2 is refused: it would prove nothing about the rest.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import tiny
import torch

from drafters import Drafter, GenerateResult, TargetModel, generate
from drafters.loop.sampling import Sampling

VOCAB = 5
PROMPT = [1, 3]
NEW = 28  # tokens of a text
DEEPEST = 4  # places from here on are one
WARPS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 1.4, "top_k": 4, "top_p": 0.9}]
Warp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # texts [B, T], logits after their last ones -> p, as these
LIMIT = 4.0  # standard deviations above the mean that chance may give


@lru_cache(maxsize=8)
def toy(seed: int = 0, layers: int = 2) -> TargetModel:
    """A target whose distributions differ much from context to context, small enough to run thousands of times."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.35}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return TargetModel(tiny.build("llama", seed=seed, **sizes, **heads, **ids), name=f"toy-{seed}")


def deviation(drafter: Drafter, options: dict[str, Any], tokens: int = 0) -> float:
    """Excess of the chi-square statistic of about ``tokens`` samples over its mean, in standard deviations.

    By default 4,000 where rows can be batched, which costs little, else 1,200: enough to see the wrong rules that
    ``test_the_measurement_sees...`` puts in. Of a bias the statistic grows as the samples do.
    """
    rows, places, deep, steps = [], [], 0, 0
    for result in _texts(drafter, options, tokens or (4_000 if drafter.max_batch is None else 1_200)):
        rows.append(result.tokens)
        places.append(places_of(result))
        deep += sum(step.accepted >= 2 for step in result.trace.steps)
        steps += len(result.trace.steps)
    assert deep > max(15, steps / 200) or drafter.max_draft == 0, f"2 and more accepted in {deep} of {steps} steps"
    return statistic(
        drafter.target, lambda _, logits: Sampling(**options).probabilities(logits), torch.cat(rows), torch.cat(places)
    )


def _texts(drafter: Drafter, options: dict[str, Any], tokens: int) -> Iterator[GenerateResult]:
    """Small batches are verified row by row and large ones side by side: by turns, where a drafter takes both."""
    seed = 0
    while tokens > 0:
        batch = 1 if drafter.max_batch == 1 else (60, 4)[seed % 2]
        yield generate(
            drafter.target, drafter, [PROMPT] * batch, max_new_tokens=NEW, eos_token_id=[], seed=seed, **options
        )
        tokens -= batch * NEW
        seed += 1


def places_of(result: GenerateResult) -> torch.Tensor:
    """``[B, NEW]`` of every token: 0 for the prefill's, then 1, 2, ... in each step."""
    places = [[0] for _ in result.lengths]
    for step in result.trace.steps:
        places[step.row] += range(1, step.committed + 1)
    return torch.tensor(places).clamp_max(DEEPEST)


def statistic(target: TargetModel, warp: Warp, tokens: torch.Tensor, places: torch.Tensor) -> float:
    """Of ``tokens [B, NEW]`` at their ``places [B, NEW]``."""
    text = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], 1)
    with torch.inference_mode():
        p = warp(text[:, :-1], target.model(text).logits[:, len(PROMPT) - 1 : -1]).double()
    assert bool((p.gather(2, tokens[..., None]) > 0).all()), "a token that top-k or top-p excludes was committed"
    drawn = torch.zeros_like(p).scatter_(2, tokens[..., None], 1.0)
    groups = places * VOCAB + text[:, len(PROMPT) - 1 : -1]
    total, degrees = 0.0, 0
    for group in groups.unique().tolist():
        seen = groups == group
        expected = p[seen].sum(0)
        covariance = expected.diag() - p[seen].T @ p[seen]
        order = expected.sort(descending=True).indices
        # What is expected fewer than 4 times is one cell, and so is what is left to compare: the sums are equal.
        kept = order[expected[order] >= 4]
        if expected.sum() - expected[kept].sum() < 4:
            kept = kept[:-1]
        if not len(kept):
            continue
        apart = (drawn[seen].sum(0) - expected)[kept]
        total += float(apart @ torch.linalg.solve(covariance[kept][:, kept], apart))
        degrees += len(kept)
    return (total - degrees) / (2 * degrees) ** 0.5
