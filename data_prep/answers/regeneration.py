"""Replace the answers of a ShareGPT file by the target's own, for data_prep.regenerate."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.answers.endpoint import NO_THINKING, EndpointAnswers
from data_prep.answers.finished import begun_on, costs, finish, merging, report_finished, target_identity
from data_prep.answers.journal import (
    ONLY_REASONING,
    AnsweredBatch,
    AnswerJournal,
    Conversation,
    Turn,
    read_journals,
    replay,
)
from data_prep.answers.target import TargetAnswers
from data_prep.common.disk import check_room, source_bytes, unfinished
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank
from data_prep.common.target import dtype_here, load_target
from data_prep.configs import FOR_A_TARGET, DrafterOptions, RegenerateConfig
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import ReadCounts, read_dialogues, record, source_digest
from drafters import drafter_class, make_drafter
from drafters.hub.checkpoint import drafter_type
from drafters.learned import LearnedDrafter
from drafters.model.files import load_config_only, resolve_device
from drafters.model.target import TargetModel

# Keys that may change when a run is resumed, because the distribution of the answers does not depend on them. (The
# digest of the source is compared instead of its name.)
FREE_ON_RESUME = {"source", "out", "minutes", "device", "device_map", "batch", "drafter", "endpoint"}


def regenerate(config: RegenerateConfig, rank: Rank, target: Callable[[], TargetModel] | None = None) -> None:
    """Answer this process's share, and merge all shares if they are finished; ``target`` gives a loaded target."""
    check(config)
    chat = None
    if config.target is not None:
        chat = load_tokenizer(config.target, config.revision, config.chat_template, begun_on(config.out))
    identity = make_identity(config, chat)
    if report_finished(config.out, identity, describe):
        return
    if config.limit is None:  # new answers are about as long as the old ones
        fix = "give an `out` on another disk"
        check_room(Path(config.out), source_bytes(config.source), f"out: {config.out}", fix)
    counts = ReadCounts()
    dialogues = itertools.islice(read_dialogues(config.source, counts, unanswered=True), config.limit)
    conversations = [Conversation(index, dialogue) for index, dialogue in enumerate(dialogues)]
    print(f"{config.source}: {counts.describe()}")
    folder = unfinished(config.out)
    with AnswerJournal(folder, identity, rank) as journal:
        if report_finished(config.out, identity, describe):  # another process finished it meanwhile
            return
        replay(conversations, read_journals(folder), retry=config.endpoint is not None)
        share = conversations[rank.index :: rank.count]
        if any(not conversation.done for conversation in share):
            answer_all(config, open_answers(config, chat, rank, target), share, journal)
    merge(config, identity, counts, conversations)


def check(config: RegenerateConfig) -> None:
    """Before the target is loaded, raise ValueError for an unusable drafter or settings that do not fit the target."""
    if config.drafter is not None:
        kind = drafter_class(config.drafter.drafter)
        if not kind.lossless:
            raise ValueError(
                f"drafter {config.drafter.drafter!r} is lossy, so the answers would not be the target's own; use a "
                "lossless one"
            )
        checkpoint = (config.drafter.model_extra or {}).get("checkpoint")
        if issubclass(kind, LearnedDrafter) and checkpoint is not None:
            drafter_type(checkpoint)  # raises the error
    if config.target is None:
        return
    resolve_device(config.device)
    longest = getattr(load_config_only(config.target, config.revision), "max_position_embeddings", None)
    for key, value in (("max_new_tokens", config.max_new_tokens + 1), ("max_context", config.max_context or 0)):
        if longest is not None and value > longest:
            raise ValueError(
                f"{key} is {getattr(config, key)}, but {config.target} was made for {longest} tokens, prompt included; "
                "lower it"
            )


def make_identity(config: RegenerateConfig, chat: ChatTokenizer | None) -> dict[str, Any]:
    """All settings on which the answers depend. One file never has answers of two identities."""
    values = {key: value for key, value in config.model_dump().items() if key not in FREE_ON_RESUME}
    values["source_digest"] = source_digest(config.source)
    # Journals number dialogues; the numbers depend on the reader's version and on whether unanswered dialogues count.
    values |= {"unanswered": True, "reader": 2}
    if chat is not None:
        assert config.target is not None
        values |= target_identity(config.target, config.revision, chat)
    if config.endpoint is not None:
        values = {key: value for key, value in values.items() if key not in FOR_A_TARGET}
        values |= {"endpoint.model": config.endpoint.model, "endpoint.extra": config.endpoint.extra}
    return values


def answer_all(
    config: RegenerateConfig,
    answers: TargetAnswers | EndpointAnswers,
    share: list[Conversation],
    journal: AnswerJournal,
) -> None:
    """Answer the rest of one process's share, and write it to the journal batch by batch."""
    by_index = {conversation.index: conversation for conversation in share}
    done = sum(conversation.done for conversation in share)
    limit = math.inf if config.minutes is None else 60 * config.minutes
    journal.start_clock()
    with Bar(desc="regenerating", total=len(share), initial=done, unit=" dialogues") as progress:
        tokens = 0
        for batch in answers.batches(share):
            journal.write(batch)
            for turn in batch.turns:
                by_index[turn.index].take(turn)
                tokens += turn.tokens
                progress.update(by_index[turn.index].done)
            elapsed = progress.format_dict["elapsed"]
            progress.set_postfix_str(f"{tokens / max(elapsed, 1e-9):,.0f} tokens/s", refresh=False)
            if journal.seconds > limit:
                left = [conversation for conversation in share if not conversation.done]
                journal.write(AnsweredBatch([Turn(one.index, len(one.answers), end="out_of_time") for one in left]))
                break


def open_answers(
    config: RegenerateConfig, chat: ChatTokenizer | None, rank: Rank, target: Callable[[], TargetModel] | None = None
) -> TargetAnswers | EndpointAnswers:
    """The loaded target with its drafter, or the endpoint after a test request; raises ValueError or OSError."""
    if config.endpoint is not None:
        endpoint = EndpointAnswers(config.endpoint, config)
        endpoint.check()
        return endpoint
    assert config.target is not None and chat is not None
    loaded = target() if target else load_target(config.target, config, rank)
    chosen = config.drafter or DrafterOptions(drafter="autoregressive")
    drafter = make_drafter(chosen.drafter, loaded, **chosen.model_extra or {})
    return TargetAnswers(loaded, drafter, chat, config, config.batch)


def merge(
    config: RegenerateConfig, identity: dict[str, Any], counts: ReadCounts, conversations: list[Conversation]
) -> None:
    """Write the output if all shares are finished and no other process has; ValueError if no dialogue is left."""
    with merging(config.out) as folder:
        if folder is None:
            return
        conversations = [Conversation(one.index, one.dialogue) for one in conversations]
        batches = read_journals(folder)
        replay(conversations, batches, retry=False)
        if missing := sum(not conversation.done for conversation in conversations):
            print(f"this process's share is finished; {missing:,} dialogues of other processes are not")
            return
        facts = summary(config, identity, counts, conversations, batches)
        results = [result for conversation in conversations if (result := conversation.result()) is not None]
        if not results:
            raise ValueError(f"{config.source}: no dialogue is left: {describe(facts)}")
        finish(config.out, map(record, results), facts)
    print(f"{config.out}: {describe(facts)}")


def summary(
    config: RegenerateConfig,
    identity: dict[str, Any],
    counts: ReadCounts,
    conversations: list[Conversation],
    batches: list[AnsweredBatch],
) -> dict[str, Any]:
    """Content of ``<out>.json``; ``tau`` is null for an endpoint."""
    answered = [one for one in conversations if not one.dropped]
    forwards = sum(batch.forwards for batch in batches)
    return {
        "config": config.model_dump(mode="json"),
        "identity": identity,
        **({"dtype": dtype_here(config)} if config.target else {}),
        "read": {"kept": len(conversations), "dropped": dict(counts.dropped), "changed": dict(counts.changed)},
        "kept": len(answered),
        "dropped": dict(Counter(one.dropped for one in conversations if one.dropped)),
        "ended_early": dict(Counter(one.ended for one in conversations if one.ended)),
        "answers": sum(len(one.answers) for one in answered),
        "truncated": sum(one.truncated for one in answered),
        "reasoned": sum(len(one.reasoning) - one.reasoning.count(None) for one in answered),
        "tau": round(sum(batch.committed for batch in batches) / forwards, 4) if forwards else None,
        **costs(batches),
    }


def describe(facts: dict[str, Any]) -> str:
    """One line of a summary: dialogues kept and dropped, and speed."""
    reasons = {**facts["dropped"], **{f"ended early: {reason}": n for reason, n in facts["ended_early"].items()}}
    lost = "".join(f", {reason} {count:,}" for reason, count in reasons.items())
    rate = f", {facts['tokens_per_second']:,.0f} tokens/s" if facts["tokens_per_second"] else ""
    tau = f", tau {facts['tau']:.2f}" if facts["tau"] else ""
    thought = facts.get("reasoned", 0)  # older sidecars have none
    thought += sum(facts[key].get(ONLY_REASONING, 0) for key in ("dropped", "ended_early"))
    off = NO_THINKING if facts["config"].get("endpoint") else "a chat_template whose prompts end with empty thoughts"
    thinking = f", {thought:,} with reasoning ({off} switches it off)" if thought else ""
    return (
        f"{facts['kept']:,} of {facts['read']['kept']:,} dialogues, {facts['answers']:,} answers, {facts['tokens']:,} "
        f"tokens, {facts['truncated']:,} answers cut at the limit{thinking}{lost}{rate}{tau}"
    )
