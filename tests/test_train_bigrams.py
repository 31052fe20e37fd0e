"""Where a DSpark head with ``start: regression`` begins: its Markov head beside the exact SVD of the counted scores."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from torch import Tensor

from data_prep.store.reader import FeatureStore
from drafters.model.ends import FrozenEnds
from train.data import bigrams, regression
from train.data.draft_vocab import find_frequent
from train.dspark import DSparkTask
from train.run.files import read_metrics

RANK = 5
HEAD = {"layers": 1, "block_size": 4, "mask_token_id": 0, "markov_rank": RANK, "taps": [tiny_run.TAP]}


def task_of(folder: Path, ends: FrozenEnds, **more: Any) -> DSparkTask:
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", head=HEAD)
    return DSparkTask(tiny_run.read("dspark", values | {"start": "regression"} | more), ends)


def by_hand(store: FeatureStore, ends: FrozenEnds, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean scores ``[V, N]`` behind each token, and the weights ``[V, 1]``."""
    sums, counts, every = torch.zeros(tiny.VOCAB_SIZE, len(ids)), torch.zeros(tiny.VOCAB_SIZE, 1), []
    for item in map(store.__getitem__, range(len(store))):
        for row in range(len(item.input_ids) - 1):
            if item.loss_mask[row + 1]:
                log_p = ends.lm_head(item.features[row].float())[ids].log_softmax(-1).clamp_min(bigrams.FLOOR)
                every.append((int(item.input_ids[row]), log_p - log_p.mean()))
    mean = torch.stack([scores for _, scores in every]).mean(0)
    for token, scores in every:
        sums[token] += scores - mean
        counts[token] += 1
    return sums / (counts + bigrams.PRIOR), counts.sqrt()


@pytest.mark.parametrize(("kind", "loss_vocab"), [("vanilla", None), ("gated", None), ("vanilla", 20)])
@torch.no_grad()
def test_the_nearest_matrix_of_the_rank(
    folder: Path, store: FeatureStore, ends: FrozenEnds, kind: str, loss_vocab: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches scores of the wrong next token, rows of prompts, rare tokens that count as much as others, parts that
    are not added up, rows of W2 of other tokens, and a gate that halves the scores."""
    monkeypatch.setattr(regression, "PART_TOKENS", 40)  # so that there are several parts
    task = task_of(folder, ends, head=HEAD | {"markov_head": kind}, loss_vocab=loss_vocab)
    find_frequent(task, store)
    ids = torch.arange(tiny.VOCAB_SIZE) if loss_vocab is None else task.heads.ids.long()
    scores, weights = by_hand(store, ends, ids)
    left, sizes, right = torch.linalg.svd(weights * scores, full_matrices=False)
    nearest = left[:, :RANK] * sizes[:RANK] @ right[:RANK]
    head: Any = task.drafting_module.markov_head
    scale = 2 if kind == "gated" else 1

    def fitted() -> Tensor:
        task.fit(store)
        others = torch.ones(tiny.VOCAB_SIZE, dtype=torch.bool)
        others[ids] = False
        assert not head.markov_w2.weight[others].any()
        return weights * (head.markov_w1.weight @ head.markov_w2.weight[ids].T) / scale

    error = (weights * scores - nearest).norm()
    assert (weights * scores - fitted()).norm() < 1.1 * error
    monkeypatch.setattr(bigrams, "OVERSAMPLED", tiny.VOCAB_SIZE)  # then nothing is left to chance
    torch.testing.assert_close(fitted(), nearest, rtol=1e-3, atol=1e-3)
    assert error < 0.9 * (weights * scores).norm()


def test_a_run(folder: Path, tmp_path: Path) -> None:
    """Catches a start that the optimizer's own copy of the weights lacks, and a resumed run that fits again."""
    values = tiny_run.settings(str(folder / "target"), folder / "features", tmp_path / "drawn", head=HEAD)
    values |= {"schedule": "constant", "classification_loss": "cross_entropy", "target_weight": 1.0}
    fitted = values | {"start": "regression"}
    tiny_run.train_here("dspark", values)
    tiny_run.train_here("dspark", fitted | {"out": str(tmp_path / "fitted")})
    tiny_run.train_here("dspark", fitted | {"out": str(tmp_path / "parts"), "steps": 3})
    tiny_run.train_here("dspark", fitted | {"out": str(tmp_path / "parts")}, resume=True)
    drawn, whole, parts = (
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("drawn", "fitted", "parts")
    )
    assert whole[0] != drawn[0]
    assert parts == whole


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"head": HEAD | {"markov_head": "rnn"}}, "markov_head is rnn; set start=random, or markov_head=vanilla"),
        ({"init_from": "runs/other"}, "start: regression replaces weights of init_from: runs/other; set start=random"),
    ],
)
def test_what_a_config_cannot_ask_for(folder: Path, tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    values = tiny_run.settings(str(folder / "target"), folder / "features", tmp_path, head=HEAD, start="regression")
    with pytest.raises(ValueError, match=error):
        tiny_run.read("dspark", values | changes)
