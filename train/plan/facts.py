"""What there is to start from: the model, the dialogues, the machine, and how fast the one is on the other."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from data_prep.common.disk import free_bytes
from data_prep.dialogues.encoding import load_tokenizer, sample_split
from data_prep.dialogues.loss_mask import ChatTokenizer, MaskedTokens
from data_prep.features import FeaturesConfig
from data_prep.features_run import make_headers
from drafters.common.precision import fast_dtype
from drafters.common.threads import cpu_cores
from drafters.common.wording import dtype_name
from drafters.config import validate
from drafters.model.cache import head_sizes
from drafters.model.files import free_memory, load_config_only, resolve_device

FEWEST = 24  # dialogues, below which nothing could be trained and measured on different ones
SAMPLE = 256  # dialogues that are tokenized to know the lengths of all
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
        """Of keys and values of one token, in two bytes each."""
        heads, width = head_sizes(self.config)
        return 2 * 2 * self.config.num_hidden_layers * heads * width


@dataclass
class Data:
    """The dialogues: ``tokens`` and ``answers`` (tokens that belong to answers) of all, by a sample.

    ``own``: the target gave the answers itself; else ``answered`` tells what there will be. ``seconds``: it took to
    read them. ``some`` of them, tokenized: records of ``used`` dialogues. ``asking``: seconds that the target takes for
    a question, where the questions are its own, too; the dialogues are then as many as there could be.
    """

    source: str
    dialogues: int
    turns: int
    tokens: int
    answers: int
    own: bool
    read: str
    seconds: float
    some: list[MaskedTokens] = field(default_factory=list)
    used: int = 0
    asking: float | None = None

    def answered(self, length: float, model: Model) -> "Data":
        """The same questions with the target's own answers, of ``length`` tokens each, as far as a dialogue has room
        for another one."""
        turns, tokens, answers = 0, 0.0, 0.0
        for one in self.some:
            so_far = before = 0.0
            for begin, end in answer_spans(one):
                if so_far + begin - before + model.answer > model.longest:
                    break
                so_far, before = so_far + begin - before + length, end
                turns, answers = turns + 1, answers + length
            tokens += so_far
        scale = self.dialogues / self.used
        found = replace(self, turns=round(scale * turns), tokens=max(round(scale * tokens), 1))
        return replace(found, answers=max(round(scale * answers), 1))


@dataclass
class Machine:
    """Where all of it will run. ``memory``, ``disk``: bytes that are free."""

    device: torch.device
    gpus: int
    cores: int
    memory: int
    disk: int
    dtype: str


@dataclass
class Rates:
    """Tokens/s of the target, measured here and now, and bytes that it holds.

    ``one``: decoding one text. ``many``: of answers, ``rows`` at once, ``answer`` tokens each. ``prefill``: of whole
    dialogues; both on all GPUs, each for itself, of which one was measured. ``start``: seconds of a program's imports
    and of loading the target. ``exact``: of a certificate, in float32.
    """

    one: float
    many: float
    rows: int
    answer: float
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
    sample = sample_split(source, model.chat, model.longest, SAMPLE)
    if sample.usable < FEWEST:
        raise ValueError(f"--data {source}: {sample.describe()}; at least {FEWEST} usable dialogues are needed")
    asked = {"target": model.name, "splits": {"train": source}, "out": "-", "max_length": model.longest}
    header = make_headers(validate(FeaturesConfig, asked, "--data"), model.chat)["train"]
    own = header.answers in ("own", "sampled")
    some, answers = sample.encoded.dialogues, max(sample.trained, 1)
    turns = round(sample.usable * sum(len(answer_spans(one)) for one in some) / sample.encoded.used)
    used, read = sample.encoded.used, sample.describe()
    return Data(source, sample.usable, turns, sample.tokens, answers, own, read, sample.seconds, some, used)


def answer_spans(dialogue: MaskedTokens) -> list[tuple[int, int]]:
    """Where each answer of a dialogue begins and ends."""
    edges = np.flatnonzero(np.diff(dialogue.loss_mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def look_at_machine(out: Path) -> Machine:
    """Return the default device with its memory, its cores and the dtype of ``auto``, and the room on the disk."""
    device = resolve_device()
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return Machine(device, gpus, cpu_cores(), free_memory(device), free_bytes(out), dtype_name(fast_dtype(device)))
