"""The amount of training data: counted in a feature store, or estimated without one."""

from argparse import Namespace
from dataclasses import dataclass, field

from data_prep.dialogues.encoding import load_tokenizer, sample_split
from data_prep.store.reader import FeatureStore
from train.core.config import TrainConfig
from train.data.packing import epoch_batches

SAMPLE = 256  # dialogues of a data file that are tokenized for an estimate


@dataclass
class Workload:
    """One epoch's data."""

    tokens: int  # of all dialogues
    trained: int  # tokens that belong to answers
    longest: int  # tokens of the longest dialogue
    steps: int  # of the optimiser
    source: str  # of the numbers
    lengths: list[int] = field(default_factory=list)  # tokens of each dialogue; empty if unknown

    def describe(self) -> str:
        """One line on the data."""
        return f"{self.tokens:,} tokens an epoch, {self.trained:,} of them trained ({self.source})"

    def describe_steps(self, config: TrainConfig) -> str:
        """One line on the steps."""
        total = self.total_steps(config)
        limits = [f"{total:,} in all"] if total else []
        limits += [f"{config.minutes:g} minutes"] if config.minutes else []
        filled = f", filled to {self.tokens / (self.steps * config.batch_tokens):.1%}" if self.lengths else ""
        return f"{self.steps:,} an epoch of at most {config.batch_tokens:,} tokens{filled}, {' or '.join(limits)}"

    def total_steps(self, config: TrainConfig) -> int | None:
        """Steps up to the limit that comes first; None if only the clock limits them."""
        return config.last_step(lambda epochs: epochs * self.steps)


def store_workload(config: TrainConfig, store: FeatureStore) -> Workload:
    """Counted in the store; the steps are those of the first epoch."""
    lengths = store.lengths.tolist()
    steps = len(epoch_batches(lengths, config.batch_tokens, config.seed, 0))
    manifest = store.manifest
    return Workload(manifest.tokens, manifest.response_tokens, max(lengths), steps, "the feature store", lengths)


def estimate_workload(config: TrainConfig, options: Namespace) -> Workload:
    """From a number of tokens, all taken as trained; or from a tokenized sample of a data file.

    ``options``: the command line. Template and limits are those of ``config.data``, if it is set.

    Raises:
        ValueError: unreadable data, or no tokenizer to count with.
    """
    longest = config.data.max_length if config.data else options.max_length
    if options.tokens is not None:
        tokens = trained = options.tokens
        source = "as given; all taken as trained, an upper bound"
    else:
        try:
            chat = load_tokenizer(config.target, config.revision, config.data.chat_template if config.data else None)
        except ValueError as error:
            raise ValueError(f"--data: no tokenizer to count with; give --tokens N ({error})") from None
        data, limit = options.data, None
        if config.data is not None:
            data, limit = options.data or config.data.train, config.data.limit
        sample = sample_split(data, chat, longest, SAMPLE, limit)
        tokens, trained = sample.tokens, sample.trained
        source = f"{sample.usable:,} dialogues of {data}, by a sample of {sample.looked_at:,}"
    return Workload(tokens, trained, longest, max(1, tokens // config.batch_tokens), source)
