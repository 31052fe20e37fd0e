"""The facts that a plan is made from: the model, the dialogues, and the machine."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from data_prep.common.disk import free_bytes
from data_prep.configs import FeatureKeys
from data_prep.dialogues.encoding import load_tokenizer, sample_split
from data_prep.dialogues.loss_mask import ChatTokenizer, MaskedTokens
from data_prep.dialogues.reader import DroppedError
from data_prep.extraction.headers import make_headers
from drafters.common.precision import fast_dtype
from drafters.common.wording import dtype_name
from drafters.config import validate
from drafters.model.cache import head_sizes
from drafters.model.files import free_memory, load_config_only, resolve_device
from train.preflight.workload import SAMPLE

FEWEST = 24  # dialogues, below which nothing could be trained and measured on different ones
# Tokens of a dialogue and of an answer, as in docs/smollm2-training.md; less with a short context.
LONGEST, ANSWER = 1024, 256
QUESTION, USABLE = 64, 0.5  # tokens of a question that the target asks itself, and the share that can be used


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
    """The dialogues, their sizes estimated from a sample; without --data, those that the target can ask in the time."""

    source: str
    dialogues: int
    turns: int
    tokens: int  # of all dialogues
    answers: int  # tokens that belong to answers
    own: bool  # the answers are the target's own
    read: str  # counts in one line
    seconds: float  # that reading took
    some: list[MaskedTokens] = field(default_factory=list)  # records of a sample
    asking: float | None = None  # seconds per question, if the target also asks


@dataclass
class Machine:
    """This machine."""

    device: torch.device
    gpus: int
    memory: int  # free bytes
    disk: int  # free bytes
    dtype: str


@dataclass
class Rates:
    """Tokens/s of the target, measured here."""

    one: float  # decoding one text
    many: float  # decoding ``rows`` texts in parallel, on all GPUs
    rows: int
    prefill: float  # forward of whole dialogues, on all GPUs
    start: float  # seconds of a program's imports and of loading the target
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
    keys = {"target": model.name, "splits": {"train": source}, "max_length": model.longest}
    header = make_headers(validate(FeatureKeys, keys, "--data"), model.chat)["train"]
    some = sample.encoded.dialogues
    begins = sum(int((np.diff(one.loss_mask.astype(np.int8), prepend=0) == 1).sum()) for one in some)
    turns, own = round(sample.usable * begins / sample.encoded.used), header.answers in ("own", "sampled")
    sizes = sample.usable, turns, sample.tokens, max(sample.trained, 1)
    return Data(source, *sizes, own, sample.describe(), sample.seconds, some)


def check_asks(model: Model) -> None:
    """Raise ValueError if the target's template has no place for a question of its own."""
    try:
        model.chat.question_prompt()
    except DroppedError as error:
        raise ValueError(f"target {model.name} cannot be let ask: {error}; give --data") from error


def to_be_asked(source: str, minutes: float, model: Model, rates: Rates) -> Data:
    """The dialogues that the target can ask and answer in the minutes."""
    asking, answer = QUESTION / USABLE / rates.many, model.answer
    count = max(1, int(60 * minutes / (asking + answer / rates.many)))
    read = f"no --data: the target asks itself, up to {count:,} questions"
    return Data(source, count, count, count * (QUESTION + answer), count * answer, False, read, 0.0, asking=asking)


def look_at_machine(out: Path) -> Machine:
    """The default device, its free memory, the dtype of ``auto``, and the free disk space at ``out``."""
    device = resolve_device()
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return Machine(device, gpus, free_memory(device), free_bytes(out), dtype_name(fast_dtype(device)))


def mask_token(model: Model, data: Data) -> int:
    """A token that texts lack: the first embedding behind the tokenizer's tokens, else an unused special token.

    Raises:
        ValueError: the sampled dialogues have all special tokens.
    """
    tokenizer = model.chat.tokenizer
    if len(tokenizer) < model.config.vocab_size:
        return len(tokenizer)
    turns = [{"role": role, "content": "Hello."} for role in ("user", "assistant")]
    printed = model.chat.tokenize([model.chat.render(turns)])  # type: ignore[arg-type]  # the template's own tokens
    used = {int(token) for one in [*printed, *data.some] for token in np.unique(one.input_ids)}
    special = tokenizer.convert_tokens_to_ids(sorted(model.chat.special_tokens))
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, *special):
        if token is not None and token not in used and token != tokenizer.eos_token_id:
            return int(token)
    raise ValueError(
        f"block drafters need a token that texts lack, and the sampled dialogues have all special tokens of "
        f"{model.name}; give --method eagle3"
    )
