"""``model.generate(**inputs, custom_generate=FOLDER)``: decode with the trained drafter in a folder or Hub repository.

A saved drafter brings custom_generate/generate.py (``drafters/custom_generate.py``), which calls ``generate_from``.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from drafters.base import Drafter
from drafters.loading import load_drafter
from drafters.model.target import TargetModel


def generate_from(
    where: str,
    model: PreTrainedModel,
    revision: str | None = None,
    streamer: Any = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    **options: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """``model.generate`` with the drafter in the folder or Hub repository ``where``.

    The drafter is loaded once for each model, and stored with it.

    Raises:
        ValueError: as ``load_drafter`` and ``Drafter.for_transformers``.
    """
    if assistant_model is not None:
        raise ValueError("one drafter at a time: drop assistant_model, or custom_generate")
    loaded: dict[tuple[str, str | None], Drafter] = model.__dict__.setdefault("_drafters", {})
    if (where, revision) not in loaded:
        target = next((drafter.target for drafter in loaded.values()), None) or TargetModel(model)
        loaded[where, revision] = load_drafter(where, target, revision)
    decode = loaded[where, revision].for_transformers(streamer)
    if stop_strings is not None:  # transformers takes the tokenizer from a callable's arguments and forgets it
        criteria = [*(options.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
        options["stopping_criteria"] = StoppingCriteriaList(criteria)
    asked = {name: value for name, value in options.items() if value is not None}
    return type(model).generate(model, custom_generate=decode, **asked)
