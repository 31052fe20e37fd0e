"""Is sampled text as likely as the model's own? A bias towards likely tokens shows after some hundred of them."""

import math

import torch

from drafters import Drafter, Sampling, TargetModel, generate


def excess(model: TargetModel, drafter: Drafter, prompt: list[int], runs: int = 4, new_tokens: int = 150) -> float:
    """By how many standard deviations sampled tokens are likelier than plain sampling would make them.

    Given the tokens before it, the log-likelihood of one drawn from p has mean sum(p log p), and a known variance; the
    sum over all of them is close to normal. Within 3 is as it should be.
    """
    above, variance = 0.0, 0.0
    for seed in range(runs):
        options = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": seed, "eos_token_id": []}
        new = generate(model, drafter, [prompt], **options).tokens[0].tolist()  # type: ignore[arg-type]
        logits = model.model(torch.tensor([prompt + new])).logits[0, len(prompt) : -1]
        p = Sampling(1.0).probabilities(logits)
        mean = (p * p.log()).sum(-1)
        drawn = p.log().gather(1, torch.tensor(new[1:])[:, None])[:, 0]
        above += float((drawn - mean).sum())
        variance += float((p * (p.log() - mean[:, None]) ** 2).sum())
    return above / math.sqrt(variance)
