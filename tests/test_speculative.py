"""Speculative decoding: drafts are the draft model's own, and a strange vocabulary is refused."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, target_of
from rigged import perturbed
from transformers import PreTrainedModel

from drafters import TargetModel, generate, make_drafter
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.speculative import SpeculativeDrafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_draft_models(temperature: float) -> None:
    """Catches a draft cache that lacks the last token after full acceptance, or keeps rejected ones: tau falls."""
    target = target_of("llama")
    draft_model = perturbed(target, 0.05)
    drafter = SpeculativeDrafter.from_options(target, draft_model=draft_model, gamma=3)
    propose, accepted = drafter.propose, set()

    def checked(state: DecodeState) -> DraftTree:
        draft = propose(state)
        if draft.size == 0:
            return draft
        known = state.tokens[0]
        logits = draft_model.model(torch.tensor([known + draft.tokens[0].tolist()])).logits[:, len(known) - 1 : -1]
        if temperature == 0:
            assert draft.q is None and torch.equal(draft.tokens, logits.argmax(-1))
        else:
            assert draft.q is not None
            expected = Sampling(temperature, 30, 0.95).probabilities(logits)
            torch.testing.assert_close(draft.q, expected, atol=1e-4, rtol=1e-3)
            assert bool((draft.q.gather(2, draft.tokens[..., None]) > 0).all())
        return draft

    with mock.patch.object(drafter, "propose", checked):
        for seed in range(3):
            options = {"max_new_tokens": 20, "eos_token_id": NO_EOS, "top_k": 30, "top_p": 0.95, "seed": seed}
            result = generate(target, drafter, [prompt(8, seed)], temperature=temperature, **options)
            accepted |= {step.accepted for step in result.trace.steps}
    assert {0, 3} <= accepted, "the rig must reject and accept whole drafts"


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
