"""What there is to start from: the model, the dialogues, the machine, and how fast the one is on the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from jinja2 import TemplateError
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import Dialogue, ReadCounts, read_dialogues
from data_prep.disk import free_bytes
from data_prep.features import FeaturesConfig
from data_prep.features_run import make_headers
from drafters import TargetModel, generate, make_drafter
from drafters.choices import Dtype
from drafters.config import validate
from drafters.model.files import free_memory, load_config_only, resolve_device
from drafters.model.kv_cache import head_sizes
from drafters.provenance import cpu_cores

FEWEST = 24  # dialogues, below which nothing could be trained and measured on different ones
SAMPLE = 256  # dialogues that are tokenized to know the lengths of all
LONGEST, ANSWER = 1024, 256  # tokens of a dialogue and of an answer, as docs/smollm2.md's; a short context has less
ROWS = 64  # dialogues answered at once, where the memory has room
IMPORTS = time.time() - psutil.Process().create_time()  # seconds that this program took for them
CERTIFIED = 16  # texts that eval.lossless decodes together
PROMPT, TIMED, BLOCK = 128, 16, 512  # tokens of a prompt that is measured, of its answer, and of a prefilled row


@dataclass
class Model:
    """The target, without its weights."""

    name: str
    config: PretrainedConfig
    chat: ChatTokenizer
    longest: int  # tokens of a dialogue
    answer: int  # most of an answer

    @property
    def cache_bytes(self) -> int:
        """Of keys and values of one token, in two bytes each."""
        heads, width = head_sizes(self.config)
        return 2 * 2 * self.config.num_hidden_layers * heads * width


@dataclass
class Data:
    """The dialogues: ``tokens`` and ``answers`` (tokens that belong to answers) of all, by a sample.

    ``own``: the target gave the answers itself. ``seconds``: it took to read them. ``asking``: seconds that the target
    takes for a question, where the questions are its own, too; the dialogues are then as many as there could be.
    """

    source: str
    dialogues: int
    turns: int
    tokens: int
    answers: int
    own: bool
    read: str
    seconds: float
    asking: float | None = None


@dataclass
class Machine:
    """Where all of it will run. ``memory``, ``disk``: bytes that are free."""

    device: torch.device
    gpus: int
    cores: int
    memory: int
    disk: int
    dtype: Dtype


@dataclass
class Rates:
    """Tokens/s of the target, measured here and now, and bytes that it holds.

    ``one``: decoding one text. ``many``: ``rows`` at once. ``prefill``: of whole texts; both on all GPUs, each for
    itself, of which one was measured. ``start``: seconds of a program's imports and of loading the target. ``exact``:
    of a certificate, in float32.
    """

    one: float
    many: float
    rows: int
    prefill: float
    start: float
    weights: int
    exact: float | None


def look_at_model(name: str) -> Model:
    """Raises ValueError where it cannot be loaded, or has no chat template."""
    config = load_config_only(name)
    chat = load_tokenizer(name)
    context = getattr(config, "max_position_embeddings", None) or LONGEST
    longest = min(LONGEST, context)
    return Model(name, config, chat, longest, min(ANSWER, longest // 2))


def look_at_data(source: str, model: Model) -> Data:
    """Read all dialogues and tokenize some.

    Raises:
        ValueError: it cannot be read, or holds too few usable dialogues; the message has the counts.
    """
    began, counts, turns = time.perf_counter(), ReadCounts(), 0
    for dialogue in read_dialogues(source, counts):
        turns += sum(message["role"] == "user" for message in dialogue.messages)
    seconds = time.perf_counter() - began
    if counts.kept < FEWEST:
        raise ValueError(f"--data {source}: {counts.describe()}; at least {FEWEST} usable dialogues are needed")
    kept = counts.kept
    sample = encode_split(source, model.chat, model.longest, SAMPLE)
    scale = kept / len(sample.dialogues)
    answers = scale * sum(int(one.loss_mask.sum()) for one in sample.dialogues)
    asked = {"target": model.name, "splits": {"train": source}, "out": "-", "max_length": model.longest}
    header = make_headers(validate(FeaturesConfig, asked, "--data"), model.chat)["train"]
    own = header.answers in ("own", "sampled")
    tokens = round(scale * sample.tokens)
    return Data(source, kept, turns, tokens, max(round(answers), 1), own, counts.describe(), seconds)


def look_at_machine(out: Path) -> Machine:
    """The device that programs take by themselves, and the precision that is fast on it."""
    device = resolve_device()
    # bf16 in products: every GPU since 2020, a CPU with AMX or AVX-512's instructions for it. Elsewhere it is emulated.
    fast = device.type != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    dtype: Dtype = "bfloat16" if fast else "float32"
    return Machine(device, gpus, cpu_cores() or 1, free_memory(device), free_bytes(out), dtype)


def measure(model: Model, machine: Machine, prompts_of: Callable[[TargetModel, int], list[list[int]]]) -> Rates:
    """Load the target and time it on prompts.

    Args:
        prompts_of: gives so many prompts, all of one length; asked once the target is loaded.

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
    decoded(model, target, prompts[:1])  # the first forwards build kernels
    one, many = decoded(model, target, prompts[:1]), decoded(model, target, prompts)
    prefill = prefilled(model, target)
    weights = sum(each.nbytes for each in target.model.parameters())
    del target
    gpus = max(1, machine.gpus)
    return Rates(one, gpus * many, rows, gpus * prefill, start, weights, exact_rate(model, prompts))


def decoded(model: Model, target: TargetModel, prompts: list[list[int]]) -> float:
    """Tokens/s of plain decoding of all prompts together."""
    plain, new = make_drafter("autoregressive", target), min(TIMED, model.answer)
    trace = generate(target, plain, prompts, max_new_tokens=new, eos_token_id=[]).trace
    return trace.decoded_tokens / trace.decode_seconds


def prefilled(model: Model, target: TargetModel) -> float:
    """Tokens/s of whole texts, the better of two times."""
    block = torch.randint(target.vocab_size, (4, min(BLOCK, model.longest)), device=target.device)
    seconds = []
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
    return 1 / (1 / decoded(model, target, few) + 1 / prefilled(model, target))


def some_prompts(model: Model, source: str, count: int) -> list[list[int]]:
    """``count`` prompts of the data's first questions, some twice where there are fewer, all of one length."""
    stream = read_dialogues(source, ReadCounts())
    found: list[list[int]] = []
    for dialogue, _ in zip(stream, range(4 * count), strict=False):
        with_question = _prompt(model.chat.tokenizer, dialogue)
        if with_question:
            found.append(with_question)
    if not found:
        raise ValueError(f"the chat template of {model.name} refuses the first {4 * count} dialogues of {source}")
    return alike(model, found, count)


def alike(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` prompts of one length made of those given."""
    length = min(PROMPT, model.longest - model.answer)
    return [(ids * length)[:length] for ids in (prompts * count)[:count]]


def _prompt(tokenizer: Any, dialogue: Dialogue) -> list[int]:
    before = next(i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant")
    try:
        encoded = tokenizer.apply_chat_template(
            list(dialogue.messages[:before]), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError:
        return []
    return list(encoded["input_ids"])
