"""Retrieval drafters inside vLLM: its ``custom_class`` proposer, for methods that need only token ids.

    vllm serve TARGET --additional-config '{"drafter": {"drafter": "suffix", "alpha": 1.0}}' --speculative-config \
        '{"method": "custom_class", "model": "drafters.vllm_proposer.Proposer", "num_speculative_tokens": 8}'

``drafter`` holds the method and its options as configs have them; the drafts are those of this package's own loop.
vLLM's Python must find the package: by PYTHONPATH, or installed there without its dependencies.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from drafters.config import validate
from drafters.drafting.retrieval import Retrieval
from drafters.loop.state import DecodeState
from drafters.methods import drafter_class
from drafters.model.target import FeatureOutput, TargetModel

LENGTHS = {
    "prompt_lookup": "gamma",
    "suffix": "nodes",
    "rest": "depth",
}  # the methods, and how long a chain each drafts


@dataclass
class Requests:
    """The part of a ``DecodeState`` that these drafters read; a request keeps its row until it ends.

    Attributes:
        most: tokens of a draft. context: tokens of a request.
    """

    tokens: list[list[int]]
    prompt_lengths: list[int]
    eos: frozenset[int]
    most: int
    context: int

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    def room(self, row: int = 0) -> int:
        """Tokens that a row may still commit in the next step; vLLM tells nothing of the request's own limit."""
        return min(self.most + 1, self.context - len(self.tokens[row]))


class Proposer:
    """vLLM builds it from its configuration, and calls ``propose`` after every step.

    Raises:
        ValueError: a method that needs more than token ids, or options that it does not have.
    """

    def __init__(self, vllm_config: Any) -> None:
        model, settings = vllm_config.model_config, vllm_config.additional_config
        most, rows = vllm_config.speculative_config.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs
        target = SimpleNamespace(
            name=model.model,
            source=model.model,
            revision=model.revision,
            vocab_size=model.get_vocab_size(),
            max_context=model.max_model_len,
        )
        given = settings.get("drafter", {"drafter": "prompt_lookup"}) if isinstance(settings, dict) else {}
        self._drafter = copying_drafter(given, most, cast(TargetModel, target))
        # Their schemas check the options; what vLLM counts as the end of an answer is in the model's own files.
        found = model.try_get_generation_config().get("eos_token_id")
        ends = found if isinstance(found, list) else [found]
        eos = frozenset(token for token in ends if token is not None)
        self._state = Requests([[] for _ in range(rows)], [0] * rows, eos, most, model.max_model_len)
        self._drafter.begin(cast(DecodeState, self._state), FeatureOutput(cast(Any, None)))
        self._texts: dict[int, np.ndarray] = {}  # of each row that was in use what was read, the latest last
        self._rows: list[int] = []  # which row each of vLLM's was, a step ago

    def load_model(self, *_: Any, **__: Any) -> None:
        """There are no weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each request of the batch.

        Args:
            sampled_token_ids: what the step has committed; nothing where a prompt is not read to its end.
            num_tokens_no_spec: ``[B]`` tokens of each request. token_ids_cpu: ``[B, T]`` those.
        """
        texts = {n: token_ids_cpu[n, : num_tokens_no_spec[n]] for n, new in enumerate(sampled_token_ids) if new}
        rows = self._find(texts)
        joining = {
            n: row for n, row in rows.items() if row not in self._texts or not _goes_on(self._texts[row], texts[n])
        }
        for n, row in rows.items():
            if n in joining:
                self._state.tokens[row] = texts[n].tolist()
                self._state.prompt_lengths[row] = len(texts[n]) - len(sampled_token_ids[n])
            else:
                self._state.tokens[row] += texts[n][len(self._texts[row]) :].tolist()
            self._texts.pop(row, None)
            self._texts[row] = texts[n].copy()
        state = cast(DecodeState, self._state)
        if joining:
            self._drafter.join(state, list(joining.values()), state, FeatureOutput(cast(Any, None)))
        self._rows = [rows.get(n, -1) for n in range(len(sampled_token_ids))]
        return [self._drafter.retrieve(state, row).tokens if row >= 0 else [] for row in self._rows]

    def _find(self, texts: dict[int, np.ndarray]) -> dict[int, int]:
        """The row of each text: vLLM moves requests in its batch without saying so."""
        found: dict[int, int] = {}
        for n, text in texts.items():
            likely = self._rows[n : n + 1]
            rows = (row for row in (*likely, *self._texts) if row in self._texts and row not in found.values())
            if (row := next((row for row in rows if _goes_on(self._texts[row], text)), None)) is not None:
                found[n] = row
        # New requests take the rows of those that ended longest ago, whose texts the drafter then remembers.
        for n in texts.keys() - found.keys():
            ended = (row for row in self._texts if row not in found.values())
            found[n] = next(ended, len(self._texts.keys() | set(found.values())))
        return found


def _goes_on(before: np.ndarray, text: np.ndarray) -> bool:
    """True if ``text`` is the text of the step before, with more tokens."""
    return len(before) < len(text) and np.array_equal(before, text[: len(before)])


def copying_drafter(given: dict[str, Any], most: int, target: TargetModel) -> Retrieval:
    """The drafter of a config's entry, set to chains of at most ``most`` tokens.

    Raises:
        ValueError: a method that needs more than token ids, or options that it does not have.
    """
    options = dict(given)
    name = options.pop("drafter", None)
    if name not in LENGTHS:
        raise ValueError(f"vLLM gives a drafter token ids alone, and {name!r} needs more; known: {', '.join(LENGTHS)}")
    kind = cast(type[Retrieval], drafter_class(name))
    if options.setdefault(LENGTHS[name], most) == "auto":
        raise ValueError(f"{name}: {LENGTHS[name]}: auto depends on step costs in our own loop; give a number")
    if "chain" in kind.options.model_fields and not options.setdefault("chain", True):
        raise ValueError(f"{name}: chain is false, and vLLM verifies chains alone; leave it out")
    return kind(target, validate(kind.options, options, source=f"options of drafter {name!r}"))
