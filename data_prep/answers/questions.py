"""Let the target write questions, for data_prep.magpie."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_prep.answers.finished import answers_of, begun_on, costs, finish, merging, report_finished, target_identity
from data_prep.answers.journal import AnsweredBatch, AnswerJournal, Turn, derived_seed, read_journals
from data_prep.answers.target import text_ends
from data_prep.common.disk import unfinished
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank
from data_prep.common.target import dtype_here, enough_memory, load_target
from data_prep.configs import MagpieConfig
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import DroppedError, same_question, unanswered_record
from drafters import generate_many, make_drafter
from drafters.base import Drafter
from drafters.model.target import TargetModel

# Keys that may change when a run is resumed, because the distribution of the questions does not depend on them.
FREE_ON_RESUME = {"out", "count", "minutes", "device", "device_map", "batch"}
KEPT_TOGETHER = 8  # draws per line of the journal
NOTHING_NEW, BATCHES = 200, 8  # draws and batches without a new question after which a run ends
HELP = "a higher temperature or max_new_tokens may give more; a model that was not tuned on questions writes none"
DONE = "share_done"  # end of a process's last turn, until it is started again with more to do


class Asked:
    """One process's questions: ``accepted`` of ``drawn`` ones; the last ``in_vain`` were all dropped.

    Args:
        mark: text after a question in the target's template. share: questions to keep.
        turns: turns in this process's journal. others: questions in other journals.
    """

    def __init__(
        self, chat: ChatTokenizer, mark: str, rank: Rank, share: int, turns: Sequence[Turn], others: Iterable[str] = ()
    ) -> None:
        self.chat, self.mark, self.rank, self.share = chat, mark, rank, share
        self.ends: frozenset[int] = frozenset()  # tokens that end a question
        questions = [turn.answer for turn in turns if turn.answer is not None]
        self.drawn, self.accepted, self.in_vain = sum(turn.end is None for turn in turns), len(questions), 0
        self.seen = {same_question(text) for text in (*questions, *others)}

    @property
    def done(self) -> bool:
        """Whether the share is complete."""
        return self.accepted >= self.share

    def open(self, target: TargetModel) -> None:
        """Before the first question: find the tokens that end one."""
        mark = self.chat.tokenizer(self.mark, add_special_tokens=False)["input_ids"]
        self.ends = text_ends(target, self.chat) | set(mark if len(mark) == 1 else ())

    def take(self, ids: list[int]) -> Turn:
        """The outcome of a drawn question with these token ids."""
        text, drop = self._question(ids)
        turn = Turn(self.drawn, 0, None if drop else text, len(ids), drop=drop)
        self.drawn, self.accepted = self.drawn + 1, self.accepted + (not drop)
        self.in_vain = self.in_vain + 1 if drop else 0
        return turn

    def _question(self, ids: list[int]) -> tuple[str, str | None]:
        """The question's text, and the reason for which it is dropped."""
        ended = ids[-1] in self.ends
        text = self.chat.tokenizer.decode(
            ids[:-1] if ended else ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if self.mark and self.mark in text:
            text, ended = text.partition(self.mark)[0], True
        text = text.strip()
        if not ended or not text:
            return text, "empty_question" if ended else "unended_question"
        try:
            self.chat.check_text([{"role": "user", "content": text}])
        except DroppedError as error:
            return text, error.reason
        if (same := same_question(text)) in self.seen:
            return text, "asked_before"
        self.seen.add(same)
        return text, None


def write_questions(config: MagpieConfig, rank: Rank) -> None:
    """Let the target write this process's share, and merge all shares if they are finished."""
    chat = load_tokenizer(config.target, config.revision, config.chat_template, begun_on(config.out))
    try:
        prompt, mark = chat.question_prompt(config.system)
    except DroppedError as error:
        raise ValueError(f"target {config.target} cannot write questions: {error}") from error
    identity = make_identity(config, chat)
    if report_finished(config.out, identity, describe):
        print(f"for more than count={config.count:,} questions, give another `out` or delete it")
        return
    with AnswerJournal(unfinished(config.out), identity, rank) as journal:
        if report_finished(config.out, identity, describe):  # another process finished it meanwhile
            return
        asked = look_back(config, chat, mark, rank, journal)
        if not asked.done:
            target = load_target(config.target, config, rank)
            asked.open(target)
            ask_all(config, target, prompt, asked, journal)
        journal.write(AnsweredBatch([Turn(asked.drawn, 0, end=DONE)]))
    merge(config, identity, rank)


def look_back(config: MagpieConfig, chat: ChatTokenizer, mark: str, rank: Rank, journal: AnswerJournal) -> Asked:
    """State after earlier starts of this process and of runs with another number of processes."""
    turns = [turn for batch in read_journals(journal.folder, journal.path.name) for turn in batch.turns]
    siblings = f"rank-*-of-{rank.count}.jsonl"
    every, theirs = answers_of(read_journals(journal.folder)), answers_of(read_journals(journal.folder, siblings))
    left = max(config.count - (len(every) - len(theirs)), 0)
    share = left // rank.count + (rank.index < left % rank.count)
    return Asked(chat, mark, rank, share, turns, every)


def ask_all(config: MagpieConfig, target: TargetModel, prompt: list[int], asked: Asked, journal: AnswerJournal) -> None:
    """Draw questions until there are enough, the time is over, or nothing new comes; write them to the journal."""
    limit = math.inf if config.minutes is None else 60 * config.minutes
    patience = max(NOTHING_NEW, BATCHES * config.batch)
    waiting: list[Turn] = []
    tokens = 0
    journal.start_clock()
    drafter = make_drafter("autoregressive", target)
    with (
        enough_memory("while questions were written", f"lower batch (now {config.batch})"),
        Bar(desc="asking", total=asked.share, initial=asked.accepted, unit=" questions") as progress,
    ):
        for ids in draw(config, target, drafter, prompt, asked):
            waiting.append(turn := asked.take(ids))
            tokens += turn.tokens
            progress.update(turn.answer is not None)
            if len(waiting) >= KEPT_TOGETHER or asked.done:
                journal.write(AnsweredBatch(waiting))
                waiting = []
                rate = tokens / max(progress.format_dict["elapsed"], 1e-9)
                progress.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                if asked.done or journal.seconds > limit:
                    return
                if asked.in_vain >= patience:
                    break
        print(
            f"no new question in {asked.in_vain} draws: the run ends with {asked.accepted:,} of {asked.share:,}; {HELP}"
        )


def draw(
    config: MagpieConfig, target: TargetModel, drafter: Drafter, prompt: list[int], asked: Asked
) -> Iterator[list[int]]:
    """Token ids of questions, without end. The seed depends on the number drawn before, so a resumed run differs."""
    outputs = generate_many(
        target,
        drafter,
        lambda: (None, prompt),
        batch=config.batch,
        longest=len(prompt),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        eos_token_id=sorted(asked.ends),
        seed=derived_seed(config.seed, [(asked.rank.index, asked.rank.count), (asked.drawn, 0)]),
    )
    return (one.tokens for one in outputs)


def make_identity(config: MagpieConfig, chat: ChatTokenizer) -> dict[str, Any]:
    """All settings on which the questions depend. One file never has questions of two identities."""
    values = {key: value for key, value in config.model_dump().items() if key not in FREE_ON_RESUME}
    return values | target_identity(config.target, config.revision, chat)


def merge(config: MagpieConfig, identity: dict[str, Any], rank: Rank) -> None:
    """Write the output if all shares are finished and no other process has; ValueError if no question is left."""
    with merging(config.out) as folder:
        if folder is None:
            return
        names = [f"rank-{index}-of-{rank.count}.jsonl" for index in range(rank.count)]
        latest = [[turn for one in read_journals(folder, name) for turn in one.turns][-1:] for name in names]
        if missing := sum(not turns or turns[0].end != DONE for turns in latest):
            print(f"this process's share is finished; those of {missing} other processes are not")
            return
        batches = read_journals(folder)  # also those of stopped runs with another number of processes
        distinct: dict[str, str] = {}
        for text in answers_of(batches):
            distinct.setdefault(same_question(text), text)
        questions = list(distinct.values())[: config.count]
        facts = summary(config, identity, batches, len(questions), len(distinct))
        if not questions:
            raise ValueError(f"{config.out}: no question is left: {describe(facts)}; {HELP}")
        finish(config.out, (unanswered_record(f"asked-{n}", text) for n, text in enumerate(questions)), facts)
    print(f"{config.out}: {describe(facts)}")


def summary(
    config: MagpieConfig, identity: dict[str, Any], batches: list[AnsweredBatch], questions: int, different: int
) -> dict[str, Any]:
    """Content of ``<out>.json``."""
    dropped = Counter(turn.drop for batch in batches for turn in batch.turns if turn.drop)
    dropped["asked_before"] += len(answers_of(batches)) - different
    dropped["more_than_count"] = different - questions
    return {
        "config": config.model_dump(mode="json"),
        "identity": identity,
        "dtype": dtype_here(config),
        "questions": questions,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        **costs(batches),
    }


def describe(facts: dict[str, Any]) -> str:
    """One line of a summary: questions kept and dropped, and speed."""
    lost = "".join(f", {reason} {count:,}" for reason, count in facts["dropped"].items())
    rate = f", {facts['tokens_per_second']:,.0f} tokens/s" if facts["tokens_per_second"] else ""
    count = facts["config"]["count"]
    wanted = f" of {count:,}" if facts["questions"] < count else ""
    return f"{facts['questions']:,}{wanted} questions, {facts['tokens']:,} tokens{lost}{rate}"
