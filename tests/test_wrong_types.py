"""The library called from Python with the wrong kinds of objects: a ValueError that says what is wanted."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from drafters import TargetModel, generate, load_drafter, make_drafter


@pytest.fixture
def small(tiny_model: Callable[..., PreTrainedModel]) -> TargetModel:
    return TargetModel(tiny_model("llama"), name="tiny")


def test_objects_of_a_wrong_type_are_named(small: TargetModel) -> None:
    """Catches an AttributeError from inside the loop for a name, a stock model or swapped arguments."""
    drafter = make_drafter("prompt_lookup", small)
    wanted = r"target must be what TargetModel\.from_pretrained gives, found a"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: generate("checkpoints/x", drafter, [[5]]), f"{wanted} str"),  # type: ignore[arg-type]
        (lambda: generate(small.model, drafter, [[5]]), f"{wanted} LlamaForCausalLM"),  # type: ignore[arg-type]
        (lambda: generate(drafter, small, [[5]]), f"{wanted} PromptLookupDrafter"),  # type: ignore[arg-type]
        (lambda: generate(small, None, [[5]]), "drafter must be what make_drafter .* gives, found a NoneType"),  # type: ignore[arg-type]
        (lambda: generate(small, "eagle", [[5]]), "drafter must be what make_drafter"),  # type: ignore[arg-type]
        (lambda: generate(small, drafter, [[5]], prompt_lengths=1), "prompt_lengths must be whole numbers"),  # type: ignore[arg-type]
        (lambda: generate(small, drafter, [[5]], eos_token_id=97), "eos_token_id is 97, but the vocabulary .* has 97"),
        (lambda: make_drafter("prompt_lookup", "tiny"), f"{wanted} str"),  # type: ignore[arg-type]
        (lambda: make_drafter("eagle", small.model, checkpoint="x/y"), f"{wanted} LlamaForCausalLM"),  # type: ignore[arg-type]
        (lambda: make_drafter(None, small), "there is no drafter None"),  # type: ignore[arg-type]
        (lambda: make_drafter("eagle", small, checkpoint=5), "named by its folder or Hub repository, found 5"),
        (lambda: load_drafter(small, "x/y"), "named by its folder or Hub repository, found <"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
