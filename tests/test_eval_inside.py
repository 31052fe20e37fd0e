"""What a report takes from within its drafters: their training, and the tokens that they can draft."""

from typing import Any

import torch
from test_eval_metrics import placed
from tiny import VOCAB_SIZE, build

from drafters import TargetModel, make_drafter
from drafters.eagle import EagleDrafter, EagleHead, EagleOptions
from drafters.model.draft_head import DRAFT_IDS
from eval.figures.coverage import add_coverage
from eval.measure.inside import draft_ids, trained_with
from eval.measure.runner import Outcome


def test_of_a_head_within_a_hybrid() -> None:
    """Catches a head's training and its pruned vocabulary that are lost where another drafter wraps it, a vocabulary
    taken for pruned that is whole, and a coverage of another method's outputs."""
    target = TargetModel(build("llama"))
    module = EagleHead(target.config)
    whole = EagleDrafter(target, module, EagleOptions())
    assert draft_ids(whole) is None and trained_with(whole) == []
    kept = list(range(0, VOCAB_SIZE, 2))
    module.register_buffer(DRAFT_IDS, torch.tensor(kept))
    head = EagleDrafter(target, module, EagleOptions(draft_vocab=len(kept), tree="chain", depth=2))
    head.provenance = {"training": {"data": "d.jsonl", "minutes": 3.0, "config": {"init_from": "x"}}}
    hybrid = make_drafter("hybrid", target, head=head, match=4)
    assert draft_ids(hybrid) == set(kept)
    assert trained_with(hybrid) == [{"drafter": "eagle", "data": "d.jsonl", "minutes": 3.0, "init_from": "x"}]
    runs = [placed(Outcome(tokens, 0.1, 1.0), 0, 2.0, name) for name, tokens in (("a", [0, 2, 3, 4]), ("b", [1, 1]))]
    judged: list[dict[str, Any]] = [{"drafter": n, "temperature": 0.0, "batch": 1, "figures": {}} for n in "ab"]
    add_coverage(judged, runs, {"a": set(kept)})
    assert judged[0]["figures"] == {"draft_vocab": len(kept), "draft_vocab_coverage": 0.75} and not judged[1]["figures"]
