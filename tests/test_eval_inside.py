"""What a report takes from within its drafters: their training, and the tokens that they can draft."""

from typing import Any

import torch
from test_eval_metrics import placed
from tiny import VOCAB_SIZE, build

from drafters import TargetModel, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.model.draft_head import DRAFT_IDS
from eval.measure.lineup import draft_vocabulary, trained_with
from eval.measure.runs import Outcome
from eval.prompts.prompts import Prompt
from eval.report.judged import add_coverage


def test_of_a_head_within_a_hybrid() -> None:
    """Catches a head's training and its pruned vocabulary that are lost where another drafter wraps it, a vocabulary
    taken for pruned that is whole, and a coverage of another method's outputs."""
    target = TargetModel(build("llama"))
    module = EagleHead(target.config)
    whole = EagleDrafter(target, module, EagleOptions())
    assert draft_vocabulary(whole) is None and trained_with(whole) == []
    kept = list(range(0, VOCAB_SIZE - 1, 2))
    module.register_buffer(DRAFT_IDS, torch.tensor(kept))
    head = EagleDrafter(target, module, EagleOptions(draft_vocab=len(kept) - 1, draft_text=1, tree="chain", depth=2))
    head.provenance = {"training": {"data": "d.jsonl", "minutes": 3.0, "config": {"init_from": "x"}}}
    hybrid = make_drafter("hybrid", target, head=head, match=4)
    vocabulary = draft_vocabulary(hybrid)
    assert vocabulary is not None and {token for token in range(VOCAB_SIZE) if token in vocabulary} == set(kept)
    assert trained_with(hybrid) == [{"drafter": "eagle", "data": "d.jsonl", "minutes": 3.0, "init_from": "x"}]
    runs = [placed(Outcome(tokens, 0.1, 1.0), 0, 2.0, name) for name, tokens in (("a", [0, 2, 3, 3, 9]), ("b", [1, 1]))]
    judged: list[dict[str, Any]] = [{"drafter": n, "temperature": 0.0, "batch": 1, "figures": {}} for n in "ab"]
    prompts = [Prompt("0", None, [4, 9, 5])]
    add_coverage(judged, runs, {"a": vocabulary}, prompts)
    # 2 is frequent; 3 is neither that nor of the text, then it is, the one row being its; so 9 of the prompt has none.
    assert judged[0]["figures"] == {"draft_vocab": len(kept), "draft_vocab_coverage": 0.5} and not judged[1]["figures"]
