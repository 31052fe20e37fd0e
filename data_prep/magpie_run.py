"""What data_prep.magpie does with its config."""

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters import generate_many, make_drafter
from drafters.base import Drafter
from drafters.model.target import TargetModel
from drafters.program import command
from drafters.provenance import git_commit, library_versions

from .answers.finished import finish, is_finished, report_finished, target_identity
from .answers.journal import AnsweredBatch, AnswerJournal, Turn, read_journals
from .answers.ownership import unfinished
from .answers.target import turn_ends
from .answers.writing import derived_seed
from .dialogues.encoding import load_tokenizer
from .dialogues.loss_mask import ChatTokenizer
from .dialogues.reader import DroppedError
from .magpie import FREE_ON_RESUME, MagpieConfig
from .progress import Bar
from .ranks import Rank, load_target
from .split import same_question, unanswered_record
from .store.lock import folder_lock

KEPT_TOGETHER = 8  # a line of the journal for at least so many questions
DONE = "share_done"  # a turn that ends so is the last of its process


class Asked:
    """One process's questions: which are new, and whether there are enough.

    Args:
        mark: what follows a question in the target's template.
        rank: this process's number. share: questions that it is to ask.
        turns: those of its journal, of an earlier start.

    Attributes:
        ends: tokens that end a question.
        drawn: questions so far, dropped ones with them.
    """

    def __init__(self, chat: ChatTokenizer, mark: str, rank: int, share: int, turns: list[Turn]) -> None:
        self.chat, self.mark, self.rank, self.share = chat, mark, rank, share
        self.ends: frozenset[int] = frozenset()
        self.drawn = len(turns)
        self.seen = {same_question(turn.answer) for turn in turns if turn.answer is not None}
        self.closed = any(turn.end == DONE for turn in turns)

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask."""
        return self.closed or len(self.seen) >= self.share

    def open(self, target: TargetModel) -> None:
        """Before the first question: find out what ends one."""
        mark = self.chat.tokenizer(self.mark, add_special_tokens=False)["input_ids"]
        self.ends = turn_ends(target, self.chat) | set(mark if len(mark) == 1 else ())

    def take(self, ids: list[int]) -> Turn:
        """What becomes of a question of these token ids."""
        number, self.drawn = self.drawn, self.drawn + 1
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
    chat = load_tokenizer(config.target, config.revision, config.chat_template)
    try:
        prompt, mark = chat.question_prompt(config.system)
    except DroppedError as error:
        raise ValueError(f"target {config.target} cannot be let ask: {error}") from error
    identity = make_identity(config, chat)
    if report_finished(config.out, identity, describe):
        return
    share = config.count // rank.count + (rank.index < config.count % rank.count)
    with AnswerJournal(unfinished(config.out), identity, rank) as journal:
        if report_finished(config.out, identity, describe):  # by another process, meanwhile
            return
        before = [turn for batch in read_journals(journal.folder, journal.path.name) for turn in batch.turns]
        asked = Asked(chat, mark, rank.index, share, before)
        if not asked.done:
            target = load_target(config.target, config, rank)
            asked.open(target)
            ask_all(config, target, prompt, asked, journal)
        journal.write(AnsweredBatch([Turn(asked.drawn, 0, end=DONE)]))
    merge(config, identity, rank)


def ask_all(config: MagpieConfig, target: TargetModel, prompt: list[int], asked: Asked, journal: AnswerJournal) -> None:
    """Ask until there are enough, or the time is over, and write questions down as they end."""
    limit = math.inf if config.minutes is None else 60 * config.minutes
    waiting: list[Turn] = []
    tokens = 0
    with Bar(desc="asking", total=asked.share, initial=len(asked.seen), unit=" questions") as progress:
        for ids in draw(config, target, make_drafter("autoregressive", target), prompt, asked):
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
        seed=derived_seed(config.seed, [(asked.rank, asked.drawn)]),
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
    folder = unfinished(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        if is_finished(config.out):
            shutil.rmtree(folder, ignore_errors=True)
            return
        names = [f"rank-{index}-of-{rank.count}.jsonl" for index in range(rank.count)]
        done = [any(turn.end == DONE for one in read_journals(folder, name) for turn in one.turns) for name in names]
        if not all(done):
            print(f"this process's share is done; {done.count(False)} other processes' are not yet")
            return
        batches = read_journals(folder)  # with those of processes of another number, which were stopped
        questions: dict[str, str] = {}
        for turn in (turn for batch in batches for turn in batch.turns if turn.answer is not None):
            questions.setdefault(same_question(turn.answer or ""), turn.answer or "")
        questions = dict(itertools.islice(questions.items(), config.count))
        facts = summary(config, identity, batches, len(questions))
        if not questions:
            raise ValueError(f"{config.out}: no question is left: {describe(facts)}")
        records = (unanswered_record(f"asked-{index}", text) for index, text in enumerate(questions.values()))
        finish(config.out, records, facts)
    print(f"{config.out}: {describe(facts)}")


def summary(
    config: MagpieConfig, identity: dict[str, Any], batches: list[AnsweredBatch], questions: int
) -> dict[str, Any]:
    """What stands in ``<out>.json``; ``tokens_per_second`` is of one process."""
    turns = [turn for batch in batches for turn in batch.turns if turn.end is None]
    dropped = Counter(turn.drop for turn in turns if turn.drop)
    dropped["asked_before"] += sum(turn.answer is not None for turn in turns) - questions
    tokens, seconds = sum(turn.tokens for turn in turns), sum(batch.seconds for batch in batches)
    return {
        "config": config.model_dump(mode="json"),
        "identity": identity,
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
    return f"{facts['questions']:,} questions of {facts['tokens']:,} tokens{lost}{rate}"
