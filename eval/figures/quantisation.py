"""How far quantising its layers moves a target from the loaded model."""

from typing import Any

import torch

from drafters import TargetModel

TEXTS = 12


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


def about_quantisation(facts: dict[str, Any]) -> list[str]:
    """Return the report's line about it, if the target is quantised; ``facts``: the report's ``environment``."""
    cost = facts.get("quantisation")
    if cost is None:
        return []
    return [
        f"layers in {facts['quantize']}: KL {cost['kl']:.4f} from the target in {facts['dtype']}, and the same best "
        f"token at {cost['same_argmax']:.1%} of {cost['positions']:,} positions of prompts and plain decoding's answers"
    ]
