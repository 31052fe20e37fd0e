"""What data_prep.magpie does with its config."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.answers.finished import finish, is_finished, merging, report_finished, target_identity
from data_prep.answers.journal import AnsweredBatch, AnswerJournal, Turn, read_journals
from data_prep.answers.ownership import begun_on, unfinished
from data_prep.answers.target import enough_memory, text_ends
from data_prep.answers.writing import derived_seed
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank, dtype_here, load_target
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import DroppedError
from data_prep.magpie import FREE_ON_RESUME, MagpieConfig
from data_prep.split import same_question, unanswered_record
from drafters import generate_many, make_drafter
from drafters.base import Drafter
from drafters.cli.program import command
from drafters.common.provenance import git_commit, library_versions
from drafters.model.target import TargetModel

KEPT_TOGETHER = 8  # a line of the journal for at least so many questions
NOTHING_NEW = (
    200  # draws in a row, and at least so many batches' worth, after which the target is taken to have no others
)
BATCHES = 8
HELP = "a higher temperature or max_new_tokens may bring more; a model that was not tuned on questions asks none"
DONE = "share_done"  # a turn that ends so is the last of its process, for now


class Asked:
    """One process's questions: which are new, and whether there are enough.

    Args:
        mark: what follows a question in the target's template.
        rank: this process among those that share the work. share: questions that it is to ask.
        turns: those of its journal, of an earlier start.
        others: questions of other journals.

    Attributes:
        ends: tokens that end a question.
        kept, drawn: questions so far, without and with dropped ones. in_vain: the latest of them that were all dropped.
    """

    def __init__(
        self, chat: ChatTokenizer, mark: str, rank: Rank, share: int, turns: Sequence[Turn], others: Iterable[str] = ()
    ) -> None:
        self.chat, self.mark, self.rank, self.share = chat, mark, rank, share
        self.ends: frozenset[int] = frozenset()
        own = [turn.answer for turn in turns if turn.answer is not None]
        self.drawn, self.kept, self.in_vain = sum(turn.end is None for turn in turns), len(own), 0
        self.seen = {same_question(text) for text in (*own, *others)}

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask."""
        return self.kept >= self.share

    def open(self, target: TargetModel) -> None:
        """Before the first question: find out what ends one."""
        mark = self.chat.tokenizer(self.mark, add_special_tokens=False)["input_ids"]
        self.ends = text_ends(target, self.chat) | set(mark if len(mark) == 1 else ())

    def take(self, ids: list[int]) -> Turn:
        """What becomes of a question of these token ids."""
        turn = self._turn(self.drawn, ids)
        new = turn.answer is not None
        self.drawn, self.kept, self.in_vain = self.drawn + 1, self.kept + new, 0 if new else self.in_vain + 1
        return turn

    def _turn(self, number: int, ids: list[int]) -> Turn:
        ended = ids[-1] in self.ends
        text = self.chat.tokenizer.decode(
            ids[:-1] if ended else ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if self.mark and self.mark in text:
            text, ended = text.partition(self.mark)[0], True
        text = text.strip()
        if not ended:
            return Turn(number, 0, tokens=len(ids), drop="unended_question")
        if not text:
            return Turn(number, 0, tokens=len(ids), drop="empty_question")
        try:
            self.chat.check_text([{"role": "user", "content": text}])
        except DroppedError as error:
            return Turn(number, 0, tokens=len(ids), drop=error.reason)
        if (same := same_question(text)) in self.seen:
            return Turn(number, 0, tokens=len(ids), drop="asked_before")
        self.seen.add(same)
        return Turn(number, 0, text, len(ids))


def run(config: MagpieConfig, rank: Rank) -> None:
    """Let the target ask this process's share, and put all parts together if they are there."""
    chat = load_tokenizer(config.target, config.revision, config.chat_template, begun_on(config.out))
    try:
        prompt, mark = chat.question_prompt(config.system)
    except DroppedError as error:
        raise ValueError(f"target {config.target} cannot be let ask: {error}") from error
    identity = make_identity(config, chat)
    if report_finished(config.out, identity, describe):
        print(f"for more, with count={config.count:,} for instance, give another `out` or delete it")
        return
    with AnswerJournal(unfinished(config.out), identity, rank) as journal:
        if report_finished(config.out, identity, describe):  # by another process, meanwhile
            return
        asked = look_back(config, chat, mark, rank, journal)
        if not asked.done:
            target = load_target(config.target, config, rank)
            asked.open(target)
            ask_all(config, target, prompt, asked, journal)
        journal.write(AnsweredBatch([Turn(asked.drawn, 0, end=DONE)]))
    merge(config, identity, rank)


def look_back(config: MagpieConfig, chat: ChatTokenizer, mark: str, rank: Rank, journal: AnswerJournal) -> Asked:
    """What earlier starts have left, of this process and of those of another number: that work is not done again."""
    own = [turn for batch in read_journals(journal.folder, journal.path.name) for turn in batch.turns]
    siblings = f"rank-*-of-{rank.count}.jsonl"
    every, theirs = read_journals(journal.folder), read_journals(journal.folder, siblings)
    questions = [turn.answer for batch in every for turn in batch.turns if turn.answer is not None]
    of_now = sum(turn.answer is not None for batch in theirs for turn in batch.turns)
    left = max(config.count - (len(questions) - of_now), 0)
    share = left // rank.count + (rank.index < left % rank.count)
    return Asked(chat, mark, rank, share, own, questions)


def ask_all(config: MagpieConfig, target: TargetModel, prompt: list[int], asked: Asked, journal: AnswerJournal) -> None:
    """Ask until there are enough, the time is over, or nothing new comes; write questions down as they end."""
    limit = math.inf if config.minutes is None else 60 * config.minutes
    patience = max(NOTHING_NEW, BATCHES * config.batch)
    waiting: list[Turn] = []
    tokens = 0
    journal.start_clock()
    drafter = make_drafter("autoregressive", target)
    with (
        enough_memory(config.batch, "questions were asked"),
        Bar(desc="asking", total=asked.share, initial=asked.kept, unit=" questions") as progress,
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
        print(f"nothing new came in {asked.in_vain} draws, so it ends with {asked.kept:,} of {asked.share:,}; {HELP}")


def draw(
    config: MagpieConfig, target: TargetModel, drafter: Drafter, prompt: list[int], asked: Asked
) -> Iterator[list[int]]:
    """Questions' token ids without end. A start that goes on draws others than the one before it drew."""
    made = generate_many(
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
    return (one.tokens for one in made)


def make_identity(config: MagpieConfig, chat: ChatTokenizer) -> dict[str, Any]:
    """All that the questions depend on. Those of two identities never get into one file."""
    values = {key: value for key, value in config.model_dump().items() if key not in FREE_ON_RESUME}
    return values | target_identity(config.target, config.revision, chat)


def kept(config: MagpieConfig) -> str:
    """What a run that was interrupted leaves, and the command that goes on."""
    if is_finished(config.out):
        return f"{config.out} is whole"
    turns = [turn for batch in read_journals(unfinished(config.out)) for turn in batch.turns]
    count = sum(turn.answer is not None for turn in turns)
    if not count:
        return f"no question was written yet; to start again: {command()}"
    return f"{count:,} questions are kept in {unfinished(config.out)}; to go on: {command()}"


def merge(config: MagpieConfig, identity: dict[str, Any], rank: Rank) -> None:
    """Write the output if every process's share is done: the first to find that does it, and the others see it done.

    Raises:
        ValueError: no question is left.
    """
    with merging(config.out) as folder:
        if folder is None:
            return
        names = [f"rank-{index}-of-{rank.count}.jsonl" for index in range(rank.count)]
        latest = [[turn for one in read_journals(folder, name) for turn in one.turns][-1:] for name in names]
        if missing := sum(not turns or turns[0].end != DONE for turns in latest):
            print(f"this process's share is done; {missing} other processes' are not yet")
            return
        batches = read_journals(folder)  # with those of processes of another number, which were stopped
        found: dict[str, str] = {}
        for turn in (turn for batch in batches for turn in batch.turns if turn.answer is not None):
            found.setdefault(same_question(turn.answer or ""), turn.answer or "")
        questions = list(found.values())[: config.count]
        facts = summary(config, identity, batches, len(questions), len(found))
        if not questions:
            raise ValueError(f"{config.out}: no question is left: {describe(facts)}; {HELP}")
        finish(config.out, (unanswered_record(f"asked-{n}", text) for n, text in enumerate(questions)), facts)
    print(f"{config.out}: {describe(facts)}")


def summary(
    config: MagpieConfig, identity: dict[str, Any], batches: list[AnsweredBatch], questions: int, different: int
) -> dict[str, Any]:
    """What stands in ``<out>.json``; ``tokens_per_second`` is of one process."""
    turns = [turn for batch in batches for turn in batch.turns if turn.end is None]
    dropped = Counter(turn.drop for turn in turns if turn.drop)
    dropped["asked_before"] += sum(turn.answer is not None for turn in turns) - different
    dropped["more_than_count"] = different - questions
    tokens, seconds = sum(turn.tokens for turn in turns), sum(batch.seconds for batch in batches)
    return {
        "config": config.model_dump(mode="json"),
        "identity": identity,
        "dtype": dtype_here(config),
        "questions": questions,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "commit": git_commit(Path(__file__).parent),
        "versions": library_versions("torch", "transformers", "tokenizers"),
    }


def describe(facts: dict[str, Any]) -> str:
    """One line of a summary: what was kept, what was dropped, how fast it was."""
    lost = "".join(f", {reason} {count:,}" for reason, count in facts["dropped"].items())
    rate = f", {facts['tokens_per_second']:,.0f} tokens/s" if facts["tokens_per_second"] else ""
    count = facts["config"]["count"]
    wanted = f" of {count:,}" if facts["questions"] < count else ""
    return f"{facts['questions']:,}{wanted} questions, {facts['tokens']:,} tokens{lost}{rate}"
