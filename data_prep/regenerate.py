"""A ShareGPT file whose answers are replaced by the target's own: what a drafter should learn from.

    python -m data_prep.regenerate --config configs/regenerate/stdlib.yaml [--rank 0 --ranks 2] [key=value ...]

Turn by turn: every user turn is answered after the system message, the earlier user turns and the new answers to them.
The target runs here, accelerated by any lossless drafter, or behind an OpenAI-compatible endpoint. A run that was
killed goes on when it is started again, and lost no more than the batch under way. Several processes share the work:
start the same command once for each --rank, or under torchrun, deepspeed or srun; the last one to finish puts the parts
together. A finished run leaves ``<out>`` and, with its settings and counts, ``<out>.json``.
"""

import argparse
import dataclasses
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from tqdm import tqdm

from drafters import Sampling, TargetModel, drafter_class, make_drafter
from drafters.base import LearnedDrafter
from drafters.checkpoint import drafter_type
from drafters.config import Config, load_config
from drafters.decoding.frozen import load_frozen_ends
from drafters.decoding.model_files import load_config_only, resolve_device
from drafters.program import run_program
from drafters.provenance import git_commit, library_versions, replace_text

from .answer_journal import Batch, Conversation, Journal, check_identity, read_journals, replay
from .dialogues import ReadCounts, check_source, read_dialogues, source_digest
from .encoding import load_tokenizer, template_hash, tokenizer_hash
from .endpoint_answers import EndpointAnswers, EndpointConfig
from .loss_mask import ChatTokenizer
from .ranks import Rank, add_rank_arguments, find_rank
from .split import record
from .store_lock import folder_lock
from .target_answers import TargetAnswers, Writing

# A run may go on with other values of these: they decide how fast it is, and not which distribution is drawn from. (Of
# the source, its digest counts.)
FREE_ON_RESUME = {"source", "out", "device", "device_map", "batch", "drafter", "endpoint"}
OF_A_TARGET = {"revision", "dtype", "device", "device_map", "chat_template", "drafter", "batch", "max_context"}


class DrafterOptions(Config):
    """A drafter as in configs/speed: its method's name, and whatever options that has."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str

    def check(self) -> None:
        """Find out before the target is loaded what can be found out.

        Raises:
            ValueError: no such method, a lossy one, or no such checkpoint.
        """
        kind = drafter_class(self.drafter)
        if not kind.lossless:
            raise ValueError(
                f"drafter {self.drafter!r} is lossy, so the answers would not be the target's own; use a lossless one"
            )
        checkpoint = (self.model_extra or {}).get("checkpoint")
        if issubclass(kind, LearnedDrafter) and checkpoint is not None:
            drafter_type(checkpoint)


class RegenerateConfig(Config):
    """Schema of ``configs/regenerate/*.yaml``. Give ``target`` or ``endpoint``."""

    source: str  # ShareGPT file or Hub dataset
    out: str  # JSONL file in ShareGPT form
    target: str | None = None  # folder or Hub repository of the target
    endpoint: EndpointConfig | None = None  # in place of a target: an OpenAI-compatible server
    max_new_tokens: int = Field(1024, ge=1)  # of one answer
    truncated: Literal["keep", "drop"] = "keep"  # answers cut there; drop: the dialogue ends before such an answer
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = Field(None, ge=1)  # dialogues, the first ones; default: all
    # The rest is for a target.
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str | None = None  # default: cuda if there is one (under a launcher the process's own), else cpu
    device_map: str | dict[str, int | str] | None = None  # in place of device: layers over several GPUs, e.g. auto
    chat_template: str | None = None  # file with a Jinja template, used in place of the tokenizer's own
    drafter: DrafterOptions | None = None  # for example {drafter: eagle, checkpoint: ..., tree: chain}; default: none
    batch: int = Field(8, ge=1)  # dialogues at once; less where the drafter decodes fewer
    max_context: int | None = Field(None, ge=2)  # tokens of prompt and answer; default: what the target was made for

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.target is None) == (self.endpoint is None):
            raise ValueError("give either target (a model to run here) or endpoint (a server), and not both")
        useless = sorted(OF_A_TARGET & self.model_fields_set) if self.endpoint else []
        if useless:
            raise ValueError(f"{', '.join(useless)}: only for a target that runs here, not for an endpoint")
        if self.max_context is not None and self.max_new_tokens >= self.max_context:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and max_context {self.max_context}, which leaves no room for "
                "a prompt; lower max_new_tokens"
            )
        Sampling(self.temperature, self.top_k, self.top_p)
        return self


def main(arguments: list[str] | None = None) -> None:
    """Regenerate the answers of a config's source."""
    config, rank = _parse(arguments)
    check_files(config)
    chat = None
    if config.target is not None:
        chat = load_tokenizer(config.target, config.revision, config.chat_template)
    identity = make_identity(config, chat)
    if report_finished(config, identity):
        return
    counts = ReadCounts()
    dialogues = itertools.islice(read_dialogues(config.source, counts), config.limit)
    conversations = [Conversation(index, dialogue) for index, dialogue in enumerate(dialogues)]
    print(f"{config.source}: {counts.describe()}")
    folder = unfinished(config)
    with Journal(folder, identity, rank.index, rank.count) as journal:
        if report_finished(config, identity):  # by another process, meanwhile
            return
        replay(conversations, read_journals(folder), retry=config.endpoint is not None)
        own = conversations[rank.index :: rank.count]
        if any(not conversation.done for conversation in own):
            answer_all(config, chat, own, journal, rank)
    merge(config, identity, counts, conversations)


def check_files(config: RegenerateConfig) -> None:
    """Raise ValueError where a file is missing or in the way, or the config does not fit the target."""
    check_source(config.source)
    out = Path(config.out)
    if out.is_dir() or (out.exists() and out.samefile(config.source)):
        raise ValueError(f"out: {out} is {'a folder' if out.is_dir() else 'the source'}; give another file")
    if out.exists() and not sidecar(config).exists() and not unfinished(config).exists():
        raise ValueError(f"out: {out} exists and was not written by this program; give another file or delete it")
    if config.drafter is not None:
        config.drafter.check()
    if config.endpoint is not None:
        config.endpoint.check()
    if config.target is None:
        return
    resolve_device(config.device)
    longest = getattr(load_config_only(config.target, config.revision), "max_position_embeddings", None)
    if longest is None:
        return
    for key, value in (("max_new_tokens", config.max_new_tokens + 1), ("max_context", config.max_context or 0)):
        if value > longest:
            raise ValueError(
                f"{key} is {getattr(config, key)}, but {config.target} was made for {longest} tokens, prompt included; "
                "lower it"
            )


def make_identity(config: RegenerateConfig, chat: ChatTokenizer | None) -> dict[str, Any]:
    """All that the answers depend on. Answers of two identities never get into one file."""
    values = {key: value for key, value in config.model_dump().items() if key not in FREE_ON_RESUME}
    values["source_digest"] = source_digest(config.source)
    if chat is not None:
        assert config.target is not None
        ends = load_frozen_ends(config.target, device="meta", revision=config.revision)
        values["target_fingerprint"] = ends.fingerprint
        values["tokenizer_hash"] = tokenizer_hash(chat.tokenizer)
        values["chat_template"] = template_hash(chat.template)
    if config.endpoint is not None:
        values = {key: value for key, value in values.items() if key not in OF_A_TARGET}
        values |= {"endpoint.model": config.endpoint.model, "endpoint.extra": config.endpoint.extra}
    return values


def sidecar(config: RegenerateConfig) -> Path:
    """``<out>.json``: it exists once the output is whole."""
    return Path(f"{config.out}.json")


def unfinished(config: RegenerateConfig) -> Path:
    """The folder of the journals."""
    return Path(f"{config.out}.unfinished")


def is_finished(config: RegenerateConfig) -> bool:
    """Whether the output is whole."""
    return sidecar(config).is_file() and Path(config.out).is_file()


def report_finished(config: RegenerateConfig, identity: dict[str, Any]) -> bool:
    """True, with one line printed, if the output is there.

    Raises:
        ValueError: it was made with other settings.
    """
    if not is_finished(config):
        return False
    try:
        facts = json.loads(sidecar(config).read_text())
        before = facts["identity"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{sidecar(config)} is not what this program writes; give another `out`, or move it") from None
    check_identity(Path(config.out), before, identity)
    print(f"{config.out} is finished already: {describe(facts)}")
    return True


def answer_all(
    config: RegenerateConfig, chat: ChatTokenizer | None, own: list[Conversation], journal: Journal, rank: Rank
) -> None:
    """Answer what is open of one process's share, and write it down batch by batch."""
    answers = open_answers(config, chat, rank)
    by_index = {conversation.index: conversation for conversation in own}
    done = sum(conversation.done for conversation in own)
    with tqdm(desc="regenerating", total=len(own), initial=done, unit=" dialogues", mininterval=1.0) as progress:
        tokens = 0
        for batch in answers.batches(own):
            journal.write(batch)
            for turn in batch.turns:
                by_index[turn.index].take(turn)
                tokens += turn.tokens
                progress.update(by_index[turn.index].done)
            elapsed = progress.format_dict["elapsed"]
            progress.set_postfix_str(f"{tokens / max(elapsed, 1e-9):,.0f} tokens/s", refresh=False)


def open_answers(config: RegenerateConfig, chat: ChatTokenizer | None, rank: Rank) -> TargetAnswers | EndpointAnswers:
    """The target with its drafter, loaded; or the endpoint, found to answer.

    Raises:
        ValueError: they cannot be had, or do not fit together.
    """
    writing = Writing(
        config.max_new_tokens,
        config.max_context or 0,
        config.truncated == "keep",
        config.temperature,
        config.top_k,
        config.top_p,
        config.seed,
    )
    if config.endpoint is not None:
        endpoint = EndpointAnswers(config.endpoint, writing)
        endpoint.check()
        return endpoint
    assert config.target is not None and chat is not None
    device = rank.target_device(config.device, config.device_map)
    where = config.target, config.dtype, device, config.revision
    target = TargetModel.from_pretrained(*where, device_map=config.device_map)
    options = dict(config.drafter.model_extra or {}) if config.drafter else {}
    drafter = make_drafter(config.drafter.drafter if config.drafter else "autoregressive", target, **options)
    if not config.max_context:
        writing = dataclasses.replace(writing, max_context=target.max_context)
    return TargetAnswers(target, drafter, chat, writing, config.batch)


def merge(
    config: RegenerateConfig, identity: dict[str, Any], counts: ReadCounts, conversations: list[Conversation]
) -> None:
    """Write the output if every process's share is done; whoever finds that first does it, the others see it done.

    Raises:
        ValueError: no dialogue is left.
    """
    folder = unfinished(config)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        if is_finished(config):
            shutil.rmtree(folder, ignore_errors=True)
            return
        conversations = [Conversation(one.index, one.dialogue) for one in conversations]
        batches = read_journals(folder)
        replay(conversations, batches, retry=False)
        missing = sum(not conversation.done for conversation in conversations)
        if missing:
            print(f"this process's share is done; {missing:,} dialogues of other processes are not yet")
            return
        facts = summary(config, identity, counts, conversations, batches)
        results = [result for conversation in conversations if (result := conversation.result()) is not None]
        if not results:
            raise ValueError(f"{config.source}: no dialogue is left: {describe(facts)}")
        sidecar(config).unlink(missing_ok=True)  # of an output that was deleted; it would vouch for this one
        replace_text(Path(config.out), "".join(json.dumps(record(result)) + "\n" for result in results))
        replace_text(sidecar(config), json.dumps(facts, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{config.out}: {describe(facts)}")


def summary(
    config: RegenerateConfig,
    identity: dict[str, Any],
    counts: ReadCounts,
    conversations: list[Conversation],
    batches: list[Batch],
) -> dict[str, Any]:
    """What stands in ``<out>.json``.

    ``tokens_per_second`` is of one process: all tokens over the seconds that the processes spent together. ``tau`` is
    null for an endpoint.
    """
    dropped = Counter(one.dropped for one in conversations if one.dropped)
    ended = Counter(one.ended for one in conversations if one.ended)
    tokens = sum(turn.tokens for batch in batches for turn in batch.turns)
    seconds, forwards = sum(batch.seconds for batch in batches), sum(batch.forwards for batch in batches)
    return {
        "config": config.model_dump(mode="json"),
        "identity": identity,
        "read": {"kept": len(conversations), "dropped": dict(counts.dropped), "changed": dict(counts.changed)},
        "kept": sum(one.dropped is None for one in conversations),
        "dropped": dict(dropped),
        "ended_early": dict(ended),
        "answers": sum(len(one.answers) for one in conversations if not one.dropped),
        "truncated": sum(one.truncated for one in conversations if not one.dropped),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "tau": round(sum(batch.committed for batch in batches) / forwards, 4) if forwards else None,
        "commit": git_commit(Path(__file__).parent),
        "versions": library_versions("torch", "transformers", "tokenizers"),
    }


def describe(facts: dict[str, Any]) -> str:
    """One line of a summary: what was kept, what was dropped, how fast it was."""
    reasons = {**facts["dropped"], **{f"ended early: {reason}": n for reason, n in facts["ended_early"].items()}}
    lost = "".join(f", {reason} {count:,}" for reason, count in reasons.items())
    rate = f", {facts['tokens_per_second']:,.0f} tokens/s" if facts["tokens_per_second"] else ""
    tau = f", tau {facts['tau']:.2f}" if facts["tau"] else ""
    return (
        f"{facts['kept']:,} of {facts['read']['kept']:,} dialogues, {facts['answers']:,} answers, {facts['tokens']:,} "
        f"tokens, {facts['truncated']:,} answers cut at the limit{lost}{rate}{tau}"
    )


def _parse(arguments: list[str] | None) -> tuple[RegenerateConfig, Rank]:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.regenerate", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/regenerate/")
    add_rank_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example limit=1000 batch=32")
    parsed = parser.parse_args(arguments)
    rank = find_rank(parsed.rank, parsed.ranks)
    return load_config(RegenerateConfig, parsed.config, parsed.overrides), rank


if __name__ == "__main__":
    run_program(main)
