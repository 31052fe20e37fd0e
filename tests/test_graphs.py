"""Forwards of fixed shapes: the same values as of any shape, on memory that is used again. (Without a GPU the captured
code is run, not replayed: what is computed is tested here, that it can be captured only where there is one.)
"""

import gc
from typing import Any

import families
import pytest
import tiny
import torch
from conformance import NO_EOS, prompt
from rigged import eagle
from test_fused import forwards

from drafters import TargetModel, generate
from drafters.model.graphs import MOST_ROWS, ROWS, StockGraphRunner, padded_rows, padded_rows_fit, seen_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def targets(family: str) -> tuple[TargetModel, TargetModel]:
    """The same weights on fused layers and on graphs."""
    model = tiny.build(family).to(DEVICE)  # type: ignore[arg-type]
    return TargetModel(model, engine="fused"), TargetModel(model, engine="graphs")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_graphs_equal_fused(family: str) -> None:
    """Catches slots, positions or windows off by padding, buffers left from the step before, taps overwritten."""
    for fused, graphs in zip(*map(forwards, targets(family)), strict=True):
        torch.testing.assert_close(graphs, fused, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["glm4", "cohere2", "exaone4"])
def test_graphs_equal_stock(family: str) -> None:
    """Catches a model's own forward on fixed shapes with other masks, positions, windows or taps than uncaptured, and
    the wrong layers in two parts."""
    model: Any = families.build(family, families.DECODED[family] | {"num_hidden_layers": 4}).to(DEVICE)
    stock, graphs = TargetModel(model, engine="stock"), TargetModel(model, engine="graphs")
    assert isinstance(graphs.runner, StockGraphRunner)
    for captured, uncaptured in zip(forwards(graphs), forwards(stock), strict=True):
        torch.testing.assert_close(captured, uncaptured, atol=2e-4, rtol=1e-3)
    assert all(part.captured for part in graphs._parts.values())


def test_memory_and_graphs_are_used_again() -> None:
    """Catches a cache allocated, or a forward captured, for every prompt again; and one cache lent out twice."""
    _, target = targets("llama")
    drafter = eagle(target, None, "static")
    generate(target, drafter, [prompt(9)], max_new_tokens=20, eos_token_id=NO_EOS)
    parts = [*target._parts.values(), drafter.head.part]
    captured = [set(part.captured) for part in parts]
    assert len(parts) == 2 and all(captured)
    for seed in range(1, 4):
        generate(target, drafter, [prompt(9, seed)], max_new_tokens=20, eos_token_id=NO_EOS)
    assert [set(part.captured) for part in parts] == captured
    first, second = target.new_cache(1, 100), target.new_cache(1, 100)
    lent = first.storage
    assert lent is not None and lent is not second.storage
    for give_back in (True, False):  # and without a word, when it is gone
        lent.parts[0][0].fill_(7.0)
        if give_back:
            first.release()
        del first
        gc.collect()
        first = target.new_cache(1, 120)
        assert first.storage is lent and not lent.parts[0][0].any() and first.lengths == [0]
        assert target.new_cache(1, 120).storage is not lent


def test_paddings() -> None:
    """By hand; and every count up to the most is padded to one that holds it."""
    assert [padded_rows(rows) for rows in (1, 7, 26, 27, 61)] == [1, 8, 26, 32, 64]
    assert all(padded_rows(rows) >= rows for rows in range(1, MOST_ROWS + 1)) and list(ROWS) == sorted(ROWS)
    assert padded_rows_fit(60, 0) and padded_rows_fit(1, 63) and not padded_rows_fit(65, 0)
    assert not padded_rows_fit(7, 57)  # 8 rows after 57
    assert [seen_rows(end, 4096) for end in (1, 256, 257, 2048, 2049)] == [256, 256, 512, 2048, 3072]
    assert seen_rows(300, 400) == 400


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: CUDA graphs cannot be captured")
def test_no_allocation_in_the_steady_state() -> None:
    """Catches memory asked of the device in a step: the number of the allocator's segments must not change."""
    _, target = targets("llama")
    drafter = eagle(target, None, "static")
    for _ in range(2):
        generate(target, drafter, [prompt(9)], max_new_tokens=64, eos_token_id=NO_EOS)
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    generate(target, drafter, [prompt(9, 1)], max_new_tokens=64, eos_token_id=NO_EOS)
    assert torch.cuda.memory_stats()["segment.all.allocated"] == before


def test_memory_is_checked() -> None:
    """Catches an allocator's error where a message could say what to lower."""
    fused, _ = targets("llama")
    with pytest.raises(ValueError, match=r"needs 2.20 TB .* lower max_new_tokens"):
        fused.new_cache(16, 1 << 27)
