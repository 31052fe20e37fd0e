"""What quantising has cost a target: the figure itself, and that a report carries it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import prompt
from programs import run
from test_eval_prompts import sharegpt

import eval.speed
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


def test_a_report_carries_it(speed_config: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Catches speeds of a quantised target without a word about how far it is from the model; and the cost of the
    quantised target against itself, which is none.
    """
    keys = {"drafters": [{"drafter": "autoregressive"}], "max_new_tokens": 5, "temperatures": [0.0]}
    config = speed_config([sharegpt(f"w{i} w2 w7", "w1") for i in range(4)], {"count": 2}, **keys)
    for kind in (None, "int8"):
        assert run(eval.speed.main, config, f"target.quantize={kind or 'null'}") == 0
        facts = json.loads((tmp_path / "out" / "report.json").read_text())["environment"]
        page = (tmp_path / "out" / "report.md").read_text()
        if kind is None:
            assert "quantisation" not in facts and "KL" not in page
        else:
            assert 1e-9 < facts["quantisation"]["kl"] < 0.1 and facts["quantisation"]["positions"] > 10
            assert f"layers in int8: KL {facts['quantisation']['kl']:.4f} from the target in float32" in page
