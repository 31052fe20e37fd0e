"""int8 and float8 stores: how far values move, what they weigh, and that a reader sees floating point."""

import json
from pathlib import Path

import pytest
import torch
from test_store import header
from torch import Tensor

from data_prep.store import reader as store_module
from data_prep.store.manifest import StoreManifest
from data_prep.store.quantise import SCALED, from_storage, storage_dtype, to_storage
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import Shard, StoreWriter
from train.data.packing import collate

HIDDEN = 256
LENGTHS = [30, 5, 12]


def hidden_states(rows: int, seed: int = 0) -> Tensor:
    """[rows, 256] like a target's: rows of very different size, and a few channels far above the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, HIDDEN, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    values[:, 7] *= 40
    return values


def one_store(path: Path, dtype: str, states: dict[str, Tensor], **changes: object) -> FeatureStore:
    """A store of one shard of dialogues of ``LENGTHS`` tokens."""
    count = sum(LENGTHS)
    settings = {"hidden_size": HIDDEN, "taps": [3], "dtype": dtype, **changes}
    shard = Shard(
        ids=[f"d{index}" for index in range(len(LENGTHS))],
        lengths=LENGTHS,
        input_ids=torch.arange(count),
        loss_mask=torch.arange(count) % 2 == 0,
        states=states,
    )
    with StoreWriter(path, header(**settings)) as writer:
        writer.write(shard)
        writer.finish({}, {})
    return FeatureStore.open(path)


def largest_error(dtype: str, exact: Tensor) -> Tensor:
    """How far each value may move: half the distance of its neighbours on the grid of its token's scale."""
    kind, most = SCALED[dtype]
    scale = exact.abs().amax(-1, keepdim=True) / most
    if kind == torch.int8:
        return (scale / 2).expand_as(exact)
    return torch.maximum(exact.abs() * 2**-4, scale * 2**-10)  # 3 bits of mantissa; below 2^-6, steps of 2^-9


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_no_value_moves_by_more_than_half_a_step(tmp_path, dtype):
    """Catches truncation in place of rounding, a scale of the whole shard, and scales given to the wrong token."""
    states = {"features": hidden_states(sum(LENGTHS)), "tap_3": hidden_states(sum(LENGTHS), seed=1).flip(0)}
    store = one_store(tmp_path, dtype, states)
    store.verify()
    store.read_dtype = torch.float32
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for index, dialogue in enumerate(store):
        for found, name in ((dialogue.features, "features"), (dialogue.taps[3], "tap_3")):
            exact = states[name][starts[index] : starts[index + 1]]
            assert found.dtype == torch.float32 and found.shape == exact.shape
            assert ((found - exact).abs() <= largest_error(dtype, exact) * (1 + 1e-4)).all()
            assert (found - exact).abs().max() > 0


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_zeros_the_smallest_and_the_largest(dtype):
    """Catches a division by zero for a token of zeros, and a largest value that wraps around or becomes NaN."""
    states = torch.zeros(4, HIDDEN)
    states[1, 5], states[2, 6] = torch.finfo(torch.bfloat16).max, -3e-38
    states[3] = -70_000.0
    stored, scale = to_storage(states, dtype)
    assert scale is not None and stored.dtype == storage_dtype(dtype) and scale.dtype == torch.float32
    back = from_storage(stored, scale, torch.float32)
    torch.testing.assert_close(back, torch.where(states.abs() < 1e-37, torch.zeros_like(states), states))
    assert torch.equal(stored[0].float(), torch.zeros(HIDDEN)) and scale[0] == 0


@pytest.mark.parametrize("dtype", ["int8", "float8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_before_it_is_rounded(tmp_path, dtype, bad):
    """Catches an overflow that becomes an ordinary 8-bit number, to be trained on for ever."""
    states = {"features": hidden_states(sum(LENGTHS)), "tap_3": hidden_states(sum(LENGTHS))}
    states["tap_3"][LENGTHS[0] + 2, 9] = bad
    store = one_store(tmp_path, dtype, states)
    assert store.lengths.tolist() == [30, 12] and store.manifest.dropped == {"non_finite": 1}
    assert all(torch.isfinite(dialogue.taps[3]).all() for dialogue in store)
    assert store[1].input_ids.tolist() == list(range(35, 47))


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_training_reads_it_as_floating_point(tmp_path, dtype, monkeypatch):
    """Catches 8-bit integers in a training batch, features and taps of two dtypes, and work for unread taps."""
    states = {"features": hidden_states(sum(LENGTHS)), "tap_3": hidden_states(sum(LENGTHS), seed=1)}
    store = one_store(tmp_path, dtype, states)
    exact = one_store(tmp_path / "exact", "float32", states)
    batch, plain = (collate(each, [2, 0, 1], taps=(3,)) for each in (store, exact))
    assert batch.features.dtype == batch.taps[3].dtype == torch.bfloat16
    assert torch.equal(batch.input_ids, plain.input_ids) and torch.equal(batch.loss_mask, plain.loss_mask)
    for found, wanted in ((batch.features, plain.features), (batch.taps[3], plain.taps[3])):
        bound = largest_error(dtype, wanted) + wanted.abs() * 2**-8  # and what bfloat16 rounds
        assert ((found.float() - wanted).abs() <= bound * (1 + 1e-3)).all()
    reads = []
    monkeypatch.setattr(
        store_module, "from_storage", lambda *arguments: reads.append(len(arguments[0])) or from_storage(*arguments)
    )
    dialogue = store[0]
    assert reads == []
    assert dialogue.features is dialogue.features and reads == [30]


def test_the_files_hold_what_the_manifest_says(tmp_path):
    """Catches a manifest whose dtype was edited, or exchanged with another store's of the same shapes."""
    states = {"features": hidden_states(sum(LENGTHS)), "tap_3": hidden_states(sum(LENGTHS))}
    one_store(tmp_path, "bfloat16", states)
    file = tmp_path / "manifest.json"
    manifest = StoreManifest(**json.loads(file.read_text()))
    file.write_text(manifest.model_copy(update={"dtype": "float16"}).model_dump_json())
    with pytest.raises(ValueError, match=r"holds .*'features': \['BF16', 47, 256\].* the manifest says .*'F16'"):
        FeatureStore.open(tmp_path)
