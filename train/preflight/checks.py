"""The checks of --dry-run: whether all that a run needs is here and fits together, by the run's own functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import PretrainedConfig

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.extraction.headers import make_headers
from data_prep.store.manifest import ANSWERS
from data_prep.store.reader import FeatureStore
from drafters.common.wording import size_text
from drafters.model.files import load_config_only
from drafters.model.loading import BASE, config_and_adapter
from drafters.model.weights import open_weights, weight_files
from train.core.config import TrainConfig
from train.data.online import OnlineFeatures, as_feature_keys
from train.preflight.workload import SAMPLE

LIBRARIES = ("deepspeed", "tensorboard", "matplotlib", "tqdm")
Found = TypeVar("Found")


@dataclass
class Report:
    """The lines of a dry run. ``problems`` would keep the run from starting; ``short``: the parts of the last line.

    ``names``: the target's name in messages, by its folder in the Hub's cache. ``memory``: bytes of a rank by part.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, text: str, short: str | None = None) -> None:
        """Add one line of the table, and perhaps a part of the last line."""
        self.lines.append(f"{name:<24} {text}")
        self.short += [] if short is None else [short]

    def check(
        self, name: str, what: Callable[[], Found], done: str | Callable[[Found], str], short: str | None = None
    ) -> Found | None:
        """Call ``what`` and return its value; its error is a problem. ``done``: text, or a function of the value."""
        try:
            value = what()
        except (ValueError, OSError, EntryNotFoundError) as error:  # the last: an index names missing files
            text = str(error)
            for folder, known_as in self.names.items():
                text = text.replace(folder, known_as)
            self.problems.append(f"{name}: {text}")
            self.add(name, f"PROBLEM: {text}", short)
            return None
        self.add(name, done if isinstance(done, str) else done(value), short)
        return value

    def text(self) -> str:
        """The whole report."""
        found = f"{len(self.problems)} problem(s): the run cannot start like this" if self.problems else "can start"
        short = [f"In short: {'; '.join(self.short)}"] if self.short else []
        return "\n".join([*self.lines, *short, f"Result: {found}"])


def check_libraries() -> None:
    """Raise ValueError if a library is missing, which a run imports only at its first use."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)}; pip install -e '.[train]'")


def here(config: TrainConfig) -> TrainConfig | None:
    """``config`` with the target's folder, perhaps in the Hub's cache; None if there is none. It uses no network."""
    if Path(config.target).is_dir():
        return config
    try:
        found = try_to_load_from_cache(config.target, "config.json", revision=config.revision)
    except HFValidationError:  # a path
        return None
    if not isinstance(found, str):
        return None
    return config.model_copy(update={"target": str(Path(found).parent), "revision": None})


def target_config(config: TrainConfig, local: TrainConfig | None) -> PretrainedConfig:
    """The target's configuration; ``local``: of ``here``."""
    if local is None:
        raise ValueError(f"{config.target!r} is neither a folder nor a repository in the Hub's cache; put it there")
    return load_config_only(local.target, local.revision)


def not_here(config: TrainConfig, local: TrainConfig | None) -> str:
    """The target's files that a run would have to fetch from the Hub; "" if none."""
    if local is None:
        return "target"
    if local is config:  # a folder: missing files are an error
        return ""
    folder = Path(local.target)
    missing = [] if all((folder / name).is_file() for name in weight_files(local.target)) else ["weights"]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer")
    return " and ".join(missing)


def check_model(name: str) -> PretrainedConfig:
    """The configuration of a model that a run loads beside its target; for an adapter, of its base model.

    Raises:
        ValueError: it cannot be used, or the tensors in its folder do not fit its configuration.
    """
    config, adapter = config_and_adapter(name)
    base = name if adapter is None else adapter[BASE]
    if Path(base).is_dir():
        open_weights(base, None, config)
    return config


def describe_store(store: FeatureStore) -> str:
    """One line on a store."""
    manifest = store.manifest
    return (
        f"{manifest.dialogues:,} dialogues, {manifest.tokens:,} tokens, {size_text(manifest.size)} in "
        f"{manifest.dtype}, of {manifest.target_name} ({manifest.target_fingerprint}); answers: "
        f"{ANSWERS[manifest.answers]}"
    )


def first_dialogues(config: TrainConfig) -> OnlineFeatures:
    """The held-out dialogues of an online run, without features; also reads ``SAMPLE`` dialogues to train on.

    ``config``: with the target's folder. The held-out ones are all that tau chooses among, or ``SAMPLE``.

    Raises:
        ValueError: as the run would.
    """
    data = config.data
    assert data is not None
    chat = load_tokenizer(config.target, config.revision, data.chat_template)
    headers = make_headers(as_feature_keys(config, data), chat)
    first = min(SAMPLE, data.limit or SAMPLE)
    encode_split(data.train, chat, data.max_length, first)
    heldout = encode_split(data.heldout, chat, data.max_length, data.limit if config.tau_every else first)
    return OnlineFeatures(heldout, headers["heldout"], data.target_batch_tokens)
