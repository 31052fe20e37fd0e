"""How likely the target finds an output: what a lossy method gives up, or gains, shows there."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from drafters import TargetModel
from eval.measure.runner import Run

ROWS = 256  # logits of this many tokens at once, in float32


class OutputPerplexity:
    """Perplexity of outputs under the target; an output that several methods made is scored once.

    Args:
        prompt_ids: token ids of every prompt, by its index.
    """

    def __init__(self, target: TargetModel, prompt_ids: list[list[int]]) -> None:
        self._score = functools.cache(lambda prompt, new: negative_log_likelihood(target, prompt_ids[prompt], [*new]))

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


@torch.inference_mode()
def negative_log_likelihood(target: TargetModel, prompt: list[int], tokens: list[int]) -> float:
    """Of ``tokens`` after ``prompt``, in nats, summed over the tokens; float32 from the logits on."""
    features = target.features(torch.tensor([prompt + tokens[:-1]], device=target.device)).features[0, -len(tokens) :]
    wanted = torch.tensor(tokens, device=target.device)[:, None]
    total = 0.0
    for rows, ids in zip(features.split(ROWS), wanted.split(ROWS), strict=True):
        total -= target.lm_head(rows).float().log_softmax(-1).gather(-1, ids).double().sum().item()
    return total
