"""Measure the target's speed on this machine in the steps of the plan, for about a minute."""

import math
import time

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.loop.acceptance import FEW_ROWS
from drafters.model.files import collect_memory
from train.configs import StartConfig
from train.plan.facts import Data, Machine, Model, Rates
from train.plan.shares import CERTIFIED, check_minutes

ROWS = 64  # most dialogues answered in parallel
FORWARD = 4096  # tokens of one forward of the target that features are taken from
IMPORTS = time.time() - psutil.Process().create_time()  # seconds of this program's imports
CHAIN = 3  # tokens of a draft
PROMPT, TIMED = 128, 16  # tokens of the prompt and of the continuation in timed decoding


def measure(start: StartConfig, model: Model, machine: Machine, data: Data | None) -> Rates:
    """Load the target and time it; what takes seconds comes before what takes minutes.

    Raises:
        ValueError: an unsupported target, too little memory, or too few minutes.
    """
    room = machine.memory // 4 // (model.cache_bytes * model.longest)
    rows, gpus = max(1, min(ROWS, 1 << max(room, 1).bit_length() - 1)), max(1, machine.gpus)
    disable_progress_bar()
    greeting = model.chat.tokenizer.encode("Hello, how are you?", add_special_tokens=False)
    tokens, new = min(PROMPT, model.longest - model.answer), min(TIMED, model.answer)
    prompt = (greeting * tokens)[:tokens]
    exact = exact_rate(model, prompt)
    collect_memory()
    began = time.perf_counter()
    target = TargetModel.from_pretrained(model.name, machine.dtype, cache_tokens=(rows, model.longest))
    seconds = IMPORTS + time.perf_counter() - began
    plain = make_drafter("autoregressive", target)
    decoded(target, plain, [prompt], new)  # the first forwards build kernels
    one = decoded(target, plain, [prompt], new)
    check_minutes(start, model, data, unmeasured(one, seconds, exact), so_far=True)
    many = answering(target, plain, [prompt] * rows, new)
    length = model.longest // 2 if data is None else max(2, min(model.longest, data.tokens // data.dialogues))
    return Rates(one, gpus * many, rows, gpus * prefilled(target, length), seconds, exact)


def unmeasured(one: float = math.inf, start: float = IMPORTS, exact: float | None = None) -> Rates:
    """Rates of which the others are not known, and taken as infinite."""
    return Rates(one, math.inf, 0, math.inf, start, exact)


def decoded(
    target: TargetModel, drafter: Drafter, prompts: list[list[int]], new: int, temperature: float = 0.0
) -> float:
    """Tokens/s of decoding all prompts in one batch."""
    trace = generate(target, drafter, prompts, max_new_tokens=new, temperature=temperature, eos_token_id=[]).trace
    return trace.decoded_tokens / trace.decode_seconds


def answering(target: TargetModel, plain: Drafter, prompts: list[list[int]], new: int) -> float:
    """Tokens/s of answers to all prompts in one batch, after one of warm-up."""
    decoded(target, plain, prompts, new)
    return decoded(target, plain, prompts, new)


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
    return 1 / (sum(0.5 / rate for rate in sizes) + 1 / prefilled(target, len(prompt) + TIMED))
