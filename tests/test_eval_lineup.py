"""From a config's entries to drafters: which models are loaded, what is refused before, what a report says of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from drafters import TargetModel
from eval.configs import SpeedConfig
from eval.entries import DrafterEntry
from eval.measure.lineup import Lineup
from eval.measure.models import Models


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
