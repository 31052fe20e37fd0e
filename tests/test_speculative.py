"""Speculative decoding under the suite, with drafts wholly, partly and never accepted; a strange vocabulary."""

from collections.abc import Callable
from pathlib import Path

import conformance
import pytest
import tiny
from conformance import target_of
from rigged import perturbed
from transformers import PreTrainedModel

from drafters import TargetModel, make_drafter
from drafters.methods.speculative import SpeculativeDrafter


def stranger(target: TargetModel) -> SpeculativeDrafter:
    """A draft model of other weights, shape and depth."""
    return SpeculativeDrafter.from_options(
        target, draft_model=TargetModel(tiny.build("qwen3", seed=7, num_hidden_layers=2)), gamma=3
    )


TestItself = conformance.brief(
    lambda target: SpeculativeDrafter.from_options(target, draft_model=target, gamma=5), accepts="all"
)
TestPerturbed = conformance.suite(
    lambda target: SpeculativeDrafter.from_options(target, draft_model=perturbed(target, 0.05), gamma=4),
    accepts="some",
    families=("llama", "mixtral"),
)
TestStranger = conformance.brief(stranger, families=("mistral",))


def test_other_vocabulary_is_refused(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """Catches token ids handed to a model that means others by them; both sizes must be named."""
    target = target_of("llama")
    with pytest.raises(ValueError, match="101 tokens.*97"):
        SpeculativeDrafter.from_options(target, draft_model=TargetModel(tiny_model("llama", vocab_size=101)))
    with pytest.raises(ValueError, match="gamma"):
        make_drafter("speculative", target, draft_model=str(tiny_checkpoint("llama")), gamma=0)
    drafter = make_drafter("speculative", target, draft_model=str(tiny_checkpoint("llama")), gamma=2)
    assert isinstance(drafter, SpeculativeDrafter) and drafter.draft_model.dtype == target.dtype
    assert drafter.draft_model.vocab_size == tiny.VOCAB_SIZE
