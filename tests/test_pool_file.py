"""Phrase pools on disk: the same pool comes back, into both drafters, and nothing else is taken for one."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiny
from conformance import NO_EOS, plain_greedy, prompt, target_of
from safetensors import safe_open
from safetensors.numpy import save_file

from drafters import TargetModel, generate, make_drafter
from drafters.drafting.phrase_pool import PhrasePool, load_pool, save_pool
from drafters.methods.papers.lookahead import LookaheadDrafter
from drafters.methods.papers.ouroboros import OuroborosDrafter

PHRASES = [(5, (1, 2, 3)), (9, (4,)), (5, (6, 7)), (0, (96, 0, 1)), (5, (1, 2, 8)), (9, (3, 3))]


def filled(tail: int = 3, per_token: int = 4) -> PhrasePool:
    pool = PhrasePool(tail, per_token)
    for first, rest in PHRASES:
        pool.add(first, rest)
    return pool


def saved(tmp_path: Path, **changes: object) -> Path:
    """A good file, with metadata or arrays changed; None takes one out."""
    path = tmp_path / "pool.safetensors"
    save_pool(path, filled(), target_of("llama"))
    with safe_open(path, framework="numpy") as file:
        metadata, arrays = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in changes.items():
        into = arrays if isinstance(value, np.ndarray) or name in arrays else metadata
        into[name] = value
        if value is None:
            del into[name]
    save_file(arrays, path, metadata)
    return path


def test_the_same_pool_comes_back(tmp_path: Path) -> None:
    """Catches phrases lost, cut at the wrong place or in another order: what is dropped next must be the oldest."""
    pool, path = filled(), tmp_path / "runs" / "pool.safetensors"
    save_pool(path, pool, target_of("llama"))
    again = load_pool(path, target_of("llama"), tail=3, per_token=4)
    assert list(again.items()) == list(pool.items()) and len(again) == len(pool) == 6
    assert again.get(5, 9) == pool.get(5, 9) == [(1, 2, 8), (6, 7), (1, 2, 3)]
    save_pool(path, PhrasePool(3, 4), target_of("llama"))  # nothing learnt yet
    assert len(load_pool(path, target_of("llama"), tail=3, per_token=4)) == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("from_history", [True, False])
@pytest.mark.parametrize("name", ["lookahead", "ouroboros"])
def test_drafters_begin_with_it(tmp_path: Path, name: str, from_history: bool) -> None:
    """Catches a loaded pool that is forgotten at the first prompt, or that grows although history is off."""
    target, ids, path = target_of("llama"), prompt(9), tmp_path / "pool.safetensors"
    answer, pool = ids[-1:] + plain_greedy(target, ids, 24), PhrasePool(3, 6)
    for at in range(len(answer) - 1):
        pool.add(answer[at], answer[at + 1 : at + 4])
    save_pool(path, pool, target)
    options: dict[str, object] = {"from_history": from_history, "pool": str(path)}
    if name == "lookahead":
        options |= {"ngram": 4, "from_prompt": False}
    else:  # as draft model another one, so that only the target's phrases are right
        draft_model = TargetModel(tiny.build("llama", seed=7))
        options |= {"draft_model": draft_model, "beta": 4, "gamma": 1}
    drafter = make_drafter(name, target, **options)
    assert isinstance(drafter, LookaheadDrafter | OuroborosDrafter)
    held = list(drafter.pool.items())
    assert held == list(pool.items())
    for _ in range(2):
        trace = generate(target, drafter, [ids], max_new_tokens=20, eos_token_id=NO_EOS).trace
        assert trace.tau > 2 or name == "ouroboros"
        assert list(drafter.pool.items()) != held
        drafter.save_pool(path)
        assert list(load_pool(path, target, 3, 6).items()) == list(drafter.pool.items())
        with mock.patch.object(type(drafter), "propose", side_effect=InterruptedError), pytest.raises(InterruptedError):
            generate(target, drafter, [prompt(5)], max_new_tokens=9, eos_token_id=NO_EOS)  # begins a prompt, no more
        assert (list(drafter.pool.items()) == held) is not from_history


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": None}, "safetensors file but no phrase pool"),
        ({"format_version": "2"}, "no phrase pool of version 1"),
        ({"vocab_size": "101"}, "of tiny-llama, whose vocabulary has 101 tokens; use one of"),
        ({"first": np.zeros((2, 3), np.int32)}, r"damaged.*'first': 'int32\[2, 3\]'"),
        ({"lengths": np.array([3, 2, 3, 1, 2, 9], np.int32)}, "sum to 20, 14 tokens"),
        ({"first": np.array([5, 5, 5, 97, 9, 9], np.int32)}, "first run from 5 to 97, not from 0 to 96"),
    ],
)
def test_damaged_files(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    """Catches ids that would fail deep inside a forward (or, on a GPU, kill the process), and phrases cut anyhow."""
    with pytest.raises(ValueError, match=message):
        load_pool(saved(tmp_path, **changes), target_of("llama"), 3, 4)
