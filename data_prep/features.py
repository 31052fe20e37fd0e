"""Dialogues -> token ids and loss mask -> the frozen target -> a feature store for each split.

    python -m data_prep.features --config configs/features/stdlib.yaml [--verify] [key=value ...]

Final features (EAGLE) and exit-layer states (Kangaroo) come from one pass over the target. A run that was killed goes
on at its next shard when it is started again; a finished split is skipped. --verify reads finished stores again and
compares their checksums.
"""

import argparse
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, field_validator
from tqdm import tqdm
from transformers import PretrainedConfig

from drafters.config import Config, load_config
from drafters.decoding.frozen import load_frozen_ends
from drafters.decoding.model_files import load_config_only, resolve_dtype
from drafters.decoding.target import TargetModel
from drafters.provenance import git_commit, library_versions

from .dialogues import check_source, source_digest
from .encoding import EncodedSplit, encode_split, load_tokenizer, template_hash, tokenizer_hash
from .loss_mask import ChatTokenizer
from .store import MANIFEST, FeatureStore, StoreManifest, check_same, read_manifest
from .store_writer import Shard, StoreWriter

Dtype = Literal["bfloat16", "float16", "float32"]


class FeaturesConfig(Config):
    """Schema of ``configs/features/*.yaml``."""

    target: str  # folder or Hub repository of the target
    revision: str | None = None  # of the target on the Hub
    dtype: Dtype = "bfloat16"  # in which the target runs
    store_dtype: Dtype | None = None  # of features and taps on disk; default: dtype
    device: str | None = None  # default: cuda if there is one, else cpu
    chat_template: str | None = None  # file with a Jinja template, used in place of the tokenizer's own
    splits: dict[str, str] = Field(min_length=1)  # {train: ShareGPT file or Hub dataset, heldout: ...}
    out: str  # each split's store is made in <out>/<split>
    exit_layers: list[int] = []  # also store the hidden states after this many decoder layers (Kangaroo)
    max_length: int = Field(2048, ge=2)  # tokens of a dialogue; the rest is cut off
    batch_tokens: int = Field(8192, ge=1)  # tokens of one forward, padding included
    shard_tokens: int = Field(65_536, ge=1)  # tokens of a shard: what a kill can cost, and what is held in memory
    limit: int | None = Field(None, ge=1)  # dialogues of each split, the first ones; default: all

    @field_validator("splits")
    @classmethod
    def _names_are_folders(cls, splits: dict[str, str]) -> dict[str, str]:
        bad = [name for name in splits if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)]
        if bad:
            raise ValueError(f"a split's name becomes a folder: letters, digits, '_', '.' and '-', found {bad}")
        return splits

    @field_validator("exit_layers")
    @classmethod
    def _layers_once(cls, layers: list[int]) -> list[int]:
        if len(set(layers)) != len(layers):
            raise ValueError("each layer at most once")
        return sorted(layers)


@dataclass
class Work:
    """One split that has to be written."""

    name: str
    path: Path
    header: StoreManifest
    encoded: EncodedSplit

    @property
    def written(self) -> int:
        """Tokens that an earlier, interrupted run has stored already."""
        return read_manifest(self.path).tokens if (self.path / MANIFEST).is_file() else 0


def main(arguments: list[str] | None = None) -> None:
    """Make the feature stores that a config asks for."""
    config, verify = _parse(arguments)
    if verify:
        verify_stores(config)
        return
    chat = load_tokenizer(config.target, config.revision, config.chat_template)
    headers = make_headers(config, chat)
    missing = [split for split in headers if not report_finished(Path(config.out) / split, headers[split])]
    work = [encode(config, chat, split, headers[split]) for split in missing]
    if not work:
        return
    check_disk(config, work)
    target = TargetModel.from_pretrained(config.target, config.dtype, config.device, config.revision)
    for split in work:
        manifest = write_store(target, split, config)
        print(f"{split.name}: {describe(manifest)} -> {split.path}")


def make_headers(config: FeaturesConfig, chat: ChatTokenizer) -> dict[str, StoreManifest]:
    """Check the config against the files and the target's configuration; one manifest without counts per split.

    Raises:
        ValueError: a missing file, one file given for two splits, an exit layer the target does not have, a
            ``max_length`` above its context, or a tokenizer with more tokens than the target.
    """
    for source in config.splits.values():
        check_source(source)
    digests = {split: source_digest(source) for split, source in config.splits.items()}
    for (one, first), (other, second) in itertools.combinations(digests.items(), 2):
        if first == second:
            raise ValueError(f"splits {one!r} and {other!r} are the same data ({config.splits[one]}); give two files")
    model = load_config_only(config.target, config.revision)
    check_target(config, model, len(chat.tokenizer))
    fingerprint = load_frozen_ends(config.target, "bfloat16", revision=config.revision).fingerprint
    return {
        split: StoreManifest(
            target_name=config.target,
            target_revision=config.revision,
            target_fingerprint=fingerprint,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            target_dtype=config.dtype,
            taps=config.exit_layers,
            dtype=config.store_dtype or config.dtype,
            tokenizer_hash=tokenizer_hash(chat.tokenizer),
            template_hash=template_hash(chat.template),
            chat_template=config.chat_template,
            max_length=config.max_length,
            limit=config.limit,
            source=source,
            source_digest=digests[split],
            versions=library_versions("torch", "transformers", "tokenizers", "safetensors"),
            commit=git_commit(Path(__file__).parent),
        )
        for split, source in config.splits.items()
    }


def check_target(config: FeaturesConfig, model: PretrainedConfig, tokens: int) -> None:
    """Raise ValueError where the config or the tokenizer (of ``tokens`` entries) does not fit the target."""
    layers, context = model.num_hidden_layers, getattr(model, "max_position_embeddings", None)
    wrong = [layer for layer in config.exit_layers if not 1 <= layer < layers]
    if wrong:
        raise ValueError(f"exit_layers {wrong}: {config.target} has {layers} layers; choose from 1 to {layers - 1}")
    if context is not None and config.max_length > context:
        raise ValueError(
            f"max_length is {config.max_length}, but {config.target} was made for {context} tokens; set "
            f"max_length={context}"
        )
    if tokens > model.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.target} has {tokens} tokens, the model {model.vocab_size}: one of them "
            f"is another "
            "model's; put the right tokenizer beside the weights"
        )
    if config.device and config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device is {config.device!r}, but no GPU is visible here; leave `device` out or set device=cpu"
        )


def report_finished(path: Path, header: StoreManifest) -> bool:
    """True, with one line printed, if the split's store is complete.

    Raises:
        ValueError: there is one made with other settings, or a damaged one.
    """
    if not (path / MANIFEST).is_file():
        return False
    manifest = read_manifest(path)
    check_same(path, manifest, header)
    if manifest.complete:
        FeatureStore.open(path)  # its files are there and of the right size
        print(f"{path} is finished already: {describe(manifest)}")
    return manifest.complete


def verify_stores(config: FeaturesConfig) -> None:
    """Read every byte of the config's stores and compare the checksums.

    Raises:
        ValueError: a store that is missing or half written, or shards whose content is not what was written.
    """
    problems = []
    for split in config.splits:
        try:
            store = FeatureStore.open(Path(config.out) / split)
            store.verify()
        except ValueError as error:  # the other splits are worth knowing about, too
            problems.append(str(error))
        else:
            print(f"{store.path} is as it was written: {describe(store.manifest)}")
    if problems:
        raise ValueError("\n".join(problems))


def encode(config: FeaturesConfig, chat: ChatTokenizer, split: str, header: StoreManifest) -> Work:
    """Tokens and masks of a split, with its counts printed."""
    encoded = encode_split(config.splits[split], chat, config.max_length, config.limit)
    print(f"{split}: {config.splits[split]}: {encoded.counts.describe()}")
    return Work(split, Path(config.out) / split, header, encoded)


def check_disk(config: FeaturesConfig, work: list[Work]) -> None:
    """Raise ValueError if the stores will not fit on the disk."""
    header = work[0].header
    width = header.hidden_size * (1 + len(header.taps)) * resolve_dtype(header.dtype).itemsize
    needed = sum((split.encoded.tokens - split.written) * (width + 5) for split in work)  # and an id and a mask byte
    place = Path(config.out).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    print(f"the features take {needed / 1e9:.2f} GB; {free / 1e9:.2f} GB are free at {place}")
    if needed * 1.02 > free:
        raise ValueError(
            f"the features need {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free at {place}; give "
            f"an `out` on "
            "another disk, a `limit`, or fewer exit_layers"
        )


def write_store(target: TargetModel, work: Work, config: FeaturesConfig) -> StoreManifest:
    """Run the target over a split and write its store, from the first dialogue that is not there yet."""
    with StoreWriter(work.path, work.header) as writer:
        if writer.stale_writer:
            print(
                f"{work.path}: {writer.stale_writer} died here; going on after its {len(writer.manifest.shards)} shards"
            )
        lengths = [len(dialogue.input_ids) for dialogue in work.encoded.dialogues]
        progress = tqdm(
            desc=work.name,
            total=sum(lengths),
            initial=sum(lengths[: writer.manifest.consumed]),
            unit="tok",
            unit_scale=True,
            mininterval=1.0,
        )
        with progress:
            for first, last in plan_shards(lengths, writer.manifest.consumed, config.shard_tokens):
                for lost in writer.write(run_shard(target, work, first, last, config.batch_tokens, progress)):
                    tqdm.write(f"warning: {work.name}: left out, NaN or infinite: dialogue {lost}", file=sys.stderr)
        return writer.finish(work.encoded.counts.dropped, work.encoded.counts.changed)


def plan_shards(lengths: list[int], first: int, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of dialogues from ``first`` on: each ends with the dialogue that reaches ``shard_tokens`` tokens."""
    tokens = 0
    for index in range(first, len(lengths)):
        tokens += lengths[index]
        if tokens >= shard_tokens or index == len(lengths) - 1:
            yield first, index + 1
            first, tokens = index + 1, 0


def plan_batches(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of dialogues of similar length, longest first; padded, a batch has at most ``batch_tokens`` tokens.

    A single longer dialogue is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while order:
        rows = max(1, batch_tokens // lengths[order[0]])
        yield order[:rows]
        order = order[rows:]


@torch.inference_mode()
def run_shard(
    target: TargetModel, work: Work, first: int, last: int, batch_tokens: int, progress: "tqdm[None]"
) -> Shard:
    """Features and taps of the dialogues ``first..last``: run by length, laid down in the order of the data file."""
    dialogues = work.encoded.dialogues[first:last]
    lengths = [len(dialogue.input_ids) for dialogue in dialogues]
    starts = [0, *itertools.accumulate(lengths)]
    dtype, taps = resolve_dtype(work.header.dtype), tuple(work.header.taps)
    features = torch.empty(sum(lengths), target.hidden_size, dtype=dtype)
    tapped = {layer: torch.empty_like(features) for layer in taps}
    for rows in plan_batches(lengths, batch_tokens):
        row_lengths = [lengths[row] for row in rows]
        ids = torch.zeros(len(rows), max(row_lengths), dtype=torch.int64)
        for position, row in enumerate(rows):
            ids[position, : lengths[row]] = torch.from_numpy(dialogues[row].input_ids)
        try:
            output = target.features(ids.to(target.device), row_lengths, taps)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"out of memory in a forward of {ids.numel()} tokens; lower batch_tokens (now {batch_tokens}) "
                f"or max_length "
                "and run again: finished shards are kept"
            ) from error
        for source, destination in [(output.features, features), *((output.taps[k], tapped[k]) for k in taps)]:
            values = source.to(dtype).cpu()
            for position, row in enumerate(rows):
                destination[starts[row] : starts[row + 1]] = values[position, : lengths[row]]
        progress.update(sum(row_lengths))
    return Shard(
        ids=work.encoded.ids[first:last],
        lengths=lengths,
        input_ids=torch.cat([torch.from_numpy(dialogue.input_ids) for dialogue in dialogues]),
        loss_mask=torch.cat([torch.from_numpy(dialogue.loss_mask) for dialogue in dialogues]),
        features=features,
        taps=tapped,
    )


def describe(manifest: StoreManifest) -> str:
    """One line: dialogues, tokens, size, and what was dropped."""
    size = sum(shard.bytes for shard in manifest.shards)
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in manifest.dropped.items()) or "none"
    changed = "".join(f", {reason} {count:,}" for reason, count in manifest.changed.items())
    share = manifest.response_tokens / max(manifest.tokens, 1)
    return (
        f"{manifest.dialogues:,} dialogues, {manifest.tokens:,} tokens ({share:.0%} of them the assistant's), "
        f"{len(manifest.shards)} shards, {size / 1e6:,.0f} MB; dropped: {dropped}{changed}"
    )


def _parse(arguments: list[str] | None) -> tuple[FeaturesConfig, bool]:
    parser = argparse.ArgumentParser(prog="python -m data_prep.features", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", required=True, help="YAML file, see configs/features/")
    parser.add_argument("--verify", action="store_true", help="only check the finished stores against their checksums")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example limit=1000 device=cuda")
    parsed = parser.parse_args(arguments)
    return load_config(FeaturesConfig, parsed.config, parsed.overrides), parsed.verify


def program() -> None:
    """`main` for the command line: what the user can mend ends in one line instead of a stack trace."""
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    program()
