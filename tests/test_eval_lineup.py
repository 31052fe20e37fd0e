"""From a config's entries to drafters: which models are loaded, what is refused before, what a report says of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_eval_metrics import placed
from tiny import VOCAB_SIZE, build
from transformers import PreTrainedModel

from drafters import TargetModel, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.model.draft_head import DRAFT_IDS
from eval.configs import SpeedConfig
from eval.entries import DrafterEntry
from eval.measure.lineup import Lineup, draft_vocabulary, trained_with
from eval.measure.models import Models
from eval.measure.runs import Outcome
from eval.prompts.prompts import Prompt
from eval.report.judged import add_coverage


def entries(*given: dict[str, Any]) -> list[DrafterEntry]:
    return [DrafterEntry.model_validate(entry) for entry in given]


@pytest.fixture
def target(tiny_model: Callable[..., PreTrainedModel]) -> TargetModel:
    return TargetModel(tiny_model("llama"))


def test_draft_models_are_loaded_once_and_drafters_are_new_every_round(
    target: TargetModel, loads: list[str], tiny_checkpoint: Callable[..., Path]
) -> None:
    """Catches a draft model loaded again for each method and round, and a pool that outlives its round."""
    path = str(tiny_checkpoint("llama", 1))
    given = [{"drafter": name, "draft_model": path} for name in ("speculative", "ouroboros", "mjsd")]
    lineup = Lineup(entries(*given), Models(target))
    rounds = [lineup.fresh(0.0) for _ in range(3)]
    assert loads == [path]
    assert len({id(drafter) for drafters in rounds for drafter in drafters.values()}) == 9
    assert len({id(drafters["ouroboros"].pool) for drafters in rounds}) == 3  # type: ignore[attr-defined]


def test_a_grid_becomes_an_entry_for_each_combination() -> None:
    """Catches combinations left out, doubled or sharing one dict of options, and labels that do not tell them apart."""
    given = {"drafter": "cascade", "label": "C", "draft_model": "x", "inner": {"drafter": "speculative"}}
    (entry,) = entries(given | {"grid": {"gamma": [3, 4], "inner.gamma": [1, 2]}})
    expanded = entry.expand()
    names = ["C gamma=3 inner.gamma=1", "C gamma=3 inner.gamma=2", "C gamma=4 inner.gamma=1", "C gamma=4 inner.gamma=2"]
    assert [e.name for e in expanded] == names
    assert [(e.options["gamma"], e.options["inner"]) for e in expanded] == [
        (gamma, {"drafter": "speculative", "gamma": inner}) for gamma in (3, 4) for inner in (1, 2)
    ]
    assert expanded[2].knobs == {"gamma": 4, "inner.gamma": 1}
    assert {e.base for e in expanded} == {"C"}
    assert entries(given)[0].expand()[0].name == "C"


def test_a_name_may_have_other_settings_at_another_temperature(target: TargetModel) -> None:
    """Catches the settings of one temperature measured at the other, where each was tuned for its own."""
    chosen = entries(
        {"label": "lookup", "drafter": "prompt_lookup", "gamma": 7, "temperatures": [0.0]},
        {"label": "lookup", "drafter": "prompt_lookup", "gamma": 3, "temperatures": [1.0]},
    )
    lineup = Lineup(chosen, Models(target))
    for _ in range(2):  # the drafters that were built at the start, and those of a later round
        assert [lineup.fresh(t)["lookup"].max_draft for t in (0.0, 1.0)] == [7, 3]
    values = {"target": {"path": "t"}, "prompts": {"file": "p"}, "out": "o", "temperatures": [0.0, 1.0]}

    def config(*drafters: dict[str, Any]) -> SpeedConfig:
        return SpeedConfig.model_validate(values | {"drafters": list(drafters)})

    first, second = (entry.model_dump(exclude_unset=True) for entry in chosen)
    assert len(config(first, second).entries) == 3
    with pytest.raises(ValueError, match="'lookup'.*taken twice"):
        config(first, second | {"temperatures": [0.0, 1.0]})
    with pytest.raises(ValueError, match="'lookup'.*one method at one temperature and another"):
        config(first, {"label": "lookup", "drafter": "lookahead", "temperatures": [1.0]})


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
