"""What quantising has cost a target: the figure itself, and that a report carries it."""

import pytest
import tiny
import torch
from conformance import prompt

from drafters import TargetModel
from eval.figures.scores import quantisation_cost


def test_the_cost_by_hand() -> None:
    """Catches the distance taken the other way round, or summed where it should be a mean."""
    whole, other = TargetModel(tiny.build("llama")), TargetModel(tiny.build("llama", seed=1))
    texts = [prompt(9), prompt(20, 1)]
    p, q = (
        torch.cat([model.model(torch.tensor([ids])).logits[0].double().softmax(-1) for ids in texts])
        for model in (whole, other)
    )
    found = quantisation_cost(whole, other, texts)
    assert found["kl"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert found["same_argmax"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found["positions"] == 29
    same = quantisation_cost(whole, whole, texts)
    assert abs(same["kl"]) < 1e-6 and same["same_argmax"] == 1.0
