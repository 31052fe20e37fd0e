"""Load the target of a config, its draft models and its tokenizer."""

from collections.abc import Mapping
from typing import Any

from transformers.utils.logging import disable_progress_bar

from data_prep.answers.target import end_of_turn
from data_prep.common.ranks import Rank
from data_prep.common.target import say_dtype
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from drafters import TargetModel
from drafters.common.wording import dtype_name
from drafters.config import Engine
from drafters.drafting.draft_model import load_draft_model
from drafters.loop.call import eos_ids
from eval.configs import TargetEntry

ALONE = Rank()


class Models:
    """A target and its draft models, each loaded once.

    Args:
        engine: engine of the draft models (default: the fastest of each).
        stock: the model of transformers' own generation, if the target is quantised.
    """

    def __init__(self, target: TargetModel, engine: Engine | None = None, stock: TargetModel | None = None) -> None:
        self.target, self.engine, self.stock = target, engine, stock or target
        self._draft_models: dict[str, TargetModel] = {}

    def draft_model(self, path: str) -> TargetModel:
        """Return the draft model of a folder or Hub repository, in the target's dtype and on its device."""
        if path not in self._draft_models:
            place = self.target.dtype, self.target.device
            self._draft_models[path] = TargetModel.from_pretrained(path, *place, engine=self.engine)
        return self._draft_models[path]

    def assistants(self, paths: Mapping[str, str]) -> dict[str, TargetModel]:
        """Return the draft models of stock generation by label, shared with drafters."""
        assistants = {label: load_draft_model(self.target, self.draft_model(path)) for label, path in paths.items()}
        for label, assistant in assistants.items():
            if (tokens := assistant.config.vocab_size) != (size := self.target.config.vocab_size):
                raise ValueError(
                    f"{label}: the assistant {assistant.name} has a vocabulary of {tokens} tokens and the target one "
                    f"of {size}; stock generate needs equal sizes, the drafter speculative does not: remove the entry"
                )
        return assistants


def load_models(chosen: TargetEntry, tokens: int = 0, batch: int = 1, rank: Rank = ALONE) -> Models:
    """Load the target; draft models follow when they are needed.

    Args:
        tokens: length of the longest text, as far as known. batch: number of such texts that must fit into the cache.
        rank: rank among several processes; each has its own GPU unless the config names one.
    """
    disable_progress_bar()  # transformers shows one for every model
    device = chosen.device if chosen.device_map is not None else rank.device(chosen.device)
    place = chosen.path, chosen.dtype, device, chosen.revision
    more: dict[str, Any] = {"device_map": chosen.device_map, "cache_tokens": (batch, tokens)}
    target = TargetModel.from_pretrained(*place, chosen.engine, chosen.quantize, **more)
    say_dtype(chosen.path, chosen.dtype, dtype_name(target.dtype), rank)
    stock = TargetModel.from_pretrained(*place, "stock", **more) if chosen.quantize else target
    return Models(target, chosen.engine, stock)


def chat_of(chosen: TargetEntry) -> ChatTokenizer:
    """Return the target's tokenizer and chat template; ValueError if there is no template."""
    template = None if chosen.chat_template is None else str(chosen.chat_template)
    return load_tokenizer(chosen.path, chosen.revision, template)


def answer_ends(chosen: TargetEntry, target: TargetModel) -> frozenset[int]:
    """Return the tokens that end an answer: the generation config's, and the one the template puts after answers."""
    return eos_ids(target, None) | end_of_turn(target, chat_of(chosen))
