"""What quantising has cost a target: the figure itself, and that a report carries it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from conformance import prompt
from programs import status
from test_eval_prompts import sharegpt, write, write_target
from transformers import PreTrainedModel

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


def test_a_report_carries_it(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Catches speeds of a quantised target without a word about how far it is from the model; and the cost of the
    quantised target against itself, which is none.
    """
    target = write_target(tmp_path, tiny_model("llama"))
    records = [sharegpt(f"w{i} w2 w7", "w1") for i in range(4)]
    config = {
        "target": {"path": target, "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(write(tmp_path / "prompts.jsonl", records)), "count": 2},
        "drafters": [{"drafter": "autoregressive"}],
        "max_new_tokens": 5,
        "rounds": 1,
        "warmup": 1,
        "out": str(tmp_path / "out"),
        "temperatures": [0.0],
    }
    (tmp_path / "speed.yaml").write_text(yaml.safe_dump(config))
    for kind in (None, "int8"):
        assert status(eval.speed.main, "--config", tmp_path / "speed.yaml", f"target.quantize={kind or 'null'}") == 0
        facts = json.loads((tmp_path / "out" / "report.json").read_text())["environment"]
        page = (tmp_path / "out" / "report.md").read_text()
        if kind is None:
            assert "quantisation" not in facts and "KL" not in page
        else:
            assert 1e-9 < facts["quantisation"]["kl"] < 0.1 and facts["quantisation"]["positions"] > 10
            assert f"layers in int8: KL {facts['quantisation']['kl']:.4f} from the target in float32" in page
