"""Dialogues -> token ids and loss mask -> the frozen target -> a feature store for each split.

    python -m data_prep.features --config configs/features/stdlib.yaml [--verify] [key=value ...]
    torchrun --nproc-per-node 8 -m data_prep.features --config ...     or deepspeed --module, or srun python -m
    python -m data_prep.features --config ... --rank 0 --ranks 4       on each of four machines that share `out`

Final features (EAGLE) and exit-layer states (Kangaroo) come from one pass over the target. A run that was killed goes
on at its next shard when it is started again, with any number of processes; a finished split is skipped. --verify reads
finished stores again and compares their checksums.
"""

import argparse
import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from tqdm import tqdm
from transformers import PretrainedConfig

from drafters.config import Config, load_config
from drafters.decoding.frozen import load_frozen_ends
from drafters.decoding.model_files import load_config_only, resolve_device
from drafters.decoding.target import TargetModel
from drafters.program import run_program
from drafters.provenance import git_commit, library_versions

from .dialogues import check_source, source_digest
from .disk import existing_folder, free_bytes
from .dump import Background, Buffers, Computed, Tokens, run_shard
from .encoding import EncodedSplit, encode_split, load_tokenizer, template_hash, tokenizer_hash
from .loss_mask import ChatTokenizer
from .manifest import MANIFEST, ShardPlan, StoreManifest, check_same, read_manifest
from .ranks import Rank, add_rank_arguments, find_rank
from .store import FeatureStore
from .store_writer import StoreWriter

Dtype = Literal["bfloat16", "float16", "float32"]
StoreDtype = Literal["bfloat16", "float16", "float32", "int8", "float8"]


class FeaturesConfig(Config):
    """Schema of ``configs/features/*.yaml``."""

    target: str  # folder or Hub repository of the target
    revision: str | None = None  # of the target on the Hub
    dtype: Dtype = "bfloat16"  # in which the target runs
    store_dtype: StoreDtype | None = None  # of features and taps on disk; int8 and float8: with a scale per token
    device: str | None = None  # default: cuda if there is one, else cpu
    device_map: str | dict[str, int | str] | None = None  # in place of device: layers over several GPUs, e.g. auto
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
    def lengths(self) -> list[int]:
        """Tokens of each dialogue."""
        return [len(dialogue.input_ids) for dialogue in self.encoded.dialogues]

    @property
    def written(self) -> int:
        """Tokens that are stored already, by an earlier, interrupted run or by other ranks."""
        return read_manifest(self.path).tokens if (self.path / MANIFEST).is_file() else 0


def main(arguments: list[str] | None = None) -> None:
    """Make the feature stores that a config asks for, or this rank's share of them."""
    parsed = _parse(arguments)
    config = load_config(FeaturesConfig, parsed.config, parsed.overrides)
    rank = find_rank(parsed.rank, parsed.ranks)
    if parsed.verify:
        if rank.index == 0:
            verify_stores(config)
        return
    chat = load_tokenizer(config.target, config.revision, config.chat_template)
    headers = make_headers(config, chat)
    with contextlib.redirect_stdout(None if rank.index else sys.stdout):  # all ranks would print the same
        missing = [split for split in headers if not report_finished(Path(config.out) / split, headers[split])]
        work = [encode(config, chat, split, headers[split]) for split in missing]
        if not work:
            return
        check_disk(config, work)

    @functools.cache
    def target() -> TargetModel:
        return load_target(config, rank)

    for split in work:
        manifest, tokens = write_store(target, split, config, rank)
        if tokens.real:
            print(f"{split.name}: {tokens.padding:.1%} of what the target ran on was padding")
        if manifest.complete:
            print(f"{split.name}: {describe(manifest)} -> {split.path}")
        else:
            print(
                f"{split.name}: {rank.describe()} has written its share; {manifest.consumed:,} of "
                f"{len(split.encoded.ids):,} dialogues are there. The rank that finishes last makes the store whole; "
                "if none is running any more, run the same command again, with any number of ranks"
            )


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
    fingerprint = load_frozen_ends(config.target, device="meta", revision=config.revision).fingerprint
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


def load_target(config: FeaturesConfig, rank: Rank) -> TargetModel:
    """The target of a config, on this rank's device or over all that ``device_map`` names.

    Raises:
        ValueError: see ``TargetModel.from_pretrained``; or processes of one machine that would each want all its GPUs.
    """
    device = rank.target_device(config.device, config.device_map)
    return TargetModel.from_pretrained(
        config.target, config.dtype, device, config.revision, device_map=config.device_map
    )


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
    resolve_device(config.device)


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
    work = Work(split, Path(config.out) / split, header, encoded)
    header.plan = ShardPlan.of(work.lengths, config.shard_tokens)
    return work


def check_disk(config: FeaturesConfig, work: list[Work]) -> None:
    """Raise ValueError if the stores will not fit on the disk."""
    needed = sum((split.encoded.tokens - split.written) * split.header.token_bytes for split in work)
    place, free = existing_folder(Path(config.out)), free_bytes(Path(config.out))
    print(f"the features take {needed / 1e9:.2f} GB; {free / 1e9:.2f} GB are free at {place}")
    if needed * 1.02 > free:
        raise ValueError(
            f"the features need {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free at {place}; give "
            f"an `out` on "
            "another disk, store_dtype int8, a `limit`, or fewer exit_layers"
        )


def write_store(
    target: Callable[[], TargetModel], work: Work, config: FeaturesConfig, rank: Rank
) -> tuple[StoreManifest, Tokens]:
    """Run the target over this rank's shards of a split and write those that are not there yet.

    ``target`` is called only if there are any. Returns the manifest, not ``complete`` while other ranks have shards to
    write, and what the target was given.

    Raises:
        ValueError: see ``StoreWriter`` and ``dump.forward``.
        OSError: the disk is full or cannot be written; what is finished stays.
    """
    tokens, counts = Tokens(), work.encoded.counts
    with StoreWriter(work.path, work.header, rank) as writer:
        report_found(work, writer, config)
        lengths = work.lengths
        missing = writer.missing(lengths)
        sizes = [sum(lengths[first:last]) for _, first, last in missing]
        if missing:
            loaded = target()
            buffers = Buffers(loaded, work.header, max(sizes))
            progress = tqdm(
                desc=f"{work.name} {rank.describe()}".strip(),
                total=sum(sizes),
                unit="tok",
                unit_scale=True,
                mininterval=1.0,
                disable=rank.index > 0,
            )
            with progress, Background() as background:

                def after_batch(real: int, padded: int) -> None:
                    tokens.real += real
                    tokens.padded += padded
                    progress.update(real)
                    background.check()

                for number, first, last in missing:
                    span = (first, last)
                    computed = run_shard(
                        loaded, work.header, work.encoded, span, config.batch_tokens, buffers, after_batch
                    )
                    background.submit(functools.partial(_write, work.name, writer, number, computed, buffers))
        return writer.finish(counts.dropped, counts.changed), tokens


def _write(name: str, writer: StoreWriter, number: int, computed: Computed, buffers: Buffers) -> None:
    try:
        for lost in writer.write(computed.wait(), number):
            tqdm.write(f"warning: {name}: left out, NaN or infinite: dialogue {lost}", file=sys.stderr)
    finally:
        buffers.give_back(computed.buffer)


def report_found(work: Work, writer: StoreWriter, config: FeaturesConfig) -> None:
    """Print what an earlier run left in the store's folder, where that is worth knowing."""
    if writer.stale_writer:
        print(f"{work.path}: {writer.stale_writer} died here; going on after its {len(writer.manifest.shards)} shards")
    for problem in writer.damaged:
        print(f"{problem}; that shard is made again")
    plan = writer.manifest.plan
    if plan is not None and plan.shard_tokens != config.shard_tokens and not writer.manifest.complete:
        print(f"{work.path}: begun with shard_tokens={plan.shard_tokens}, and goes on with that")


def describe(manifest: StoreManifest) -> str:
    """One line: dialogues, tokens, size, and what was dropped."""
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in manifest.dropped.items()) or "none"
    changed = "".join(f", {reason} {count:,}" for reason, count in manifest.changed.items())
    share = manifest.response_tokens / max(manifest.tokens, 1)
    return (
        f"{manifest.dialogues:,} dialogues, {manifest.tokens:,} tokens ({share:.0%} of them the assistant's), "
        f"{len(manifest.shards)} shards, {manifest.size / 1e6:,.0f} MB of {manifest.dtype} (each token "
        f"{manifest.token_bytes:,} bytes); dropped: {dropped}{changed}"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m data_prep.features", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", required=True, help="YAML file, see configs/features/")
    parser.add_argument("--verify", action="store_true", help="only check the finished stores against their checksums")
    add_rank_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example limit=1000 device=cuda")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_program(main)
