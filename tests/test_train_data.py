"""train/data/packing.py: batches, packing, ranks, resuming."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_run
import torch

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from train.core.attention import Dialogues
from train.core.runtime import Ranks
from train.data.online import dialogue_mask
from train.data.packing import Position, TrainData, collate, collate_or_stand_in, epoch_batches

LENGTHS = tiny_run.LENGTHS["train"]
CONFIG = tiny_run.read("eagle", tiny_run.settings("none", Path("none"), Path("none")))  # of 64 tokens a batch


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    path: Path = tmp_path_factory.mktemp("data")
    tiny_run.write_stores(path, TargetModel(tiny.build("llama"), name="tiny"))
    return FeatureStore.open(path / "train")


def members(batches: list[list[int]]) -> list[int]:
    return sorted(index for batch in batches for index in batch)


def test_collate_lays_out_what_the_store_holds(store: FeatureStore) -> None:
    """Tokens, features and taps out of step, positions that do not restart, or a span that points elsewhere."""
    chosen = [3, 0, 1, 2, 6]
    batch = collate(store, chosen, (tiny_run.TAP,))
    assert sorted(span.dialogue for span in batch.spans) == sorted(chosen)
    for row, start, length, dialogue in batch.spans:
        item, cut = store[dialogue], slice(start, start + length)
        assert torch.equal(batch.input_ids[row, cut], item.input_ids)
        assert torch.equal(batch.loss_mask[row, cut], item.loss_mask)
        assert torch.equal(batch.features[row, cut], item.features)
        assert torch.equal(batch.taps[tiny_run.TAP][row, cut], item.taps[tiny_run.TAP])
        assert batch.position_ids[row, cut].tolist() == list(range(length))
    assert batch.tokens == sum(LENGTHS[i] for i in chosen) == int((batch.segments >= 0).sum())
    assert not batch.loss_mask[batch.segments < 0].any()


def test_attention_stays_within_a_dialogue() -> None:
    """A packed dialogue that sees the one before it, a token that sees a later one, or a padding row of all False."""
    segments = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 2, 2, 2]])
    mask = dialogue_mask(segments)
    for row in range(2):
        for query in range(6):
            seen = mask[row, query].nonzero().flatten().tolist()
            assert seen == [k for k in range(query + 1) if segments[row, k] == segments[row, query]]
            assert seen


def test_training_rows_have_no_padding(store: FeatureStore) -> None:
    """Dialogues lost on the way into one row, or attention that is given other borders than theirs."""
    chosen = [3, 0, 1, 2, 6]
    batch = collate(store, chosen)
    assert batch.input_ids.shape == (1, batch.tokens)
    assert batch.attention() == Dialogues([LENGTHS[index] for index in chosen])
    assert batch.segments[0].unique_consecutive(return_counts=True)[1].tolist() == [LENGTHS[index] for index in chosen]
    stream = TrainData(store, CONFIG).steps(Position())
    assert all(batch.input_ids.numel() == batch.tokens for batch in next(stream).batches)
    stream.close()


def test_shift_stops_at_borders(store: FeatureStore) -> None:
    """A value taken from the next dialogue, from the row's beginning, or from padding."""

    def shift(values: torch.Tensor, by: int, segments: torch.Tensor) -> torch.Tensor:
        return replace(collate(store, [0]), segments=segments).shifted(values, by)

    segments = torch.tensor([[0, 0, 0, 1, 1, -1]])
    values = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert shift(values, 1, segments).tolist() == [[2, 3, 0, 5, 0, 0]]
    assert shift(values, 2, segments).tolist() == [[3, 0, 0, 0, 0, 0]]
    assert shift(values, 9, segments).tolist() == [[0, 0, 0, 0, 0, 0]]
    full = torch.zeros_like(segments)  # a dialogue that fills its row: behind its end comes its beginning
    assert shift(values, 1, full).tolist() == [[2, 3, 4, 5, 6, 0]]
    assert shift(values, 2, full).tolist() == [[3, 4, 5, 6, 0, 0]]


def test_epoch_batches() -> None:
    """Batches over the budget, a dialogue twice in an epoch or never, every epoch alike, an order not repeatable."""
    first = epoch_batches(LENGTHS, 64, seed=0, epoch=0)
    assert all(sum(LENGTHS[i] for i in batch) <= 64 for batch in first)
    assert members(first) == list(range(len(LENGTHS)))
    assert first == epoch_batches(LENGTHS, 64, seed=0, epoch=0)
    assert first != epoch_batches(LENGTHS, 64, seed=0, epoch=1)
    assert first != epoch_batches(LENGTHS, 64, seed=1, epoch=0)
    assert members(epoch_batches(LENGTHS, 10_000, seed=0, epoch=0)) == list(range(len(LENGTHS)))
    assert [30] in [[LENGTHS[i] for i in batch] for batch in epoch_batches(LENGTHS, 20, seed=0, epoch=0)]


# The standard library's dialogues (147 tokens on average), ShareGPT's cut at 2,048, and that in steps of one dialogue.
def dialogues_of(data: TrainData, position: Position, steps: int) -> list[list[list[int]]]:
    stream = data.steps(position)
    result = [[[span.dialogue for span in batch.spans] for batch in next(stream).batches] for _ in range(steps)]
    stream.close()
    return result


def test_steps_resume_at_any_position(store: FeatureStore) -> None:
    """A resumed run that repeats or skips a batch, also at the border of two epochs."""
    data = TrainData(store, CONFIG)
    stream = data.steps(Position())
    whole = [next(stream) for _ in range(9)]
    stream.close()
    expected = dialogues_of(data, Position(), 9)
    for done in range(1, 9):
        assert dialogues_of(data, whole[done - 1].following, 9 - done) == expected[done:]
    assert whole[-1].epoch > 0
    assert data.steps_in(2) == len(data.epoch(0)) + len(data.epoch(1))


def test_ranks_share_the_global_batches(store: FeatureStore) -> None:
    """Two ranks that train on the same dialogues, or on other global batches than one rank would."""
    alone = dialogues_of(TrainData(store, CONFIG), Position(), 6)
    halves = CONFIG.model_copy(update={"gradient_accumulation": 2})
    pair = [dialogues_of(TrainData(store, halves, Ranks(rank, 2)), Position(), 6) for rank in range(2)]
    for step in range(6):
        together = [index for rank in range(2) for batch in pair[rank][step] for index in batch]
        assert sorted(together) == sorted(alone[step][0])


def test_a_rank_without_work_adds_nothing(store: FeatureStore) -> None:
    """An empty micro-batch whose tokens are trained on or counted."""
    batch = collate_or_stand_in(store, [], [3, 2, 0])
    assert batch.input_ids.shape == (1, 5)
    assert not batch.loss_mask.any()
    assert batch.tokens == 0
