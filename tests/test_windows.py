"""Windows of block heads: their edges, bounded caches, long texts, and keys that contradict each other.

The forward is compared with its description in test_dflash.py, and training in test_train_dflash.py.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_run
import torch
from block_reference import sees
from conformance import NO_EOS, each_draft, plain_greedy, prompt, target_of
from pydantic import ValidationError
from rigged import BLOCK, dflash, dspark
from test_dflash import compare
from test_train_dflash import BLOCK as TRAINED

from drafters import generate
from drafters.drafting import head as head_file
from drafters.heads.block.shape import BlockShape
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.model.rows import Placed, Rows, Scope

WINDOWS: dict[str, dict[str, Any]] = {
    "all": {"sliding_window": 6},
    "causal": {"sliding_window": 6, "causal": "sliding"},
    "anchored": {"sliding_window": 5, "window_edge": "anchor"},
    "mixed": {"sliding_window": 5, "full_layers": [1], "causal": "sliding"},
}
PROMPTS = [prompt(30), prompt(3, 1), prompt(9, 2)]


@pytest.mark.parametrize("length", [4, 5, 6, 7, 20])
@pytest.mark.parametrize("causal", [False, "sliding"])
@pytest.mark.parametrize("edge", ["slot", "anchor"])
def test_the_edge_of_a_window(edge: Any, causal: Any, length: int) -> None:
    """Catches a window of 6 that is one too long or too short, behind 4 to 7 tokens, or that moves with the slots where
    it must not."""
    shape = BlockShape(**BLOCK | {"layout": "fill-in", "sliding_window": 6, "window_edge": edge, "causal": causal})
    rows = Rows(torch.ones(1, shape.rows, shape.rows, dtype=torch.bool))
    scope = Scope(6, anchored=edge == "anchor", causal=causal == "sliding")
    for lengths in ([length], [length, 2]):
        mask = Placed(rows, lengths, shape.rows, torch.device("cpu")).mask(scope, always=True)
        assert mask is not None
        for row, context in enumerate(lengths):
            seen = mask[row if len(mask) > 1 else 0, 0]
            assert torch.equal(seen[:, : context + shape.rows], sees(shape, 0, context, shape.rows))
            assert not seen[:, context + shape.rows :].any()


@pytest.mark.parametrize("kind", [dflash, dspark])
def test_a_window_of_the_whole_text_changes_nothing(kind: Any) -> None:
    """Catches a window that hides a token within its length: the slots' states are equal bit for bit."""
    target, states = target_of("llama"), list[list[torch.Tensor]]()
    for more in ({}, {"sliding_window": 64}, {"sliding_window": 64, "window_edge": "anchor"}):
        drafter, seen = kind(target, None, "chain", **more), list[torch.Tensor]()
        scored = drafter.head.scored

        def noted(slots: torch.Tensor, state: Any, scored: Any = scored, seen: list[torch.Tensor] = seen) -> Any:
            seen.append(slots)
            return scored(slots, state)

        with mock.patch.object(drafter.head, "scored", noted):
            generate(target, drafter, [prompt(9), prompt(4, 1)], max_new_tokens=20, eos_token_id=NO_EOS)
        states.append(seen)
    for others in states[1:]:
        assert len(others) == len(states[0]) > 4
        assert all(torch.equal(one, other) for one, other in zip(states[0], others, strict=True))


@pytest.mark.parametrize(
    ("case", "temperature"), [*((case, 0.0) for case in WINDOWS), ("mixed", 0.9), ("anchored", 0.9)]
)
def test_texts_of_several_windows(case: str, temperature: float) -> None:
    """Catches a bounded cache that loses a token within a window, keeps a rejected one, or turns keys by their slots:
    drafts equal those of the whole text's features, and only a head with a full layer keeps them all.
    """
    target, counts, sizes = target_of("llama"), list[int](), list[int]()
    drafter = dflash(target, None, "chain", **WINDOWS[case])
    reach = drafter.module.shape.reach

    def compared(state: DecodeState, draft: DraftTree) -> None:
        compare(drafter, counts, state, draft)
        sizes.append(drafter.head.cache.capacity)

    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": NO_EOS, "temperature": temperature, "seed": 1}
    with each_draft(drafter, compared), mock.patch.object(head_file, "SPARE", 12):
        texts = generate(target, drafter, PROMPTS, **options)
    assert len(counts) > 100
    assert (reach is None) is (case == "mixed")
    assert max(sizes) > 90 if reach is None else {*sizes} == {2 * reach + 12}
    assert any(drafter.head.cache.dropped) is (reach is not None)
    if not temperature:
        assert texts.tokens.tolist() == [plain_greedy(target, each, 60) for each in PROMPTS]


@pytest.mark.parametrize("engine", ["graphs", "stock"])
def test_other_engines_have_the_same_windows(engine: Any) -> None:
    """Catches a captured forward that turns keys by their slots, or whose window is that of another layer."""
    import tiny

    from drafters import TargetModel

    target, counts = TargetModel(tiny.build("llama"), engine=engine, name=engine), list[int]()
    drafter = dflash(target, None, "chain", **WINDOWS["anchored"])
    with each_draft(drafter, partial(compare, drafter, counts)), mock.patch.object(head_file, "SPARE", 12):
        generate(target, drafter, PROMPTS[:2], max_new_tokens=60, eos_token_id=NO_EOS)
    assert len(counts) > 50 and any(drafter.head.cache.dropped)


def test_pending_tokens_beyond_a_window() -> None:
    """Catches a drafter that waited for longer than its window, as in a hybrid: it reads the window's end."""
    target, counts = target_of("llama"), list[int]()
    drafter = dflash(target, None, "chain", sliding_window=6)
    propose, steps = drafter.propose, iter(range(1000))

    def compared(state: Any) -> Any:
        if next(steps) % 12:
            return state.nothing
        draft = propose(state)
        compare(drafter, counts, state, draft)
        return draft

    with mock.patch.object(drafter, "propose", compared), mock.patch.object(head_file, "SPARE", 12):
        generate(target, drafter, [prompt(9), prompt(3, 1)], max_new_tokens=60, eos_token_id=NO_EOS)
    assert len(counts) > 6


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "below a block": ({"sliding_window": 4}, "sliding_window is 4, and a block has 5 rows"),
    "no window": ({"full_layers": [0]}, "full_layers is .0., and there is no sliding_window"),
    "an edge of no window": ({"window_edge": "anchor"}, "window_edge is anchor, and there is no sliding_window"),
    "causal in none": ({"causal": "sliding"}, "causal is sliding, and there is no sliding_window"),
    "no such layer": ({"sliding_window": 8, "full_layers": [2]}, "names layer 2, and the head has the layers 0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_contradict_each_other(case: str) -> None:
    """Catches a head with other windows than its config says."""
    keys, message = REFUSED[case]
    with pytest.raises(ValidationError, match=message):
        BlockShape(**BLOCK | {"layout": "fill-in"} | keys)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_long_dialogues_have_windows_by_default(kind: str, tmp_path: Path) -> None:
    """Catches a default that overrides null, a window of one's own or that of ``init_from``, that leaves out stores, or
    that changes runs on short dialogues."""
    store = tmp_path / "features"
    for split, longest in (("train", 8192), ("heldout", 64)):
        (store / split).mkdir(parents=True)
        header = tiny_run.header(target_of("llama")).model_copy(update={"max_length": longest})
        (store / split / "manifest.json").write_text(header.model_dump_json())
    online = {"features": "online", "data": {"train": "a", "heldout": "b", "max_length": 8192}}
    short = {"features": "online", "data": {"train": "a", "heldout": "b", "max_length": 4096}}
    for given, expected in (
        ({"features": str(store)}, 2048),
        (online, 2048),
        (short, None),
        ({"features": str(tmp_path / "none")}, None),
        (online | {"sliding_window": None}, None),
        (online | {"head": {"sliding_window": 64}}, 64),
        (online | {"init_from": "head"}, None),
    ):
        config: Any = tiny_run.read(kind, tiny_run.settings("t", store, tmp_path / "run", **TRAINED) | given)
        assert config.head.sliding_window == expected, given
        again: Any = type(config).model_validate(config.model_dump())
        assert again.head.sliding_window == expected, "a recorded config"
