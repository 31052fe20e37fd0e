"""The facts that a plan is made from: the target, the dialogues, this machine, and the target's speed on it."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from data_prep.common.disk import free_bytes
from data_prep.configs import FeatureKeys
from data_prep.dialogues.encoding import load_tokenizer, sample_split
from data_prep.dialogues.loss_mask import ChatTokenizer, MaskedTokens
from data_prep.extraction.headers import make_headers
from drafters import TargetModel, generate, make_drafter
from drafters.common.precision import fast_dtype
from drafters.common.wording import dtype_name, size_text
from drafters.config import validate
from drafters.heads.mtp.own import own_keys
from drafters.model.cache import head_sizes
from drafters.model.files import free_memory, load_config_only, resolve_device
from drafters.model.weights import stored_tensors
from train.configs import StartConfig
from train.preflight.workload import SAMPLE

FEWEST = 24  # dialogues, below which nothing could be trained and measured on different ones
# Tokens of a dialogue and of an answer, as in docs/smollm2-training.md; less with a short context.
LONGEST, ANSWER = 1024, 256
QUESTION = 64  # tokens of a question that the target asks itself
ROWS = 64  # most dialogues answered in parallel
FORWARD = 4096  # tokens of one forward of the target that features are taken from
PROMPT, TIMED = 128, 16  # tokens of the prompt and of the continuation in timed decoding
IMPORTS = time.time() - psutil.Process().create_time()  # seconds of this program's imports


@dataclass
class Facts:
    """What is there, and how fast. Sizes of dialogues are means of a sample; without --data, assumed."""

    config: PretrainedConfig
    chat: ChatTokenizer
    device: torch.device
    dtype: str
    gpus: int  # processes of a step that runs on all GPUs; 1 on a CPU
    memory: int  # free bytes
    disk: int  # free bytes
    longest: int  # most tokens of a dialogue
    answer: int  # most tokens of an answer
    dialogues: int  # usable ones; 0 without --data
    length: float  # tokens of a dialogue
    answered: float  # tokens of a dialogue that belong to answers
    mtp_keys: dict[str, Any] = field(default_factory=dict)  # of the shape of MTP layers in the target's files
    own: bool = False  # the answers are the target's own
    reading: float = 0.0  # seconds to read the file
    sample: list[MaskedTokens] = field(default_factory=list)
    rows: int = 1  # dialogues that one process answers in parallel
    one: float = 0.0  # tokens/s of decoding one text
    many: float = 0.0  # tokens/s of decoding ``rows`` texts in parallel, on all GPUs
    prefill: float = 0.0  # tokens/s of forwards of whole dialogues, on all GPUs
    start: float = 0.0  # seconds of a program's imports and of loading the target


def measure(start: StartConfig) -> Facts:
    """Inspect the target, the dialogues and this machine, and time the target for about a minute.

    Raises:
        ValueError: an unsupported target, unreadable data or too few usable dialogues, or too little memory.
    """
    config, chat, device = load_config_only(start.target), load_tokenizer(start.target), resolve_device()
    longest = min(LONGEST, getattr(config, "max_position_embeddings", None) or LONGEST)
    answer, gpus = min(ANSWER, longest // 2), torch.cuda.device_count() if device.type == "cuda" else 1
    room, sizes = (free_memory(device), free_bytes(start.out)), (longest, answer, 0, QUESTION + answer, answer)
    facts = Facts(config, chat, device, dtype_name(fast_dtype(device)), gpus, *room, *sizes)
    facts.mtp_keys = own_keys(stored_tensors(start.target, None), config)
    if start.data is not None:
        read_dialogues(facts, start.target, start.data)
    free = f"{size_text(facts.memory)} of memory and {size_text(facts.disk)} of disk free"
    print(f"this machine: {facts.device}, {facts.dtype}, {free}; measuring")
    time_target(facts, start.target)
    return facts


def read_dialogues(facts: Facts, target: str, source: str) -> None:
    """Read all dialogues and tokenize some; raises ValueError for unreadable data or too few usable dialogues."""
    sample = sample_split(source, facts.chat, facts.longest, SAMPLE)
    if sample.usable < FEWEST:
        raise ValueError(f"--data {source}: {sample.describe()}; at least {FEWEST} usable dialogues are needed")
    keys = {"target": target, "splits": {"train": source}, "max_length": facts.longest}
    header = make_headers(validate(FeatureKeys, keys, "--data"), facts.chat)["train"]
    facts.dialogues, facts.length = sample.usable, sample.tokens / sample.usable
    facts.answered = max(sample.trained, 1) / sample.usable
    facts.own, facts.reading = header.answers in ("own", "sampled"), sample.seconds
    facts.sample = sample.encoded.dialogues
    whose = "the target's own answers" if facts.own else "others' answers: the target will give its own"
    print(f"{source}: {sample.describe()}; about {sample.tokens / 1e6:,.2f}M tokens; {whose}")


def time_target(facts: Facts, name: str) -> None:
    """Load the target and measure its rates."""
    heads, width = head_sizes(facts.config)
    cache_bytes = 2 * 2 * facts.config.num_hidden_layers * heads * width  # of a token's keys and values
    room = facts.memory // 4 // (cache_bytes * facts.longest)
    facts.rows = min(ROWS, 1 << max(room, 1).bit_length() - 1)
    disable_progress_bar()
    began = time.perf_counter()
    target = TargetModel.from_pretrained(name, facts.dtype, cache_tokens=(facts.rows, facts.longest))
    facts.start = IMPORTS + time.perf_counter() - began
    greeting = facts.chat.tokenizer.encode("Hello, how are you?", add_special_tokens=False)
    prompt = (greeting * PROMPT)[: min(PROMPT, facts.longest - facts.answer)]
    facts.one = decoded(target, [prompt], min(TIMED, facts.answer))
    facts.many = facts.gpus * decoded(target, [prompt] * facts.rows, min(TIMED, facts.answer))
    facts.prefill = facts.gpus * prefilled(target, max(2, min(facts.longest, int(facts.length))))


def decoded(target: TargetModel, prompts: list[list[int]], new: int) -> float:
    """Tokens/s of plain decoding of all prompts in one batch, after one of warm-up, which builds kernels."""
    plain = make_drafter("autoregressive", target)
    for _ in range(2):
        trace = generate(target, plain, prompts, max_new_tokens=new, eos_token_id=[]).trace
    return trace.decoded_tokens / trace.decode_seconds


def prefilled(target: TargetModel, length: int) -> float:
    """Tokens/s of forwards of whole texts of that length, ``FORWARD`` tokens in a batch, after one of warm-up."""
    block = torch.randint(target.vocab_size, (max(1, FORWARD // length), length), device=target.device)
    for _ in range(2):
        began = time.perf_counter()
        with torch.inference_mode():
            float(target.features(block).features[0, -1, 0])  # synchronises a GPU
    return block.numel() / (time.perf_counter() - began)


def mask_token(facts: Facts) -> int:
    """A token that texts lack: the first embedding behind the tokenizer's tokens, else an unused special token.

    Raises:
        ValueError: the sampled dialogues have all special tokens.
    """
    tokenizer, chat = facts.chat.tokenizer, facts.chat
    if len(tokenizer) < facts.config.vocab_size:
        return len(tokenizer)
    turns = [{"role": role, "content": "Hello."} for role in ("user", "assistant")]
    printed = chat.tokenize([chat.render(turns)])  # type: ignore[arg-type]  # the template's own tokens
    used = {int(token) for one in [*printed, *facts.sample] for token in np.unique(one.input_ids)}
    special = tokenizer.convert_tokens_to_ids(sorted(chat.special_tokens))
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, *special):
        if token not in {None, tokenizer.eos_token_id, *used}:
            return int(token)
    raise ValueError("the dialogues have all special tokens, and blocks need one that texts lack; give --method eagle3")
