"""How fast the target is on this machine, at what the steps will do: measured, for half a minute."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import psutil
import torch
from jinja2 import TemplateError
from transformers.utils.logging import disable_progress_bar

from data_prep.answers.target import turn_ends
from data_prep.dialogues.reader import Dialogue
from drafters import TargetModel, generate, generate_many, make_drafter

from .configs import FORWARD
from .facts import Machine, Model, Rates

ROWS = 64  # dialogues answered at once, where the memory has room
IMPORTS = time.time() - psutil.Process().create_time()  # seconds that this program took for them
CERTIFIED = 16  # texts that eval.lossless decodes together
PROMPT, TIMED = 128, 16  # tokens of a prompt that decoding is measured behind, and of what is decoded
MOST = 60.0  # seconds of answering, beyond which lengths and rates are not measured but bounded


def measure(
    model: Model, machine: Machine, prompts_of: Callable[[TargetModel, int], list[list[int]]], answers: bool
) -> Rates:
    """Load the target and time it on prompts.

    Args:
        prompts_of: gives prompts for so many rows, as they come; asked once the target is loaded.
        answers: whether the target will have to answer them.

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
    decoded(model, target, same[:1])  # the first forwards build kernels
    one, many = decoded(model, target, same[:1]), decoded(model, target, same)
    short = 2 * rows * model.answer / many < MOST
    found = answering(model, target, prompts, rows) if answers and short else None
    found = found or Answering(many, model.answer)
    prefill = prefilled(target, min(model.longest, round(sum(map(len, prompts)) / len(prompts) + found.length)))
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


def answering(model: Model, target: TargetModel, prompts: list[list[int]], rows: int) -> Answering | None:
    """Answer questions of all lengths, a free row taking the next one.

    Not counted is the first answer of every row: they begin together, the short ones end first, and none of them had
    to wait for another prompt's prefill. Of as many later ones, what ends is what is made.

    Returns:
        None where the time was up before half of those had ended: a target that is slow here.
    """
    questions = cycle(prompts)
    made = generate_many(
        target,
        make_drafter("autoregressive", target),
        lambda: (0, next(questions)),
        batch=rows,
        longest=max(map(len, prompts)),
        max_new_tokens=model.answer,
        eos_token_id=sorted(turn_ends(target, model.chat)),
    )
    return counted((len(one.tokens) for one in made), rows)


def counted(lengths: Iterator[int], rows: int) -> Answering | None:
    """The same of answers of so many tokens, which arrive as they end."""
    started, tokens, count, now = time.perf_counter(), 0, 0, 0.0
    end = started + MOST
    for number, length in enumerate(lengths, start=1):
        now = time.perf_counter()
        if number <= rows:
            started = now
        else:
            tokens, count = tokens + length, count + 1
        if count == rows or now > end:
            break
    return Answering(tokens / (now - started), tokens / count) if 2 * count >= rows else None


def decoded(model: Model, target: TargetModel, prompts: list[list[int]]) -> float:
    """Tokens/s of plain decoding of all prompts together."""
    plain, new = make_drafter("autoregressive", target), min(TIMED, model.answer)
    trace = generate(target, plain, prompts, max_new_tokens=new, eos_token_id=[]).trace
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
    few = (prompts * CERTIFIED)[:CERTIFIED]
    return 1 / (1 / decoded(model, target, few) + 1 / prefilled(target, len(few[0]) + TIMED))


def some_prompts(model: Model, dialogues: list[Dialogue], source: str) -> list[list[int]]:
    """What comes before an answer of each dialogue: the first one's first, the second one's second, in turns.

    Raises:
        ValueError: the chat template takes none of them, or all are too long to be answered.
    """
    room = model.longest - model.answer
    prompts = [_prompt(model.chat.tokenizer, dialogue, number) for number, dialogue in enumerate(dialogues)]
    if not (found := [ids for ids in prompts if 0 < len(ids) <= room]):
        raise ValueError(
            f"none of {len(prompts)} dialogues of {source} can be asked: the chat template of {model.name} refuses "
            f"them, or what comes before an answer is longer than {room} tokens"
        )
    return found


def alike(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` prompts of one length made of those given."""
    length = min(PROMPT, model.longest - model.answer)
    return [(ids * length)[:length] for ids in (prompts * count)[:count]]


def _prompt(tokenizer: Any, dialogue: Dialogue, number: int) -> list[int]:
    """What comes before an answer of the dialogue; none where the chat template refuses it."""
    answers = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    before = answers[number % len(answers)]
    try:
        encoded = tokenizer.apply_chat_template(
            list(dialogue.messages[:before]), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError:
        return []
    return list(encoded["input_ids"])
