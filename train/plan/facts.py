"""The facts that a plan is made from: the model, the dialogues, the machine, and its speed."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from data_prep.common.disk import free_bytes
from data_prep.configs import FeatureKeys
from data_prep.dialogues.encoding import load_tokenizer, sample_split
from data_prep.dialogues.loss_mask import ChatTokenizer, MaskedTokens
from data_prep.extraction.headers import make_headers
from drafters.common.precision import fast_dtype
from drafters.common.threads import cpu_cores
from drafters.common.wording import dtype_name
from drafters.config import validate
from drafters.model.cache import head_sizes
from drafters.model.files import free_memory, load_config_only, resolve_device
from train.preflight.workload import SAMPLE

FEWEST = 24  # dialogues, below which nothing could be trained and measured on different ones
# Tokens of a dialogue and of an answer, as in docs/smollm2-training.md; less with a short context.
LONGEST, ANSWER = 1024, 256


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
        """Bytes of one token's keys and values, two bytes each."""
        heads, width = head_sizes(self.config)
        return 2 * 2 * self.config.num_hidden_layers * heads * width


@dataclass
class Data:
    """The dialogues, their sizes estimated from a sample."""

    source: str
    dialogues: int  # if the target asks: the possible number
    turns: int
    tokens: int  # of all dialogues
    answers: int  # tokens that belong to answers
    own: bool  # the answers are the target's own; if not, ``answered`` estimates them
    read: str  # counts in one line
    seconds: float  # that reading took
    some: list[MaskedTokens] = field(default_factory=list)  # records of a sample
    used: int = 0  # dialogues that they come from
    asking: float | None = None  # seconds per question, if the target also asks

    def answered(self, length: float, model: Model) -> "Data":
        """The same questions with the target's answers of ``length`` tokens, as many as fit into a dialogue."""
        tokens = answers = 0.0
        for one in self.some:
            so_far = before = 0.0
            for begin, end in answer_spans(one):
                if so_far + begin - before + model.answer > model.longest:
                    break
                so_far, before = so_far + begin - before + length, end
                answers += length
            tokens += so_far
        scale = self.dialogues / self.used
        return replace(self, tokens=max(round(scale * tokens), 1), answers=max(round(scale * answers), 1))


@dataclass
class Machine:
    """This machine."""

    device: torch.device
    gpus: int
    cores: int
    memory: int  # free bytes
    disk: int  # free bytes
    dtype: str


@dataclass
class Rates:
    """Tokens/s of the target, measured here."""

    one: float  # decoding one text
    many: float  # answering ``rows`` questions in parallel, on all GPUs
    rows: int
    answer: float  # tokens of an answer
    prefill: float  # forward of whole dialogues, on all GPUs
    start: float  # seconds of a program's imports and of loading the target
    weights: int  # bytes of the target
    exact: float | None  # of the lossless test, in float32; None: not enough memory


def look_at_model(name: str) -> Model:
    """The target's configuration and chat template; raises ValueError if one is missing."""
    config = load_config_only(name)
    chat = load_tokenizer(name)
    context = getattr(config, "max_position_embeddings", None) or LONGEST
    longest = min(LONGEST, context)
    return Model(name, config, chat, longest, min(ANSWER, longest // 2))


def look_at_data(source: str, model: Model) -> Data:
    """Read all dialogues and tokenize some; raises ValueError for unreadable data or too few usable dialogues."""
    sample = sample_split(source, model.chat, model.longest, SAMPLE)
    if sample.usable < FEWEST:
        raise ValueError(f"--data {source}: {sample.describe()}; at least {FEWEST} usable dialogues are needed")
    asked = {"target": model.name, "splits": {"train": source}, "max_length": model.longest}
    header = make_headers(validate(FeatureKeys, asked, "--data"), model.chat)["train"]
    own = header.answers in ("own", "sampled")
    some, answers = sample.encoded.dialogues, max(sample.trained, 1)
    turns = round(sample.usable * sum(len(answer_spans(one)) for one in some) / sample.encoded.used)
    used, read = sample.encoded.used, sample.describe()
    return Data(source, sample.usable, turns, sample.tokens, answers, own, read, sample.seconds, some, used)


def answer_spans(dialogue: MaskedTokens) -> list[tuple[int, int]]:
    """Begin and end of each answer of a dialogue."""
    edges = np.flatnonzero(np.diff(dialogue.loss_mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def look_at_machine(out: Path) -> Machine:
    """The default device, its free memory, cores, the dtype of ``auto``, and the free disk space at ``out``."""
    device = resolve_device()
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return Machine(device, gpus, cpu_cores(), free_memory(device), free_bytes(out), dtype_name(fast_dtype(device)))
