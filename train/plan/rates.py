"""How fast the target is on this machine, at what the steps will do: measured, for about a minute."""

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

ROWS = 64  # dialogues answered at once, where the memory has room
IMPORTS = time.time() - psutil.Process().create_time()  # seconds that this program took for them
CERTIFIED, CHAIN = 16, 3  # texts that eval.lossless decodes together, half of them in batches of FEW_ROWS; its drafts
PROMPT, TIMED = 128, 16  # tokens of a prompt that decoding is measured behind, and of what is decoded
MOST = 60.0  # seconds of answering
FEWEST_ANSWERS = 32  # whatever the rows are


def measure(
    model: Model, machine: Machine, prompts_of: Callable[[TargetModel, int], list[list[int]]], length: int | None
) -> Rates:
    """Load the target and time it on prompts.

    Args:
        prompts_of: gives prompts for so many rows, as they come; asked once the target is loaded.
        length: tokens of a dialogue, where the target has answered all; None: it will have to.

    Raises:
        ValueError: the target cannot be run layer by layer, or there is too little memory.
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
        found = Answering(one, model.answer)  # nothing will be answered
    prefill = prefilled(target, length)
    weights = sum(each.nbytes for each in target.model.parameters())
    del target
    gpus = max(1, machine.gpus)
    exact = exact_rate(model, same)
    return Rates(one, gpus * found.rate, rows, found.length, gpus * prefill, start, weights, exact)


@dataclass
class Answering:
    """``rate``: tokens of answers in a second, the time of prompts included. ``length``: tokens of an answer."""

    rate: float
    length: float


def answering(model: Model, target: TargetModel, prompts: list[list[int]], rows: int) -> Answering:
    """Answer two questions a row, of all lengths, as ``data_prep.regenerate`` does: a free row takes the next one.

    The rate is that until the last question was given out, while all rows were at work; the length that of all answers,
    for those that end first are the short ones. Where the time is up before, the rate is what it was, and the length
    that at which as many answers would have ended in as many tokens.
    """
    plain, ends = make_drafter("autoregressive", target), frozenset(turn_ends(target, model.chat))
    count = max(2 * rows, FEWEST_ANSWERS)
    questions: Iterator[Prompt] = ((0, ids) for ids in islice(cycle(prompts), count))
    batch = Refilled(target, plain, rows, max(map(len, prompts)), model.answer, Sampling(), ends, 0)
    return timed(Asking(batch, questions), model.answer)


class Asking:
    """What ``timed`` steps: questions in rows."""

    def __init__(self, rows: Refilled, questions: Iterator[Prompt]) -> None:
        self.rows, self.questions = rows, questions
        self.lengths: list[int] = []  # of the answers that have ended
        self.waiting = True  # whether there may be more questions

    @torch.inference_mode()
    def step(self) -> bool:
        """One step; whether any row was at work."""
        self.waiting &= self.rows.fill(lambda: next(self.questions, None))
        going = self.rows.at_work()
        if going:
            self.rows.step()
        self.lengths += [len(one.tokens) for one in self.rows.ended()]
        return going

    @property
    def made(self) -> int:
        """Tokens so far, those of unfinished answers included."""
        return sum(self.lengths) + self.rows.under_way()


def timed(asking: Asking, most: int) -> Answering:
    """See ``answering``; no answer has more than ``most`` tokens."""
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
    """Tokens/s of decoding all prompts together."""
    trace = generate(target, drafter, prompts, max_new_tokens=new, temperature=temperature, eos_token_id=[]).trace
    return trace.decoded_tokens / trace.decode_seconds


def prefilled(target: TargetModel, length: int) -> float:
    """Tokens/s of whole texts of that length, as many together as the features' config has; the better of two times."""
    rows = max(1, FORWARD // length)
    block, seconds = torch.randint(target.vocab_size, (rows, length), device=target.device), []
    for _ in range(2):
        began = time.perf_counter()
        with torch.inference_mode():
            float(target.features(block).features[0, -1, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return block.numel() / min(seconds)


def exact_rate(model: Model, prompts: list[list[int]]) -> float | None:
    """Tokens/s of decoding in float32 and being judged, as eval.lossless does; None: there is no memory for that."""
    try:
        target = TargetModel.from_pretrained(model.name, "float32", cache_tokens=(CERTIFIED, model.longest))
    except ValueError:
        return None
    some = (prompts * CERTIFIED)[:CERTIFIED]
    # What it is drafted with is not there yet: something that drafts chains of as many tokens in every step.
    chain = make_drafter("prompt_lookup", target, gamma=CHAIN, min_ngram=1)
    sizes = [decoded(target, chain, each, min(TIMED, model.answer), 1.0) for each in (some[:FEW_ROWS], some)]
    return 1 / (sum(0.5 / rate for rate in sizes) + 1 / prefilled(target, len(some[0]) + TIMED))


def some_prompts(model: Model, data: Data) -> list[list[int]]:
    """What comes before an answer of each dialogue of the sample: the first one's first, the second one's second.

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
    """``count`` prompts of one length made of those given."""
    length = min(PROMPT, model.longest - model.answer)
    return [(ids * length)[:length] for ids in (prompts * count)[:count]]
