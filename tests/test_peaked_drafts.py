"""Is sampled output the target's where the drafter's q is peaked and top-p or top-k cut it, for every kind of tree?

Then some nodes lie outside of its support, as there are more children than tokens with a probability. Verification must
not accept them, though the target's p, which is flat, has their tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distribution import LIMIT, deviation, toy
from rigged import Cycling, auto_eagle, dflash, dflash2, dspark, eagle, eagle3, medusa

from drafters import Drafter, TargetModel
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.methods.speculative import SpeculativeDrafter
from drafters.model.draft_head import DraftHead

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 0, 1]]
TOY: dict[str, Any] = {"taps": [1, 2]}
FEW: dict[str, Any] = {"selector_top_k": 3, "conv_group_size": 4}  # of DFlash2
CUT: list[dict[str, Any]] = [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.3, "top_k": 2}]


def kangaroo_tree(target: TargetModel) -> Drafter:
    torch.manual_seed(4)
    adapter = KangarooAdapter(target.config, KangarooShape(exit_layer=1))
    return KangarooDrafter(target, adapter, KangarooOptions(eta=0.0, paths=PATHS))


def cycling(drafter: Any) -> Drafter:
    """The drafter, whose drafts change shape every step."""
    drafter.policy = Cycling()
    return drafter


MAKERS: dict[str, Callable[[TargetModel], Any]] = {
    "speculative": lambda t: SpeculativeDrafter.from_options(t, draft_model=toy(1, 1), gamma=3),
    "eagle static": lambda t: eagle(t, None, "static", paths=PATHS),
    "eagle auto": lambda t: auto_eagle(t, None, Cycling()),
    "eagle dynamic": lambda t: eagle(t, None, "dynamic", depth=3, top_k=3, nodes=8),
    "eagle3 static": lambda t: eagle3(t, None, "static", paths=PATHS, **TOY),
    "medusa static": lambda t: medusa(t, None, "static", paths=PATHS),
    "kangaroo tree": kangaroo_tree,
    "dflash tree": lambda t: dflash(t, None, "tree", nodes=9, top_k=3, **TOY),
    "dflash auto": lambda t: cycling(dflash(t, None, "auto", **TOY)),
    "dspark tree": lambda t: dspark(t, None, "tree", nodes=9, top_k=3, **TOY),
    "dspark auto": lambda t: cycling(dspark(t, None, "auto", **TOY)),
    "dflash2 auto": lambda t: cycling(dflash2(t, None, "auto", **TOY, **FEW)),
}


@pytest.mark.parametrize(("name", "cut"), [(name, n % 2 * ("auto" not in name)) for n, name in enumerate(MAKERS)])
def test_output_is_distributed_as_the_targets(name: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches accepted nodes outside of q's support, and trials with a q that is not cut as the draws were."""
    call, target = DraftHead.__call__, toy()
    monkeypatch.setattr(DraftHead, "__call__", lambda head, features: 5 * call(head, features))
    drafter, padding = MAKERS[name](target), []
    propose = drafter.propose

    def noted(state: DecodeState) -> DraftTree:
        draft = propose(state)
        padding.append(draft.valid is not None and not bool(draft.valid.all()))
        return draft

    monkeypatch.setattr(drafter, "propose", noted)
    assert deviation(drafter, CUT[cut], tokens=2_000) < LIMIT
    assert any(padding) == (name not in ("speculative", "eagle dynamic", "dflash tree", "dspark tree"))
