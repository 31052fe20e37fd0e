"""How likely the target finds an output: what a lossy method gives up, or gains, shows there."""

import math
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import Any

import torch

from drafters import TargetModel
from eval.measure.runner import Run

ROWS = 256  # logits of this many tokens at once, in float32
Tokens = tuple[int, ...]


class OutputPerplexity:
    """Perplexity of outputs under the target; what several methods said alike is scored once (so that in bf16 its last
    digits depend on what else was said).

    Args:
        prompt_ids: token ids of every prompt, by its index.
        runs: all whose outputs will be asked for, as far as they are known: those of one prompt are scored together.
    """

    def __init__(self, target: TargetModel, prompt_ids: list[list[int]], runs: Iterable[Run] = ()) -> None:
        self._target, self._prompts = target, prompt_ids
        self._waiting: dict[int, set[Tokens]] = {}
        self._known: dict[tuple[int, Tokens], float] = {}
        for run in runs:
            self._waiting.setdefault(run.prompt, set()).add(tuple(run.tokens))

    def describe(self, runs: Sequence[Run]) -> dict[str, Any]:
        """``perplexity`` for the report's row: exp of the mean negative log-likelihood of all new tokens of ``runs``.

        Every token has the same weight, so that longer outputs count for more. The likelihood is the target's own, at
        temperature 1 and unfiltered, whatever the tokens were sampled with; EOS counts where the output has it. None,
        with the reason beside it, where it could not be computed: what was measured is worth more than this figure.
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
            except (RuntimeError, ValueError):  # of one of them, perhaps: no reason to lose the others
                if len(outputs) == 1:
                    raise
                found = negative_log_likelihoods(self._target, self._prompts[prompt], {tokens})
            self._known.update({(prompt, output): value for output, value in found.items()})
        return self._known[prompt, tokens]


@torch.inference_mode()
def negative_log_likelihoods(target: TargetModel, prompt: list[int], outputs: set[Tokens]) -> dict[Tokens, float]:
    """Of each of ``outputs`` after ``prompt``, in nats, summed over its tokens; float32 from the logits on.

    The prompt goes through the target once, and so does what outputs begin with alike: in their order, each shares more
    with the one before than with any earlier one.
    """
    *body, root = prompt
    cache = target.new_cache(1, len(prompt) + max(map(len, outputs)))
    if body:
        target.run(torch.tensor([body], device=target.device), cache)
        cache.commit_first([len(body)])
    found: dict[Tokens, float] = {}
    before: Tokens = ()
    values: list[float] = []  # of the tokens of the output before
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
