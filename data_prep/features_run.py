"""What data_prep.features does with its config."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PretrainedConfig

from data_prep.answers.ownership import WORDS, begun_on, whose
from data_prep.common.disk import check_room, free_bytes
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank, dtype_here, load_target, say_dtype
from data_prep.dialogues.encoding import EncodedSplit, encode_split, load_tokenizer, template_hash, tokenizer_hash
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import source_digest
from data_prep.extraction.process import VLLM
from data_prep.features import FeaturesConfig
from data_prep.heldout_answers import HELDOUT, answers_file, with_own_answers
from data_prep.regenerate_run import answered
from data_prep.store.dump import Background, Buffers, Computed, Tokens, run_shard
from data_prep.store.manifest import MANIFEST, ShardPlan, StoreManifest, check_same, read_header, read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import StoreWriter
from drafters.cli.program import command
from drafters.common.files import existing_folder
from drafters.common.provenance import git_commit, library_versions
from drafters.common.wording import size_text
from drafters.methods.eagle import EagleHead
from drafters.methods.kangaroo import KangarooAdapter
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only, resolve_device
from drafters.model.layers import default_layer
from drafters.model.target import TargetModel


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


def run(config: FeaturesConfig, rank: Rank) -> None:
    """Make the stores, or this rank's share of them; what is there already is not made again."""
    chat = load_tokenizer(config.target, config.revision, config.chat_template, start_date(config))
    headers = make_headers(config, chat)
    own = config.model_copy(update={"dtype": target_dtype(config)})
    target = functools.cache(lambda: load_target(config.target, own, rank))
    with contextlib.redirect_stdout(None if rank.index else sys.stdout):  # all ranks would print the same
        say_dtype(config.target, config.dtype, own.dtype, rank)
        if config.engine == "own":
            config = with_own_answers(config, headers, target)
        else:
            check_answers(config, headers)
        missing = [split for split in headers if not report_finished(Path(config.out) / split, headers[split])]
        work = [encode(config, chat, split, headers[split]) for split in missing]
        if not work:
            return
        check_batch_tokens(config, work)
        check_disk(config, work)

    with contextlib.ExitStack() as stack:
        served = functools.cache(lambda: stack.enter_context(start_vllm(config, work, rank)))
        write_all(target, served if config.engine == "vllm" else None, work, config, rank)


def begun(config: FeaturesConfig) -> list[StoreManifest]:
    """Return what the manifests of the stores that exist say of their settings."""
    stores = [Path(config.out) / split for split in config.splits]
    return [read_header(store) for store in stores if (store / MANIFEST).is_file()]


def start_date(config: FeaturesConfig) -> str | None:
    """Return the earliest date (YYYY-MM-DD) in the prompts of begun stores, else of their answers; None: no date.

    With it, a template that prints today's date prints the same date in every run.
    """
    dates = [header.template_date for header in begun(config)]
    if not any(dates):
        dates = [begun_on(file) for file in (answers_file(config), *config.splits.values())]
    return min(filter(None, dates), default=None)


def write_all(
    target: Callable[[], TargetModel],
    served: Callable[[], VLLM] | None,
    work: list[Work],
    config: FeaturesConfig,
    rank: Rank,
) -> None:
    """The stores of all splits, or this rank's share of them, and what became of each."""
    for split in work:
        manifest, tokens = write_store(target, split, config, rank, served)
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


def kept(config: FeaturesConfig) -> str:
    """What a run that was interrupted leaves, and the command that goes on."""
    stores = [Path(config.out) / split for split in config.splits]
    dialogues = sum(read_manifest(store).consumed for store in stores if (store / MANIFEST).is_file())
    if not dialogues and (answers := answered(answers_file(config))):
        return f"{answers:,} held-out answers are kept in {config.out}; to go on: {command()}"
    if not dialogues:
        return f"nothing was written yet; to start again: {command()}"
    return f"{dialogues:,} dialogues are kept in {config.out}; to go on: {command()}"


def target_dtype(config: FeaturesConfig) -> str:
    """The dtype in which the target runs; with ``dtype: auto``, stores that were begun go on in the one they have."""
    if config.dtype == "auto" and (headers := begun(config)):
        return headers[0].target_dtype
    return dtype_here(config)


def make_headers(config: FeaturesConfig, chat: ChatTokenizer) -> dict[str, StoreManifest]:
    """Check the config against the files and the target's configuration; one manifest without counts per split.

    Raises:
        ValueError: a missing file, one file given for two splits, an exit layer the target does not have, a
            ``max_length`` above its context, or a tokenizer with more tokens than the target.
    """
    digests = {split: source_digest(source) for split, source in config.splits.items()}
    for (one, first), (other, second) in itertools.combinations(digests.items(), 2):
        if first == second:
            raise ValueError(f"splits {one!r} and {other!r} are the same data ({config.splits[one]}); give two files")
    model = load_config_only(config.target, config.revision)
    check_target(config, model, len(chat.tokenizer))
    fingerprint = load_frozen_ends(config.target, device="meta", revision=config.revision).fingerprint
    dtype = target_dtype(config)
    headers = {
        split: StoreManifest(
            target_name=config.target,
            target_revision=config.revision,
            target_fingerprint=fingerprint,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            target_dtype=dtype,
            taps=config.exit_layers,
            dtype=config.store_dtype or ("bfloat16" if config.dtype == "auto" else dtype),
            tokenizer_hash=tokenizer_hash(chat.tokenizer),
            template_hash=template_hash(chat.template),
            template_date=chat.date,
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
    for header in headers.values():
        header.answers = whose(header)
    return headers


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
    with torch.device("meta"):  # of families without a head, before the features are made for it
        KangarooAdapter(model) if config.exit_layers else EagleHead(model, layer=default_layer(model))
    resolve_device(config.device)


def report_finished(path: Path, header: StoreManifest) -> bool:
    """Whether the split's store is complete; says so in a line.

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
    """Tokens and masks of a split; prints what was dropped."""
    encoded = encode_split(config.splits[split], chat, config.max_length, config.limit)
    print(f"{split}: {config.splits[split]}: {encoded.counts.describe()}")
    work = Work(split, Path(config.out) / split, header, encoded)
    header.plan = ShardPlan.of(work.lengths, config.shard_tokens)
    return work


def check_batch_tokens(config: FeaturesConfig, work: list[Work]) -> None:
    """Raise ValueError where a forward of one dialogue would be larger than ``batch_tokens`` says."""
    longest = max(length for split in work for length in split.lengths)
    if longest > config.batch_tokens:
        raise ValueError(
            f"batch_tokens is {config.batch_tokens:,}, and the longest dialogue has {longest:,} tokens; set "
            f"batch_tokens={longest} or more, or max_length={max(config.batch_tokens, 2)} to cut dialogues there"
        )


def check_disk(config: FeaturesConfig, work: list[Work]) -> None:
    """Raise ValueError if the stores will not fit on the disk."""
    out = Path(config.out)
    needed = 1.02 * sum((split.encoded.tokens - split.written) * split.header.token_bytes for split in work)
    fix = "give an `out` on another disk, store_dtype int8, a `limit`, or fewer exit_layers"
    check_room(out, needed, f"out: {out}", fix)
    print(f"the features take {size_text(needed)}; {size_text(free_bytes(out))} are free at {existing_folder(out)}")


def write_store(
    target: Callable[[], TargetModel],
    work: Work,
    config: FeaturesConfig,
    rank: Rank,
    served: Callable[[], VLLM] | None = None,
) -> tuple[StoreManifest, Tokens]:
    """Run the target over this rank's shards of a split and write those that are not there yet.

    ``target``, or vLLM in its place (``served``), is called only if there are any. Returns the manifest, not
    ``complete`` while other ranks have shards to write, and what the target was given.

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
            name = f"{work.name} {rank.describe()}".strip()
            with Bar(desc=name, total=sum(sizes), unit="tok", unit_scale=True, disable=rank.index > 0) as progress:
                if served is not None:
                    served().write(work.path, work.header, missing, work.encoded, progress.update)
                    tokens.real = tokens.padded = sum(sizes)
                else:
                    _run_here(target(), work, writer, missing, config, tokens, progress.update)
        return writer.finish(counts.dropped, counts.changed), tokens


def _run_here(
    target: TargetModel,
    work: Work,
    writer: StoreWriter,
    missing: list[tuple[int, int, int]],
    config: FeaturesConfig,
    tokens: Tokens,
    progress: Callable[[int], object],
) -> None:
    """The target computes a shard while a thread writes the one before; counts ``tokens``."""
    buffers = Buffers(target, work.header, max(sum(work.lengths[first:last]) for _, first, last in missing))
    with Background() as background:

        def after_batch(real: int, padded: int) -> None:
            tokens.real += real
            tokens.padded += padded
            progress(real)
            background.check()

        for number, *span in missing:
            task = work.header, work.encoded, (span[0], span[1]), config.batch_tokens
            computed = run_shard(target, *task, buffers, after_batch)
            background.submit(functools.partial(_write, work.name, writer, number, computed, buffers))


def start_vllm(config: FeaturesConfig, work: list[Work], rank: Rank) -> VLLM:
    """vLLM for the target, with room for the longest dialogue and the one token that a request must ask for.

    Raises:
        ValueError: the target has no room for that token.
    """
    model = load_config_only(config.target, config.revision)
    longest = max(length for split in work for length in split.lengths) + 1
    context = getattr(model, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ValueError(
            f"a dialogue has {longest - 1} tokens and {config.target} was made for {context}; vLLM always makes a "
            f"token more: set max_length={context - 1}"
        )
    settings = {
        "model": config.target,
        "revision": config.revision,
        "dtype": work[0].header.target_dtype,
        "max_model_len": longest,
        "max_num_batched_tokens": config.batch_tokens,
        "layers": [*config.exit_layers, model.num_hidden_layers],
    }
    print(f"starting vLLM, which takes a minute or more (its log: {vllm_folder(config, rank) / 'vllm.log'})")
    return VLLM(config.vllm.python, settings | config.vllm.options, vllm_folder(config, rank))


def vllm_folder(config: FeaturesConfig, rank: Rank) -> Path:
    """What is handed over to vLLM, while it runs; shared like ``out``."""
    return Path(config.out) / f".vllm-{rank.index:05d}"


def check_answers(config: FeaturesConfig, headers: dict[str, StoreManifest]) -> None:
    """Raise ValueError where held-out answers would have to be written, which vLLM's process here does not do."""
    header = headers.get(HELDOUT)
    if header is not None and header.answers == "given" and config.heldout_answers == "own":
        raise ValueError(
            f"heldout_answers is own, and with engine vllm the target is not loaded here to write them: have a vLLM "
            f"server answer {config.splits[HELDOUT]} (python -m data_prep.regenerate with endpoint, "
            "docs/regeneration.md), give its output as splits.heldout and set heldout_answers=given"
        )


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
        f"{len(manifest.shards)} shards, {size_text(manifest.size)} of {manifest.dtype} (each token "
        f"{manifest.token_bytes:,} bytes); answers: {WORDS[manifest.answers]}; dropped: {dropped}{changed}"
    )
