"""The cache: rows of an accepted path, rows of batches of unequal length, slots beyond the length."""

import random
import weakref
from typing import Any

import pytest
import torch
from conformance import NO_EOS, checked_commits, plain_greedy, prompt, rows_of, target_of

from drafters import generate
from drafters.methods.autoregressive import AutoregressiveDrafter
from drafters.model.cache import KVCache


def make(batch: int, capacity: int = 32) -> KVCache:
    return KVCache([(3, 4, 4)] * 2, batch, capacity, torch.float32, "cpu")


def numbered(batch: int, rows: int, first: float) -> torch.Tensor:
    """``[batch, 3, rows, 4]`` with a value of its own for each batch row and row."""
    values = first + 100 * torch.arange(batch)[:, None] + torch.arange(rows)
    return values[:, None, :, None].expand(-1, 3, -1, 4).float()


def test_commit_of_scattered_rows() -> None:
    """Catches a path copied over itself: row 4 moved to slot 1 before row 1 was read, or values left behind."""
    random.seed(1)
    for _ in range(30):
        cache = make(2)
        expected: list[list[float]] = [[], []]
        for step in range(4):
            rows = 6
            new = numbered(2, rows, 10.0 * (step + 1))
            for layer in range(2):
                cache.at(rows).update(new + 1000 * layer, -new - 1000 * layer, layer)
            kept = [sorted(random.sample(range(rows), random.randint(0, rows))) for _ in range(2)]
            cache.commit(kept)
            for b in range(2):
                expected[b] += [float(new[b, 0, row, 0]) for row in kept[b]]
        assert cache.lengths == [len(row) for row in expected]
        for b, row in enumerate(expected):
            for layer in range(2):
                want = torch.tensor(row)[None, :, None].expand(3, -1, 4) + 1000 * layer
                keys, values = cache.keys[layer][b, :, : len(row)], cache.values[layer][b, :, : len(row)]
                assert torch.equal(keys, want) and torch.equal(values, -want)


def test_offset_writes_follow_uncommitted_rows() -> None:
    """Catches a second drafting pass that overwrites the first, and an update that hands out stale or too many rows."""
    cache = make(1)
    cache.at(3).update(numbered(1, 3, 0), numbered(1, 3, 0), 0)
    cache.commit([[0, 1, 2]])
    cache.at(2).update(numbered(1, 2, 50), numbered(1, 2, 50), 0)
    keys, values = cache.at(1, offset=2).update(numbered(1, 1, 60), numbered(1, 1, 60), 0)
    assert keys[0, 0, :, 0].tolist() == values[0, 0, :, 0].tolist() == [0, 1, 2, 50, 51, 60]
    keys, _ = cache.at(1).update(numbered(1, 1, 70), numbered(1, 1, 70), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 70]


def test_crop_forgets_only_the_end() -> None:
    """Catches a crop that grows the cache back over rows that were never committed."""
    cache = make(2)
    cache.at(4).update(numbered(2, 4, 0), numbered(2, 4, 0), 0)
    cache.commit_first([4, 2])
    cache.crop([2, 2])
    assert cache.lengths == [2, 2]
    with pytest.raises(AssertionError):
        cache.crop([3, 2])


def test_a_row_copied_from_a_cache_of_its_own() -> None:
    """Catches a row that lands in another, one that keeps its old length, and capacities that must be the same."""
    cache, alone = make(3, capacity=8), make(1, capacity=32)
    alone.at(5).update(numbered(1, 5, 7), -numbered(1, 5, 7), 1)
    alone.commit_first([4])
    cache.copy_row(1, alone)
    assert cache.lengths == [0, 4, 0]
    for ours, theirs in ((cache.keys, alone.keys), (cache.values, alone.values)):
        assert torch.equal(ours[1][1, :, :4], theirs[1][0, :, :4])
        assert not ours[1][[0, 2]].any() and not ours[1][1, :, 4:].any()


def test_a_released_cache_holds_no_memory() -> None:
    """Catches a drafter that keeps the cache of one prompt while it asks for the next one's."""
    cache = make(1)
    cache.at(2).update(numbered(1, 2, 0), numbered(1, 2, 0), 0)
    kept = [weakref.ref(part) for part in (*cache._parts[0], *cache.keys)]
    cache.release()
    assert not any(reference() is not None for reference in kept)
    KVCache.nothing().release()


def test_capacity_is_checked() -> None:
    """Catches a write past the end, which on slices is silently cut short."""
    with pytest.raises(AssertionError, match="cache of 4 rows asked for 5"):
        make(1, capacity=4).at(5)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "mixtral"])
def test_ragged_batch_equals_each_row_alone(family: str) -> None:
    """Catches rows that see padding or another row's keys, and a row that ends early and then disturbs the others."""
    target = target_of(family)
    prompts = [prompt(3), prompt(14), prompt(8)]
    expected = [plain_greedy(target, ids, 14) for ids in prompts]
    eos = expected[0][4]  # ends the first row early, maybe others too
    with checked_commits() as seen:
        drafter = AutoregressiveDrafter.from_options(target)
        assert rows_of(generate(target, drafter, prompts, max_new_tokens=14, eos_token_id=NO_EOS)) == expected
        padded = torch.tensor([ids + [9] * (14 - len(ids)) for ids in prompts])
        lengths = [len(ids) for ids in prompts]
        result = generate(target, drafter, padded, prompt_lengths=lengths, max_new_tokens=14, eos_token_id=eos)
    cut = [row[: row.index(eos) + 1] if eos in row else row for row in expected]
    assert rows_of(result) == cut and result.lengths == [len(row) for row in cut]
    assert all((row[length:] == eos).all() for row, length in zip(result.tokens, result.lengths, strict=True))
    assert seen.commits > 13


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_attention_mask_tells_what_is_padding(side: str) -> None:
    """Catches padding on the left read as text: its tokens were attended to and shifted every position."""
    target = target_of("llama")
    drafter, pad = AutoregressiveDrafter.from_options(target), 9
    prompts = [prompt(3), prompt(14), prompt(8)]
    expected = [plain_greedy(target, ids, 6) for ids in prompts]
    filler = [[pad] * (14 - len(ids)) for ids in prompts]
    rows = [more + ids if side == "left" else ids + more for ids, more in zip(prompts, filler, strict=True)]
    seen = [[0] * len(more) + [1] * len(ids) for ids, more in zip(prompts, filler, strict=True)]
    mask = torch.tensor(seen if side == "left" else [row[::-1] for row in seen])
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": NO_EOS}
    found = generate(target, drafter, torch.tensor(rows), attention_mask=mask, **options)
    assert rows_of(found) == expected
    for wrong, said in (
        (mask[:, :-1], "attention_mask has rows of"),
        (mask[0], "must be whole numbers, .batch, tokens."),
        (torch.tensor([[1, 0, 1, *[0] * 11]] * 3), "zeros between the ones of row 0"),
    ):
        with pytest.raises(ValueError, match=said):
            generate(target, drafter, torch.tensor(rows), attention_mask=wrong, **options)
    with pytest.raises(ValueError, match="give one of the two"):
        generate(target, drafter, rows, attention_mask=mask, prompt_lengths=[3, 14, 8], **options)


def test_padding_without_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a left-padded batch continued as if its padding were text; and a refusal of what is no padding."""
    target = target_of("llama")
    drafter = AutoregressiveDrafter.from_options(target)

    def made(rows: list[list[int]]) -> int:
        return len(generate(target, drafter, rows, max_new_tokens=1, eos_token_id=NO_EOS).tokens)

    generation = target.model.generation_config
    monkeypatch.setattr(generation, "pad_token_id", 9)
    for padded in ([[9, 5], [6, 7]], [[9, 9, 5]], [[9, 9, 5], [9, 6, 7]]):
        with pytest.raises(ValueError, match=r"row 0 of input_ids begins with 9.*tokenizer's attention_mask"):
            made(padded)
    for text in ([[9, 5]], [[9, 5], [9, 6]], [[9, 5], [6, 7, 8]], [[5, 9], [6, 9]]):
        assert made(text) == len(text)
    monkeypatch.setattr(generation, "bos_token_id", 9)  # as GPT-2's tokenizer is often padded
    assert made([[9, 5], [6, 7]]) == 2
