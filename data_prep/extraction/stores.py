"""Write the feature stores of all splits, for data_prep.features."""

import contextlib
import functools
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data_prep.answers.finished import begun_on
from data_prep.answers.finished import resume_notice as answers_notice
from data_prep.answers.heldout import HELDOUT, answers_file, with_own_answers
from data_prep.common.disk import check_room, free_bytes
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank
from data_prep.common.target import dtype_here, load_target, say_dtype
from data_prep.configs import FeaturesConfig
from data_prep.dialogues.encoding import EncodedSplit, encode_split, load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.extraction.dump import IN_FLIGHT, Background, Computed, Tokens, empty_states, run_shard, without_states
from data_prep.extraction.headers import make_headers
from data_prep.extraction.process import VLLM
from data_prep.store.manifest import ANSWERS, MANIFEST, ShardPlan, StoreManifest, check_same, read_header, read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.sizes import size_table
from data_prep.store.writer import StoreWriter
from drafters.cli.program import command
from drafters.common.files import existing_folder
from drafters.common.states import to_inputs
from drafters.common.wording import size_text
from drafters.model.ends import load_norm
from drafters.model.files import load_config_only
from drafters.model.target import TargetModel


@dataclass
class Work:
    """One split whose store is not finished."""

    name: str
    path: Path
    header: StoreManifest
    encoded: EncodedSplit

    @property
    def written(self) -> int:
        """Tokens that are stored already, by an interrupted run or by other ranks."""
        return read_manifest(self.path).tokens if (self.path / MANIFEST).is_file() else 0


def make_stores(config: FeaturesConfig, rank: Rank) -> None:
    """Make the stores, or this rank's share of them, except finished ones."""
    chat = load_tokenizer(config.target, config.revision, config.chat_template, start_date(config))
    settings = config.model_copy(update={"dtype": target_dtype(config)})
    headers = make_headers(config, chat, settings.dtype, config.store_dtype, download=True)
    target = functools.cache(lambda: load_target(config.target, settings, rank, capture_only=True))
    with contextlib.redirect_stdout(None if rank.index else sys.stdout):  # the first rank prints for all
        say_dtype(config.target, config.dtype, settings.dtype, rank)
        if lacks_answers(config, headers):
            config = with_own_answers(config, headers, target)
        missing = [split for split in headers if not report_finished(Path(config.out) / split, headers[split])]
        work = [encode(config, chat, split, headers[split]) for split in missing]
        if not work:
            return
        check_size(config, work)

    with contextlib.ExitStack() as stack:
        start = functools.cache(lambda: stack.enter_context(start_vllm(config, work, rank)))
        served = start if config.engine == "vllm" else None
        for split in work:
            report_written(split, rank, *write_store(target, split, config, rank, served))


def dry_run(config: FeaturesConfig) -> None:
    """Print the sizes of the stores that ``make_stores`` would write, without loading weights or writing a file.

    Held-out answers that the target has yet to write are counted as the data file gives them.

    Raises:
        ValueError: as ``make_stores`` would raise before the target's pass, also if the disk is too small.
    """
    chat = load_tokenizer(config.target, config.revision, config.chat_template, start_date(config))
    headers = make_headers(config, chat, target_dtype(config), config.store_dtype)
    unanswered = [HELDOUT] if lacks_answers(config, headers) else []
    work = []
    for split, header in headers.items():
        if split in unanswered:
            count = min(config.heldout_dialogues, config.limit or config.heldout_dialogues)
            print(f"{split}: sized by the file's answers, which the target's own will replace")
            work.append(encode(config.model_copy(update={"limit": count}), chat, split, header))
        elif not report_finished(Path(config.out) / split, header):
            work.append(encode(config, chat, split, header))
    if work:
        check_size(config, work)


def lacks_answers(config: FeaturesConfig, headers: dict[str, StoreManifest]) -> bool:
    """True if the target has to write held-out answers first; raises ValueError if vLLM would have to."""
    if HELDOUT not in headers or headers[HELDOUT].answers != "given" or config.heldout_answers == "given":
        return False
    if config.engine == "vllm":
        raise ValueError(
            "heldout_answers is own, but with engine vllm this process does not load the target to write them: "
            f"have a vLLM server answer {config.splits[HELDOUT]} (python -m data_prep.regenerate with endpoint, "
            "docs/regeneration.md), give its output as splits.heldout and set heldout_answers=given"
        )
    return True


def begun(config: FeaturesConfig) -> list[StoreManifest]:
    """The settings in the manifests of existing stores."""
    stores = [Path(config.out) / split for split in config.splits]
    return [read_header(store) for store in stores if (store / MANIFEST).is_file()]


def start_date(config: FeaturesConfig) -> str | None:
    """The earliest date (YYYY-MM-DD) in the prompts of existing stores, else of their answers; None without a date.

    With it, a template that prints today's date prints the same date in a resumed run.
    """
    dates = [header.template_date for header in begun(config)]
    if not any(dates):
        dates = [begun_on(file) for file in (answers_file(config), *config.splits.values())]
    return min(filter(None, dates), default=None)


def target_dtype(config: FeaturesConfig) -> str:
    """The dtype in which the target runs; with ``dtype: auto``, that of existing stores."""
    if config.dtype == "auto" and (headers := begun(config)):
        return headers[0].target_dtype
    return dtype_here(config)


def resume_notice(config: FeaturesConfig) -> str:
    """Last line of an interrupted run: what is kept, and the command that continues."""
    stores = [Path(config.out) / split for split in config.splits]
    dialogues = sum(read_manifest(store).consumed for store in stores if (store / MANIFEST).is_file())
    if not dialogues:
        return answers_notice(answers_file(config), "held-out answer")
    return f"{dialogues:,} dialogues are kept in {config.out}; to go on: {command()}"


def report_finished(path: Path, header: StoreManifest) -> bool:
    """Whether the store is complete; if so, print a line. ValueError if it has other settings or is damaged."""
    if not (path / MANIFEST).is_file():
        return False
    manifest = read_manifest(path)
    check_same(path, manifest, header)
    if manifest.complete:
        FeatureStore.open(path)  # checks the files' sizes
        print(f"{path} is finished already: {describe(manifest)}")
    return manifest.complete


def verify_stores(config: FeaturesConfig) -> None:
    """Compare the checksums of all stores; ValueError lists those that are missing, half written or damaged."""
    problems = []
    for split in config.splits:
        try:
            store = FeatureStore.open(Path(config.out) / split)
            store.verify()
        except ValueError as error:  # after the other splits
            problems.append(str(error))
        else:
            print(f"{store.path} is as it was written: {describe(store.manifest)}")
    if problems:
        raise ValueError("\n".join(problems))


def encode(config: FeaturesConfig, chat: ChatTokenizer, split: str, header: StoreManifest) -> Work:
    """Tokens and masks of a split; prints the counts."""
    encoded = encode_split(config.splits[split], chat, config.max_length, config.limit)
    print(f"{split}: {config.splits[split]}: {encoded.counts.describe()}")
    header.plan = ShardPlan.of(encoded.lengths, config.shard_tokens)
    return Work(split, Path(config.out) / split, header, encoded)


def check_size(config: FeaturesConfig, work: list[Work]) -> None:
    """Print the sizes; raise ValueError if a dialogue exceeds ``batch_tokens`` or the stores exceed the disk."""
    longest = max(length for split in work for length in split.encoded.lengths)
    if longest > config.batch_tokens:
        raise ValueError(
            f"batch_tokens is {config.batch_tokens:,}, and the longest dialogue has {longest:,} tokens; set "
            f"batch_tokens={longest} or more, or max_length={max(config.batch_tokens, 2)} to cut dialogues there"
        )
    out = Path(config.out)
    print(size_table(work[0].header, sum(split.encoded.tokens for split in work)))
    needed = 1.02 * sum((split.encoded.tokens - split.written) * split.header.token_bytes for split in work)
    fix = "give an `out` on another disk, store_dtype int8, a `limit`, or fewer methods or exit_layers"
    check_room(out, needed, f"out: {out}", fix)
    print(f"the features take {size_text(needed)}; {size_text(free_bytes(out))} are free at {existing_folder(out)}")


def write_store(
    target: Callable[[], TargetModel],
    work: Work,
    config: FeaturesConfig,
    rank: Rank,
    served: Callable[[], VLLM] | None = None,
) -> tuple[StoreManifest, Tokens]:
    """Write this rank's missing shards of a split; raises ValueError and OSError as ``StoreWriter`` and ``run_shard``.

    ``served`` (vLLM) or else ``target`` is called only if shards are missing. Returns the manifest, which is not
    ``complete`` while other ranks have shards to write, and the tokens on which the target ran.
    """
    tokens, counts = Tokens(), work.encoded.counts
    with StoreWriter(work.path, work.header, rank) as writer:
        report_found(work, writer, config)
        lengths = work.encoded.lengths
        sizes = {span: sum(lengths[slice(*span[1:])]) for span in writer.missing(lengths)}
        if sizes:
            name = f"{work.name} {rank.describe()}".strip()
            size = sum(sizes.values())
            with Bar(desc=name, total=size, unit="tok", unit_scale=True, disable=rank.index > 0) as progress:
                if served is not None:
                    served().write(work.path, work.header, list(sizes), work.encoded, progress.update)
                    tokens.real = tokens.padded = size
                else:
                    run_here(target(), work, writer, sizes, config.batch_tokens, tokens, progress)
        return writer.finish(counts.dropped, counts.changed), tokens


def run_here(
    target: TargetModel,
    work: Work,
    writer: StoreWriter,
    sizes: dict[tuple[int, int, int], int],
    batch_tokens: int,
    tokens: Tokens,
    progress: Bar,
) -> None:
    """Compute each shard while a thread writes the shard before it; adds to ``tokens``."""
    buffers: queue.SimpleQueue[dict[str, torch.Tensor]] = queue.SimpleQueue()
    for _ in range(min(IN_FLIGHT + 1, len(sizes))):
        buffers.put(empty_states(work.header, max(sizes.values()), target.device.type == "cuda"))
    with Background() as background:

        def after_batch(real: int, padded: int) -> None:
            tokens.real += real
            tokens.padded += padded
            progress.update(real)
            background.check()

        for number, *span in sizes:
            shard = without_states(work.encoded, *span)
            computed = run_shard(target, work.header, shard, batch_tokens, buffers.get(), after_batch)
            background.submit(functools.partial(_write, work.name, writer, number, computed, buffers))


def _write(name: str, writer: StoreWriter, number: int, computed: Computed, buffers: "queue.SimpleQueue[Any]") -> None:
    try:
        for lost in writer.write(computed.wait(), number):
            tqdm.write(f"warning: {name}: left out, NaN or infinite: dialogue {lost}", file=sys.stderr)
    finally:
        buffers.put(computed.buffer)


def start_vllm(config: FeaturesConfig, work: list[Work], rank: Rank) -> VLLM:
    """vLLM with room for the longest dialogue and the token that a request must generate; ValueError if too long."""
    model = load_config_only(config.target, config.revision)
    load_norm(config.target, revision=config.revision)  # vLLM's worker reads it; what it cannot read is said now
    longest = max(length for split in work for length in split.encoded.lengths) + 1
    context = getattr(model, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ValueError(
            f"a dialogue has {longest - 1} tokens and {config.target} was made for {context}, but vLLM always "
            f"generates one token: set max_length={context - 1}"
        )
    settings = {
        "model": config.target,
        "revision": config.revision,
        "dtype": work[0].header.target_dtype,
        "max_model_len": longest,
        "max_num_batched_tokens": config.batch_tokens,
        "layers": to_inputs([*work[0].header.taps, model.num_hidden_layers]),
    }
    folder = Path(config.out) / f".vllm-{rank.index:05d}"
    print(f"starting vLLM, which takes a minute or more (its log: {folder / 'vllm.log'})")
    return VLLM(config.vllm.python, settings | config.vllm.options, folder)


def report_found(work: Work, writer: StoreWriter, config: FeaturesConfig) -> None:
    """Print what an earlier run left in the store's folder, if the user should know."""
    if not writer.manifest.complete and (shards := len(writer.manifest.shards)):
        print(f"{work.path}: continuing after {shards} shards")
    for problem in writer.damaged:
        print(f"{problem}; that shard is made again")
    plan = writer.manifest.plan
    if plan is not None and plan.shard_tokens != config.shard_tokens and not writer.manifest.complete:
        print(f"{work.path}: begun with shard_tokens={plan.shard_tokens}, and continues with that")


def report_written(split: Work, rank: Rank, manifest: StoreManifest, tokens: Tokens) -> None:
    """Print the state of a split's store after this rank's work."""
    if tokens.real:
        print(f"{split.name}: {tokens.padding:.1%} of the tokens on which the target ran were padding")
    if manifest.complete:
        print(f"{split.name}: {describe(manifest)} -> {split.path}")
    else:
        print(
            f"{split.name}: {rank.describe()} has written its share; the store has {manifest.consumed:,} of "
            f"{len(split.encoded.ids):,} dialogues. The last rank to finish completes it; if no rank is running any "
            "more, run the same command again, with any number of ranks"
        )


def describe(manifest: StoreManifest) -> str:
    """One line: dialogues, tokens, size, and drops."""
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in manifest.dropped.items()) or "none"
    changed = "".join(f", {reason} {count:,}" for reason, count in manifest.changed.items())
    share = manifest.response_tokens / max(manifest.tokens, 1)
    return (
        f"{manifest.dialogues:,} dialogues, {manifest.tokens:,} tokens ({share:.0%} of them the assistant's), "
        f"{len(manifest.shards)} shards, {size_text(manifest.size)} of {manifest.dtype} (each token "
        f"{manifest.token_bytes:,} bytes); answers: {ANSWERS[manifest.answers]}; dropped: {dropped}{changed}"
    )
