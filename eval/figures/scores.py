"""Scores of outputs under the target: perplexity, the logits that judge divergences, and the cost of quantising."""

import math
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import torch

from drafters import TargetModel
from drafters.model.cache import KVCache
from eval.measure.runs import Run

ROWS = 256  # tokens whose logits are computed at once, in float32
TEXTS = 12  # of ``quantisation_cost``
Tokens = tuple[int, ...]


class Logits(NamedTuple):
    """Logits at a token of an output.

    ``loss``: the token's negative log-likelihood in nats. ``chosen``: its logit. ``best``, ``second``: the two largest
    logits. ``scale``: the largest absolute logit.
    """

    loss: float
    chosen: float
    best: float
    second: float
    scale: float


class Scores:
    """The target's logits along outputs; equal outputs are scored once (in bf16 the last digits depend on others).

    Args:
        prompt_ids: token ids of every prompt, by index.
        outputs: (index of the prompt, tokens) of outputs that will be asked for; those of a prompt are scored together.
    """

    def __init__(
        self, target: TargetModel, prompt_ids: list[list[int]], outputs: Iterable[tuple[int, Sequence[int]]] = ()
    ) -> None:
        self.target, self._prompts = target, prompt_ids
        self._waiting: dict[int, set[Tokens]] = {}
        self._known: dict[tuple[int, Tokens], list[Logits]] = {}
        for prompt, tokens in outputs:
            self._waiting.setdefault(prompt, set()).add(tuple(tokens))

    def of(self, prompt: int, tokens: Sequence[int]) -> list[Logits]:
        """Return the logits of every token of an output."""
        key = prompt, tuple(tokens)
        if key not in self._known:
            scored = score(self.target, self._prompts[prompt], self._waiting.pop(prompt, set()) | {key[1]})
            self._known.update({(prompt, output): logits for output, logits in scored.items()})
        return self._known[key]

    def perplexity(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Return the report's ``perplexity``: exp of the mean negative log-likelihood of all new tokens of ``runs``.

        Every token has the same weight. The likelihood is the target's at temperature 1, unfiltered; EOS counts if the
        output has it. None, with the reason, if it could not be computed, so that no measurement is lost.
        """
        try:
            total = sum(one.loss for run in runs for one in self.of(run.prompt, run.tokens))
            perplexity = math.exp(total / sum(len(run.tokens) for run in runs))
            if not math.isfinite(perplexity):
                raise ValueError(f"the outputs' log-likelihood is {-total}")
        except Exception as error:
            return {"perplexity": None, "perplexity_unavailable": f"{type(error).__name__}: {error}"}
        return {"perplexity": perplexity}


@torch.inference_mode()
def score(target: TargetModel, prompt: list[int], outputs: set[Tokens]) -> dict[Tokens, list[Logits]]:
    """Return the logits of every token of each output after ``prompt``, in float32.

    The target computes the prompt and common beginnings of outputs once: sorted, each output shares the longest
    beginning with the previous one.
    """
    *body, root = prompt

    def prefilled() -> KVCache:
        cache = target.new_cache(1, len(prompt) + max(map(len, outputs)))
        if body:
            cache.expect([len(body)])
            target.run(torch.tensor([body], device=target.device), cache)
            cache.commit_first([len(body)])
        return cache

    cache = prefilled()
    scored: dict[Tokens, list[Logits]] = {}
    before: Tokens = ()
    for tokens in sorted(outputs):
        same = len(commonprefix([before, tokens]))
        if target.chains_only and before:  # a running state goes back no further than a draft
            cache, same = prefilled(), 0
        cache.crop([len(body) + same])
        new = torch.tensor([[root, *tokens][same : len(tokens)]], device=target.device)
        cache.expect([new.shape[1]])
        features = target.run(new, cache).features[0]
        cache.commit_first([new.shape[1]])
        scored[tokens] = scored[before][:same] if before else []
        for rows, ids in zip(features.split(ROWS), torch.tensor(tokens[same:]).split(ROWS), strict=True):
            logits = target.lm_head(rows).float()  # [rows, V]
            chosen = logits.gather(-1, ids.to(rows.device)[:, None])[:, 0]
            best = logits.topk(2).values
            columns = logits.logsumexp(-1) - chosen, chosen, best[:, 0], best[:, 1], logits.abs().amax(-1)
            scored[tokens] += [Logits(*row) for row in torch.stack(columns, 1).double().tolist()]
        before = tokens
    cache.release()
    return scored


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
