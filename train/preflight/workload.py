"""The amount of training data: counted in a feature store, or estimated without one."""

from dataclasses import dataclass, field

from data_prep.dialogues.encoding import load_tokenizer, sample_split
from data_prep.store.reader import FeatureStore
from train.core.config import TrainConfig
from train.data.packing import epoch_batches

SAMPLE = 256  # dialogues of a data file that are tokenized for an estimate


@dataclass
class Workload:
    """One epoch's data.

    Attributes:
        tokens, trained: of all dialogues, and those that belong to answers.
        longest: tokens of the longest dialogue.
        steps: optimiser steps an epoch.
        source: of the numbers.
        lengths: tokens of each dialogue; empty if unknown.
    """

    tokens: int
    trained: int
    longest: int
    steps: int
    source: str
    lengths: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """One line on the data."""
        return f"{self.tokens:,} tokens an epoch, {self.trained:,} of them trained ({self.source})"

    def describe_steps(self, config: TrainConfig) -> str:
        """One line on the steps."""
        total = self.total_steps(config)
        limit = f"{total:,} in all" if total else ""
        filled = f", filled to {self.tokens / (self.steps * config.batch_tokens):.1%}" if self.lengths else ""
        if config.minutes:
            limit += f"{' or ' if limit else ''}{config.minutes:g} minutes"
        return f"{self.steps:,} an epoch of at most {config.batch_tokens:,} tokens{filled}, {limit}"

    def total_steps(self, config: TrainConfig) -> int | None:
        """Steps up to the limit that comes first; None if only the clock limits them."""
        return config.last_step(lambda epochs: epochs * self.steps)

    def total(self, config: TrainConfig) -> int | None:
        """Tokens of all steps; None if only the clock limits them."""
        steps = self.total_steps(config)
        return round(steps / self.steps * self.tokens) if steps else None


def store_workload(config: TrainConfig, store: FeatureStore) -> Workload:
    """Counted in the store; the steps are those of the first epoch."""
    lengths = store.lengths.tolist()
    steps = len(epoch_batches(lengths, config.batch_tokens, config.seed, 0))
    manifest = store.manifest
    return Workload(manifest.tokens, manifest.response_tokens, max(lengths), steps, "the feature store", lengths)


def estimate_workload(config: TrainConfig, tokens: int | None, data: str | None, max_length: int) -> Workload:
    """From a number of tokens, all taken as trained; or from a tokenized sample of a data file.

    Template and limit are those of ``config.data``, if given.

    Raises:
        ValueError: unreadable data, or no tokenizer to count with.
    """
    trained, source = tokens or 0, "as given; all taken as trained, an upper bound"
    if tokens is None:
        assert data is not None
        template, limit = (config.data.chat_template, config.data.limit) if config.data else (None, None)
        try:
            chat = load_tokenizer(config.target, config.revision, template)
        except ValueError as error:
            raise ValueError(f"--data: no tokenizer to count with; give --tokens N ({error})") from None
        sample = sample_split(data, chat, max_length, SAMPLE, limit)
        tokens, trained = sample.tokens, sample.trained
        source = f"{sample.usable:,} dialogues of {data}, by a sample of {sample.looked_at:,}"
    return Workload(tokens, trained, max_length, max(1, tokens // config.batch_tokens), source)
