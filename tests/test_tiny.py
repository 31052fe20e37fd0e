"""The tiny models are worth testing against: they wander, they differ, and a window really cuts."""

from collections.abc import Callable

import pytest
import torch
from tiny import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE
from transformers import PreTrainedModel


def greedy(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    ids = prompts
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[:, prompts.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_wanders(tiny_model: Callable[..., PreTrainedModel], family: str) -> None:
    """Catches weights so small that greedy output is constant, which hides every misplaced token, row and position."""
    prompts = torch.randint(3, VOCAB_SIZE, (4, 12))
    outputs = greedy(tiny_model(family), prompts, 32)
    assert min(len(set(output)) for output in outputs) >= 8
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_sliding_window_cuts(tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Catches a window setting that the model ignores: the variant would test nothing that plain Mistral does not."""
    model = tiny_model("mistral-sliding", num_hidden_layers=1)
    ids = torch.randint(3, VOCAB_SIZE, (1, SLIDING_WINDOW + 4))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % VOCAB_SIZE  # further back than the window: the last logits cannot see it
    assert torch.equal(model(ids).logits[0, -1], model(changed).logits[0, -1])
    wide = tiny_model("mistral", num_hidden_layers=1)
    assert not torch.equal(wide(ids).logits[0, -1], wide(changed).logits[0, -1])
