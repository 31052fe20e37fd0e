"""Measure the target's speed on this machine in the steps of the plan, for about a minute."""

import math
import time
from itertools import cycle, islice
from statistics import mean

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

from data_prep.answers.questions import Asked, draw
from data_prep.answers.target import turn_ends
from data_prep.common.ranks import Rank
from data_prep.configs import MagpieConfig
from data_prep.dialogues.reader import DroppedError
from drafters import Drafter, Sampling, TargetModel, generate, make_drafter
from drafters.config import validate
from drafters.loop.acceptance import FEW_ROWS
from drafters.loop.refill import Refilled
from drafters.model.files import collect_memory
from train.configs import StartConfig
from train.plan.configs import FORWARD, magpie, values_of
from train.plan.facts import Data, Machine, Model, Rates, answer_spans
from train.plan.shares import CERTIFIED, check_minutes

ROWS = 64  # most dialogues answered in parallel
QUESTIONS = 32  # usable questions in a sample, from at most three times as many
IMPORTS = time.time() - psutil.Process().create_time()  # seconds of this program's imports
CHAIN = 3  # tokens of a draft
PROMPT, TIMED = 128, 16  # tokens of the prompt and of the continuation in timed decoding
MOST = 60.0  # most seconds of timed answering
FEWEST_ANSWERS = 32


def measure(start: StartConfig, model: Model, machine: Machine, data: Data | None) -> tuple[Rates, Data]:
    """Load the target, time it, and return also the dialogues with the target's own answers.

    Without ``data`` they are as many as the target can ask and answer in the minutes of ``start``.

    Raises:
        ValueError: an unsupported target, too little memory, too few minutes, or no usable prompt.
    """
    room = machine.memory // 4 // (model.cache_bytes * model.longest)
    rows = max(1, min(ROWS, 1 << max(room, 1).bit_length() - 1))
    gpus = max(1, machine.gpus)
    disable_progress_bar()
    # What takes seconds to measure, before what takes minutes.
    tokens = min(PROMPT, model.longest - model.answer)
    greeting = model.chat.tokenizer.encode("Hello, how are you?", add_special_tokens=False)
    same = (greeting * tokens)[:tokens]
    exact = exact_rate(model, same)
    collect_memory()
    began = time.perf_counter()
    target = TargetModel.from_pretrained(model.name, machine.dtype, cache_tokens=(rows, model.longest))
    seconds = IMPORTS + time.perf_counter() - began
    plain, new = make_drafter("autoregressive", target), min(TIMED, model.answer)
    decoded(target, plain, [same], new)  # the first forwards build kernels
    one = decoded(target, plain, [same], new)
    check_minutes(start, model, data, unmeasured(one, seconds, exact), so_far=True)
    began = time.perf_counter()
    prompts = asked(target, model, rows) if data is None else some_prompts(model, data)
    asking = (time.perf_counter() - began) / len(prompts) / gpus  # per question, if the target asks
    question = mean(map(len, prompts))
    if data is not None and data.own:
        many, answer, length = one, float(model.answer), max(2, round(data.tokens / data.dialogues))
    else:
        many, answer = answering(target, plain, model, prompts, rows)
        length = min(model.longest, round(question + answer))
    prefill = prefilled(target, length)
    weights = sum(each.nbytes for each in target.model.parameters())
    del target, plain
    rates = Rates(one, gpus * many, rows, answer, gpus * prefill, seconds, weights, exact)
    if data is None:
        return rates, to_be_asked(start, question, asking, rates)
    return rates, data if data.own else data.answered(answer, model)


def unmeasured(one: float = math.inf, start: float = IMPORTS, exact: float | None = None) -> Rates:
    """Rates of which the others are not known, and taken as infinite."""
    return Rates(one, math.inf, 0, 0.0, math.inf, start, 0, exact)


def asked(target: TargetModel, model: Model, rows: int) -> list[list[int]]:
    """The prompts of questions that the target asks itself; raises ValueError if too few are usable."""
    page = magpie(model, min(rows, QUESTIONS // 2), "-", QUESTIONS)
    config = validate(MagpieConfig, values_of(page), "the sample")
    try:
        prompt, mark = model.chat.question_prompt()
    except DroppedError as error:
        raise ValueError(f"target {model.name} cannot be let ask: {error}; give --data") from error
    sample = Asked(model.chat, mark, Rank(), QUESTIONS, [])
    sample.open(target)
    drawn = draw(config, target, make_drafter("autoregressive", target), prompt, sample)
    questions, dropped = list[str](), set[str]()
    for ids in islice(drawn, 3 * QUESTIONS):
        turn = sample.take(ids)
        questions += [turn.answer] if turn.answer is not None else []
        dropped |= {turn.drop} if turn.drop is not None else set()
        if sample.done:
            break
    if len(questions) < QUESTIONS // 4:
        raise ValueError(
            f"of {sample.drawn} questions that {model.name} was let ask itself {len(questions)} can be used (the "
            f"others: {', '.join(sorted(dropped))}): it was not tuned on questions; give --data"
        )
    return [model.chat.prompt([{"role": "user", "content": question}])[0] for question in questions]


def to_be_asked(start: StartConfig, question: float, asking: float, rates: Rates) -> Data:
    """The dialogues that the target can ask and answer in the minutes of ``start``.

    ``question``: tokens of a prompt; ``asking``: seconds per question.
    """
    count = max(1, int(60 * start.minutes / (asking + rates.answer / rates.many)))
    lengths = f"{question:.0f} and {rates.answer:.0f} tokens"
    read = f"no --data: the target asks itself; {QUESTIONS} questions and their answers have {lengths} on average"
    tokens, answers = round(count * (question + rates.answer)), max(1, round(count * rates.answer))
    return Data(start.asked, count, count, tokens, answers, False, read, 0.0, asking=asking)


def answering(
    target: TargetModel, plain: Drafter, model: Model, prompts: list[list[int]], rows: int
) -> tuple[float, float]:
    """Answer two questions per row as ``data_prep.regenerate`` does: a free row takes the next question.

    Returns:
        Tokens of answers per second, until the last question is taken: while all rows work. Mean tokens of all answers,
        because short ones end first; if the time is up before, the tokens per finished answer.
    """
    questions = ((0, ids) for ids in islice(cycle(prompts), max(2 * rows, FEWEST_ANSWERS)))
    ends = frozenset(turn_ends(target, model.chat))
    batch = Refilled(target, plain, rows, max(map(len, prompts)), model.answer, Sampling(), ends, 0)
    lengths, rate, more, seconds = list[int](), 0.0, True, 0.0
    began = time.perf_counter()
    with torch.inference_mode():
        while seconds < MOST:
            more &= batch.fill(lambda: next(questions, None))
            if not batch.at_work():
                return rate, mean(lengths)
            batch.step()
            lengths += [len(one.tokens) for one in batch.ended()]
            made, seconds = sum(lengths) + batch.under_way(), time.perf_counter() - began
            if more or not rate:
                rate = made / seconds
    return rate, min(made / max(len(lengths), 1), model.answer)


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


def exact_rate(model: Model, prompt: list[int]) -> float | None:
    """Tokens/s of decoding and judging in float32 after ``prompt``, as in eval.lossless; None: too little memory."""
    try:
        target = TargetModel.from_pretrained(model.name, "float32", cache_tokens=(CERTIFIED, model.longest))
    except ValueError:
        return None
    some = [prompt] * CERTIFIED
    # The drafter does not exist yet: prompt lookup with chains of the same length replaces it.
    chain = make_drafter("prompt_lookup", target, gamma=CHAIN, min_ngram=1)
    sizes = [decoded(target, chain, each, min(TIMED, model.answer), 1.0) for each in (some[:FEW_ROWS], some)]
    return 1 / (sum(0.5 / rate for rate in sizes) + 1 / prefilled(target, len(some[0]) + TIMED))


def some_prompts(model: Model, data: Data) -> list[list[int]]:
    """The prompt of one answer of each dialogue in the sample: dialogue n gives that of its n-th answer, cyclically.
    Raises ValueError if all are too long to be answered."""
    room, prompts = model.longest - model.answer, list[list[int]]()
    for number, dialogue in enumerate(data.some):
        if spans := [begin for begin, _ in answer_spans(dialogue) if begin <= room]:
            prompts.append(dialogue.input_ids[: spans[number % len(spans)]].tolist())
    if not prompts:
        raise ValueError(
            f"--data {data.source}: all of {len(data.some)} sampled dialogues have more than {room} tokens before "
            f"their first answer, which leaves no room for {model.answer} tokens of an answer"
        )
    return prompts
