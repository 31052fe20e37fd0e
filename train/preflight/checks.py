"""The checks of --dry-run: whether all that a run needs is here and fits together, by the run's own functions."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import PretrainedConfig

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.reader import check_source
from data_prep.extraction.headers import make_headers
from data_prep.store.manifest import ANSWERS
from data_prep.store.reader import FeatureStore
from drafters.common.wording import size_text
from drafters.model.files import load_config_only
from drafters.model.loading import BASE, config_and_adapter
from drafters.model.weights import open_weights, weight_files
from train.core.config import OnlineData, TrainConfig
from train.data.online import OnlineFeatures, as_feature_keys
from train.preflight.workload import SAMPLE
from train.run.inputs import open_inputs

LIBRARIES = ("deepspeed", "tensorboard", "matplotlib", "tqdm")
Found = TypeVar("Found")


@dataclass
class Report:
    """The lines of a dry run. ``problems`` would keep the run from starting; ``short``: the estimate in one line."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    short: str = ""
    memory: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        """Add one line of the table."""
        self.lines.append(f"{name:<24} {text}")

    def check(self, name: str, what: Callable[[], Found], done: str | Callable[[Found], str] = "ok") -> Found | None:
        """Call ``what`` and return its value; its error is a problem. ``done``: text, or a function of the value."""
        try:
            value = what()
        except (ValueError, OSError) as error:
            self.problems.append(f"{name}: {error}")
            self.add(name, f"PROBLEM: {error}")
            return None
        self.add(name, done if isinstance(done, str) else done(value))
        return value

    def text(self) -> str:
        """The whole report."""
        found = f"{len(self.problems)} problem(s): the run cannot start like this" if self.problems else "can start"
        return "\n".join([*self.lines, *([f"In short: {self.short}"] if self.short else []), f"Result: {found}"])


def check_libraries() -> None:
    """Raise ValueError if a library is missing, which a run imports only at its first use."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)}; pip install -e '.[train]'")


def check_target(report: Report, config: TrainConfig, instead: str | None) -> PretrainedConfig | None:
    """The target's configuration, or that of the file ``instead``."""
    where = "a folder" if Path(config.target).is_dir() else "in the Hub's cache"
    found = report.check("target", lambda: _target_here(config), f"{config.target}, {where}")
    if not instead:
        return found
    return report.check("target's shape", lambda: load_config_only(instead, may_be_file=True), f"from {instead}")


def _target_here(config: TrainConfig) -> PretrainedConfig:
    """From a folder or the Hub's cache, because a dry run does not use the network."""
    local = here(config)
    if local is None:
        raise ValueError(f"{config.target!r} is neither a folder nor a repository in the Hub's cache; put it there")
    return load_config_only(local.target, local.revision)


def here(config: TrainConfig) -> TrainConfig | None:
    """``config`` with the target's folder, perhaps in the Hub's cache; None if there is none."""
    if Path(config.target).is_dir():
        return config
    try:
        found = try_to_load_from_cache(config.target, "config.json", revision=config.revision)
    except HFValidationError:  # a path
        return None
    if not isinstance(found, str):
        return None
    return config.model_copy(update={"target": str(Path(found).parent), "revision": None})


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


def check_store(report: Report, path: Path, split: str) -> FeatureStore | None:
    """The store of a split; None if there is none."""

    def described(store: FeatureStore) -> str:
        manifest = store.manifest
        return (
            f"{manifest.dialogues:,} dialogues, {manifest.tokens:,} tokens, {size_text(manifest.size)} in "
            f"{manifest.dtype}, of {manifest.target_name} ({manifest.target_fingerprint}); answers: "
            f"{ANSWERS[manifest.answers]}"
        )

    return report.check(split, lambda: FeatureStore.open(path), described)


def check_stores_target(report: Report, config: TrainConfig, local: TrainConfig, missing: str) -> None:
    """Check that both stores are the target's; its weights must be here."""
    what = f"target{'' if missing else ', tokenizer'} and exit layer are those of the features"
    report.check(
        "target and features", lambda: _with_name(config, local, lambda: open_inputs(local, device="meta")), what
    )


def check_sources(report: Report, data: OnlineData) -> bool:
    """Whether the files of an online run exist."""
    before = len(report.problems)
    for split, source in (("train", data.train), ("heldout", data.heldout)):
        report.check(split, functools.partial(check_source, source), f"{source}, features computed while it trains")
    return len(report.problems) == before


def check_dialogues(report: Report, config: TrainConfig, local: TrainConfig) -> OnlineFeatures | None:
    """The checks of an online run before it loads its target, on the first dialogues of each split.

    Returns the held-out dialogues, all of them if tau chooses among them, without features; None after a problem.
    """
    data = config.data
    assert data is not None

    def read() -> OnlineFeatures:
        chat = load_tokenizer(local.target, local.revision, data.chat_template)
        headers = make_headers(as_feature_keys(local, data), chat)
        first = min(SAMPLE, data.limit or SAMPLE)
        encode_split(data.train, chat, data.max_length, first)
        heldout = encode_split(data.heldout, chat, data.max_length, data.limit if config.tau_every else first)
        return OnlineFeatures(heldout, headers["heldout"], data.target_batch_tokens)

    suffice = f"tokenizer, context and layers suffice (tried on up to {SAMPLE} dialogues of each split)"
    return report.check("target and dialogues", lambda: _with_name(config, local, read), suffice)


def _with_name(config: TrainConfig, local: TrainConfig, what: Callable[[], Found]) -> Found:
    """Call ``what``, which reads the target's folder; its errors have the target's name."""
    try:
        return what()
    except ValueError as error:
        raise ValueError(str(error).replace(local.target, config.target)) from error
    except EntryNotFoundError as error:  # an index names missing files
        raise ValueError(f"target: {error}") from error
