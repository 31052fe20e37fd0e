"""transformers' own generate, plain and accelerated, under the loop's counts."""

from collections.abc import Callable

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from drafters import TargetModel
from drafters.loop.call import eos_ids
from eval.measure.runs import Limits
from eval.measure.stock_generate import StockEntry, stock_method

IDS = list(range(3, 20))


def test_stock_generate_is_timed_without_its_prefill(tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Catches a baseline whose time includes the prefill while the methods' does not."""
    model = tiny_model("llama")
    target = TargetModel(model)
    ids = list(range(3, 60))
    made = stock_method(target, 0.0, Limits(6, eos=eos_ids(target, None)))([ids], 0)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=2)
    assert made.tokens == expected[0, len(ids) :].tolist()
    assert made.prefill_seconds > 0
    assert made.decode_seconds > 0
    assert stock_method(target, 0.0, Limits(1))([ids], 0).decode_seconds < made.prefill_seconds


def test_stock_generate_takes_nothing_from_the_models_generation_config(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    """Catches a penalty or a filter of the model's own, which generate fills in even where a config is passed."""
    model = tiny_model("llama")
    target = TargetModel(model)
    ids = list(range(3, 20))
    plain = stock_method(target, 0.0, Limits(8))([ids], 0).tokens
    own = GenerationConfig(eos_token_id=plain[3], suppress_tokens=[plain[0]], repetition_penalty=9.0, max_length=7)
    model.generation_config = own
    assert stock_method(target, 0.0, Limits(8))([ids], 0).tokens == plain
    assert model.generation_config is own
    assert (
        stock_method(target, 0.0, Limits(8, eos=frozenset([plain[3]])))([ids], 0).tokens
        == plain[: plain.index(plain[3]) + 1]
    )


@pytest.fixture
def pair(tiny_model: Callable[..., PreTrainedModel]) -> tuple[TargetModel, TargetModel]:
    """A target and another model for its assistant."""
    return TargetModel(tiny_model("llama")), TargetModel(tiny_model("llama", 1))


def assisted(tokens: int | None = None) -> StockEntry:
    return StockEntry(label="a", assistant_model="x", num_assistant_tokens=tokens)


@pytest.mark.parametrize("tokens", [None, 1, 4])
def test_assisted_greedy_generation_is_plain_decoding(
    pair: tuple[TargetModel, TargetModel], tokens: int | None
) -> None:
    """Catches an assistant whose own generation config leaks in, and outputs past the limit or EOS."""
    target, draft = pair
    plain = stock_method(target, 0.0, Limits(12))([IDS], 0)
    own = GenerationConfig(num_assistant_tokens=1, repetition_penalty=9.0)
    draft.model.generation_config = own
    try:
        for assistant in (draft, target):  # one that is hardly ever right, one that always is
            for limit in (1, 2, 7, 12):
                made = stock_method(target, 0.0, Limits(limit), assisted(tokens), assistant)([IDS], 0)
                assert made.tokens == plain.tokens[:limit]
            eos = frozenset([plain.tokens[5]])
            cut = plain.tokens[: plain.tokens.index(plain.tokens[5]) + 1]
            assert stock_method(target, 0.0, Limits(12, eos=eos), assisted(tokens), assistant)([IDS], 0).tokens == cut
        assert draft.model.generation_config is own
    finally:
        draft.model.generation_config = GenerationConfig.from_model_config(draft.model.config)


def test_the_tokens_of_the_first_forward_are_the_prefills(pair: tuple[TargetModel, TargetModel]) -> None:
    """Catches several tokens that came out with the first forward credited to decoding, which did not make them."""
    target, draft = pair
    itself = stock_method(target, 0.0, Limits(12), assisted(4), target)([IDS], 0)
    assert itself.first_tokens == 5  # all four accepted, and the bonus
    assert stock_method(target, 0.0, Limits(12))([IDS], 0).first_tokens == 1
    everything = stock_method(target, 0.0, Limits(4), assisted(9), target)([IDS], 0)
    assert everything.first_tokens == len(everything.tokens) == 4
    assert everything.decode_seconds < everything.prefill_seconds
