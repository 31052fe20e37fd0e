"""transformers sets torch's default dtype for the whole process while it loads a model; another thread may generate."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from conformance import NO_EOS, prompt, rows_of
from cuda_runs import GREEDY_ONLY, METHODS, Models

from drafters import generate
from drafters.model.layers import layer_kind


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models("cpu", None)


@pytest.mark.parametrize("method", METHODS)
def test_random_numbers_are_float32(method: str, models: Models) -> None:
    """Catches random numbers of 8 bits, or scores in bf16, for the steps during which a bf16 model is loaded."""
    target, given = models.target(method), {"max_new_tokens": 18, "eos_token_id": NO_EOS, "seed": 3}
    given |= {} if method in GREEDY_ONLY else {"temperature": 1.0, "top_p": 0.95}

    first, second = (METHODS[method](target, models) for _ in range(2))
    expected = rows_of(generate(target, first, [prompt(9)], **given))
    with default_dtype(torch.bfloat16):
        found = rows_of(generate(target, second, [prompt(9)], **given))
    assert found == expected


def test_a_head_is_made_without_a_default_dtype(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a default dtype set for the process while the layers of a bf16 target's family are looked up."""
    config = models.target("eagle chain").config
    config = type(config)(**config.to_dict() | {"dtype": "bfloat16"})
    kinds, setting = [], torch.set_default_dtype

    def recorded(dtype: torch.dtype) -> None:
        kinds.append(dtype)
        setting(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", recorded)
    layer_kind(config)
    assert set(kinds) <= {torch.float32}
