"""Perplexity of outputs under the target, and how far quantising moves a target from the loaded model."""

import math
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import Any

import torch

from drafters import TargetModel
from eval.measure.runner import Run

ROWS = 256  # logits of this many tokens at once, in float32
TEXTS = 12  # of ``quantisation_cost``
Tokens = tuple[int, ...]


class OutputPerplexity:
    """Perplexity of outputs under the target; equal outputs are scored once (in bf16 the last digits depend on others).

    Args:
        prompt_ids: token ids of every prompt, by index.
        runs: runs whose outputs will be asked for, as far as known; those of one prompt are scored together.
    """

    def __init__(self, target: TargetModel, prompt_ids: list[list[int]], runs: Iterable[Run] = ()) -> None:
        self._target, self._prompts = target, prompt_ids
        self._waiting: dict[int, set[Tokens]] = {}
        self._known: dict[tuple[int, Tokens], float] = {}
        for run in runs:
            self._waiting.setdefault(run.prompt, set()).add(tuple(run.tokens))

    def describe(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Return the report's ``perplexity``: exp of the mean negative log-likelihood of all new tokens of ``runs``.

        Every token has the same weight. The likelihood is the target's at temperature 1, unfiltered; EOS counts if the
        output has it. None, with the reason, if it could not be computed, so that no measurement is lost.
        """
        try:
            total = sum(self._score(run.prompt, tuple(run.tokens)) for run in runs)
            perplexity = math.exp(total / sum(len(run.tokens) for run in runs))
            if not math.isfinite(perplexity):
                raise ValueError(f"the outputs' log-likelihood is {-total}")
        except Exception as error:
            return {"perplexity": None, "perplexity_unavailable": f"{type(error).__name__}: {error}"}
        return {"perplexity": perplexity}

    def _score(self, prompt: int, tokens: Tokens) -> float:
        if (prompt, tokens) not in self._known:
            outputs = self._waiting.pop(prompt, set()) | {tokens}
            try:
                found = negative_log_likelihoods(self._target, self._prompts[prompt], outputs)
            except (RuntimeError, ValueError):  # perhaps because of another output
                if len(outputs) == 1:
                    raise
                found = negative_log_likelihoods(self._target, self._prompts[prompt], {tokens})
            self._known.update({(prompt, output): value for output, value in found.items()})
        return self._known[prompt, tokens]


@torch.inference_mode()
def negative_log_likelihoods(target: TargetModel, prompt: list[int], outputs: set[Tokens]) -> dict[Tokens, float]:
    """Return the negative log-likelihood of each output after ``prompt``, in nats, summed over tokens, in float32.

    The target computes the prompt and common beginnings of outputs once: sorted, each output shares the longest
    beginning with the previous one.
    """
    *body, root = prompt
    cache = target.new_cache(1, len(prompt) + max(map(len, outputs)))
    if body:
        target.run(torch.tensor([body], device=target.device), cache)
        cache.commit_first([len(body)])
    found: dict[Tokens, float] = {}
    before: Tokens = ()
    values: list[float] = []  # of the previous output's tokens
    for tokens in sorted(outputs):
        same = len(commonprefix([before, tokens]))
        cache.crop([len(body) + same])
        given = torch.tensor([[root, *tokens][same : len(tokens)]], device=target.device)
        features = target.run(given, cache).features[0]
        cache.commit_first([given.shape[1]])
        values = values[:same]
        for rows, ids in zip(features.split(ROWS), torch.tensor(tokens[same:]).split(ROWS), strict=True):
            chosen = target.lm_head(rows).float().log_softmax(-1).gather(-1, ids.to(rows.device)[:, None])
            values += (-chosen[:, 0].double()).tolist()
        found[tokens], before = sum(values), tokens
    cache.release()
    return found


@torch.inference_mode()
def quantisation_cost(whole: TargetModel, target: TargetModel, texts: list[list[int]]) -> dict[str, Any]:
    """Return the report's ``quantisation``, over all positions of the first ``TEXTS`` texts (token ids).

    Args:
        whole: the target before quantising.

    Returns:
        ``kl``: mean KL(whole || target), in nats. ``same_argmax``: share of positions with the same best token.
        ``positions``: their number.
    """
    kl, same, positions = 0.0, 0, 0
    for ids in texts[:TEXTS]:
        ours, theirs = (
            model.lm_head(model.features(torch.tensor([ids], device=model.device)).features[0]).float().log_softmax(-1)
            for model in (target, whole)
        )
        kl += (theirs.exp() * (theirs - ours)).sum().item()
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += len(ids)
    return {"kl": kl / positions, "same_argmax": same / positions, "positions": positions}
