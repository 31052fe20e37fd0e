"""Measure the target's speed on this machine in the steps of the plan, for about a minute."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

from data_prep.answers.target import turn_ends
from drafters import Drafter, Sampling, TargetModel, generate, make_drafter
from drafters.loop.acceptance import FEW_ROWS
from drafters.loop.refill import Prompt, Refilled
from train.plan.configs import FORWARD
from train.plan.facts import Data, Machine, Model, Rates, answer_spans

ROWS = 64  # most dialogues answered in parallel
IMPORTS = time.time() - psutil.Process().create_time()  # seconds of this program's imports
CERTIFIED, CHAIN = 16, 3  # texts in a batch of eval.lossless (half of them in batches of FEW_ROWS); draft length
PROMPT, TIMED = 128, 16  # tokens of the prompt and of the continuation in timed decoding
MOST = 60.0  # most seconds of timed answering
FEWEST_ANSWERS = 32


def measure(
    model: Model, machine: Machine, prompts_of: Callable[[TargetModel, int], list[list[int]]], length: int | None
) -> Rates:
    """Load the target and time it on prompts.

    Args:
        prompts_of: given the loaded target and the number of rows, returns prompts.
        length: tokens of a dialogue if all answers are the target's already; None: the target will answer.

    Raises:
        ValueError: an unsupported target, or too little memory.
    """
    room = machine.memory // 4 // (model.cache_bytes * model.longest)
    rows = max(1, min(ROWS, 1 << max(room, 1).bit_length() - 1))
    disable_progress_bar()
    began = time.perf_counter()
    target = TargetModel.from_pretrained(model.name, machine.dtype, cache_tokens=(rows, model.longest))
    start = IMPORTS + time.perf_counter() - began
    prompts = prompts_of(target, rows)
    same = alike(model, prompts, rows)
    plain, new = make_drafter("autoregressive", target), min(TIMED, model.answer)
    decoded(target, plain, same[:1], new)  # the first forwards build kernels
    one = decoded(target, plain, same[:1], new)
    if length is None:
        found = answering(model, target, prompts, rows)
        length = min(model.longest, round(sum(map(len, prompts)) / len(prompts) + found.length))
    else:
        found = Answering(one, model.answer)  # unused: nothing will be answered
    prefill = prefilled(target, length)
    weights = sum(each.nbytes for each in target.model.parameters())
    del target
    gpus = max(1, machine.gpus)
    exact = exact_rate(model, same)
    return Rates(one, gpus * found.rate, rows, found.length, gpus * prefill, start, weights, exact)


@dataclass
class Answering:
    """``rate``: tokens of answers per second, including prefill. ``length``: tokens of an answer."""

    rate: float
    length: float


def answering(model: Model, target: TargetModel, prompts: list[list[int]], rows: int) -> Answering:
    """Answer two questions per row as ``data_prep.regenerate`` does: a free row takes the next question.

    The rate is measured until the last question is taken, while all rows work. The length is the mean of all answers,
    because short ones end first. If the time is up before, it is the number of tokens per finished answer.
    """
    plain, ends = make_drafter("autoregressive", target), frozenset(turn_ends(target, model.chat))
    count = max(2 * rows, FEWEST_ANSWERS)
    questions: Iterator[Prompt] = ((0, ids) for ids in islice(cycle(prompts), count))
    batch = Refilled(target, plain, rows, max(map(len, prompts)), model.answer, Sampling(), ends, 0)
    return timed(Asking(batch, questions), model.answer)


class Asking:
    """Questions being answered in rows, step by step."""

    def __init__(self, rows: Refilled, questions: Iterator[Prompt]) -> None:
        self.rows, self.questions = rows, questions
        self.lengths: list[int] = []  # of the answers that have ended
        self.waiting = True  # there may be more questions

    @torch.inference_mode()
    def step(self) -> bool:
        """Make one step; return False if no row is left."""
        self.waiting &= self.rows.fill(lambda: next(self.questions, None))
        going = self.rows.at_work()
        if going:
            self.rows.step()
        self.lengths += [len(one.tokens) for one in self.rows.ended()]
        return going

    @property
    def made(self) -> int:
        """Tokens so far, including unfinished answers."""
        return sum(self.lengths) + self.rows.under_way()


def timed(asking: Asking, most: int) -> Answering:
    """Run ``asking`` to its end or for ``MOST`` seconds, as ``answering`` says; ``most``: tokens of an answer."""
    began = time.perf_counter()
    rate = 0.0
    while asking.step():
        seconds = time.perf_counter() - began
        if asking.waiting or not rate:
            rate = asking.made / seconds
        if seconds > MOST:
            return Answering(rate, min(asking.made / max(len(asking.lengths), 1), most))
    return Answering(rate, sum(asking.lengths) / len(asking.lengths))


def decoded(
    target: TargetModel, drafter: Drafter, prompts: list[list[int]], new: int, temperature: float = 0.0
) -> float:
    """Tokens/s of decoding all prompts in one batch."""
    trace = generate(target, drafter, prompts, max_new_tokens=new, temperature=temperature, eos_token_id=[]).trace
    return trace.decoded_tokens / trace.decode_seconds


def prefilled(target: TargetModel, length: int) -> float:
    """Tokens/s of forwards of whole texts of that length, ``FORWARD`` tokens in a batch; the better of two."""
    rows = max(1, FORWARD // length)
    block, seconds = torch.randint(target.vocab_size, (rows, length), device=target.device), []
    for _ in range(2):
        began = time.perf_counter()
        with torch.inference_mode():
            float(target.features(block).features[0, -1, 0])  # synchronises a GPU
        seconds.append(time.perf_counter() - began)
    return block.numel() / min(seconds)


def exact_rate(model: Model, prompts: list[list[int]]) -> float | None:
    """Tokens/s of decoding and judging in float32, as in eval.lossless; None: too little memory."""
    try:
        target = TargetModel.from_pretrained(model.name, "float32", cache_tokens=(CERTIFIED, model.longest))
    except ValueError:
        return None
    some = (prompts * CERTIFIED)[:CERTIFIED]
    # The drafter does not exist yet: prompt lookup with chains of the same length replaces it.
    chain = make_drafter("prompt_lookup", target, gamma=CHAIN, min_ngram=1)
    sizes = [decoded(target, chain, each, min(TIMED, model.answer), 1.0) for each in (some[:FEW_ROWS], some)]
    return 1 / (sum(0.5 / rate for rate in sizes) + 1 / prefilled(target, len(some[0]) + TIMED))


def some_prompts(model: Model, data: Data) -> list[list[int]]:
    """The prompt of one answer of each dialogue in the sample: dialogue n gives that of its n-th answer, cyclically.

    Raises:
        ValueError: all are too long to be answered.
    """
    room, prompts = model.longest - model.answer, list[list[int]]()
    for number, dialogue in enumerate(data.some):
        spans = [begin for begin, _ in answer_spans(dialogue) if begin <= room]
        if spans:
            prompts.append(dialogue.input_ids[: spans[number % len(spans)]].tolist())
    if not prompts:
        raise ValueError(
            f"none of {len(data.some)} dialogues of {data.source} can be asked: what comes before their first answer "
            f"is longer than {room} tokens, which leave room for {model.answer} of an answer"
        )
    return prompts


def alike(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` prompts of equal length, cut or repeated from ``prompts``."""
    length = min(PROMPT, model.longest - model.answer)
    return [(ids * length)[:length] for ids in (prompts * count)[:count]]
