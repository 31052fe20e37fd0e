"""Schemas without torch that several programs of train/ use: a mistyped key is answered within a second.

Keys of every drafter's training are in train/core/config.py, those of one method in ``train/<method>.py``.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.utils import validate_repo_id
from pydantic import Field, field_validator, model_validator

from data_prep.configs import CONVERSATIONS
from data_prep.dialogues.reader import source_digest
from drafters.common.files import check_folder
from drafters.common.provenance import changes
from drafters.config import Amount, Config, DraftSize, Length, Size
from drafters.heads.block.shape import BlockShape
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.methods import method_names
from train.core.config import Decay, TrainConfig, Weight, with_windows


def trained_methods() -> list[str]:
    """The methods that can be trained: those with a program ``train/<method>.py``."""
    folders = import_module("train").__path__
    return [name for name in method_names() if any((Path(folder) / f"{name}.py").is_file() for folder in folders)]


def started_methods() -> list[str]:
    """The methods that train.start trains: those with a template of their training's config."""
    return [name for name in trained_methods() if any((folder / f"{name}.yaml").is_file() for folder in templates())]


def templates() -> list[Path]:
    """The folders with the templates of train.start."""
    return [Path(folder) / "plan" / "templates" for folder in import_module("train").__path__]


def schema_of(method: str) -> type[TrainConfig]:
    """The schema of the task in ``train/<method>.py``."""
    schema: type[TrainConfig] = import_module("train.core.task").task_class(method).schema
    return schema


class Eagle3Config(TrainConfig):
    """The keys of an EAGLE-3 run. EAGLE-3.1 is ``fc_norm: true, norm_output: true``.

    ``draft_vocab``: tokens of the head's own LM head; null: all of the target's.
    """

    drafter: ClassVar[str] = "eagle3"
    sizes_lm_head: ClassVar[bool] = True

    head: Eagle3Shape
    lm_head_start: Literal["random", "target"] = Field("random", description="initial weights of its own LM head")
    ttt_steps: int = Field(7, ge=1, le=16, description="steps of the training-time test")
    ttt_from: float = Field(0.0, ge=0, lt=1, description="share of the run that trains only the first of these steps")
    step_decay: Decay = Field(0.8, description="weight of each step's loss, as a share of the one before")
    mask_uncovered: bool = Field(False, description="leave out positions whose likeliest token is no draft token")

    @property
    def one_pass_until(self) -> float:
        return self.ttt_from

    @property
    def shape(self) -> Eagle3Shape:
        return self.head.model_copy(update={"draft_vocab_size": self.draft_vocab, "trained_steps": self.ttt_steps})

    @property
    def trains_lm_head(self) -> bool:
        return self.lora is None  # or only the norm before it

    @model_validator(mode="after")
    def _is_one_head(self) -> Self:
        if (window := self.head.sliding_window) is not None and window <= self.ttt_steps:
            raise ValueError(
                f"sliding_window is {window}, and a chain of ttt_steps={self.ttt_steps} has to fit into "
                f"it; set sliding_window={self.ttt_steps + 1} or more"
            )
        if not self.head.own_lm_head and (self.draft_vocab is not None or self.lm_head_start != "random"):
            raise ValueError("own_lm_head is false, so draft_vocab and lm_head_start have no effect; leave them out")
        if self.loss_vocab is not None:
            raise ValueError(f"loss_vocab is {self.loss_vocab}, and the loss is over draft_vocab; set that instead")
        if self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split the head's own LM head; set 0, 1 or 2")
        return self


class DFlashConfig(TrainConfig):
    """The keys of a DFlash run.

    The loss of a token is ``token_weight`` times the cross-entropy of the text's token, and ``target_weight`` times
    ``classification_loss``, which compares with the target's distribution. Both are multiplied with a weight of the
    token's position in its block, by ``position_weights``:

    - exponential: exp(-(k - 1) / gamma) at position k, divided by the mean over a block's positions (DFlash);
    - d-pace: w_k = sum_{m >= k} prod_{i <= m} (1 + a_i) / 2, with a_i the acceptance rate at position i (D-PACE, arXiv
      2605.18810): the probability of the text's token, or with ``target_weight`` the overlap of both distributions. It
      costs a second product with the LM head;
    - uniform: 1.
    """

    drafter: ClassVar[str] = "dflash"
    sizes_lm_head: ClassVar[bool] = True

    head: BlockShape
    anchors: Amount = Field(512, ge=1, description="most blocks of a dialogue; each epoch draws others")
    anchor_share: float = Field(
        1.0, gt=0, le=1, description="the same, as a share of the positions that can be anchors"
    )
    token_weight: Weight = Field(1.0, description="weight of the cross-entropy of the text's tokens")
    target_weight: Weight = Field(0.0, description="weight of classification_loss, from the target's distribution")
    position_weights: Literal["exponential", "d-pace", "uniform"] = Field("exponential", description="see above")
    gamma: float | None = Field(
        None, ge=0.1, description="of exponential weights, in positions; null: 7, 5, 4 for blocks of 16, 10, 8 rows"
    )

    @model_validator(mode="before")
    @classmethod
    def _has_windows_in_long_texts(cls, data: Any) -> Any:
        return with_windows(data)

    @property
    def decay(self) -> float:
        """gamma; its defaults are the paper's, and straight lines through them."""
        size = self.head.rows
        return self.gamma or (size / 2 if size <= 10 else (size + 5) / 3)

    @classmethod
    def default(cls, key: str) -> Any:
        """A key's default."""
        return cls.model_fields[key].default

    @property
    def shape(self) -> BlockShape:
        return self.head.model_copy(update={"draft_vocab_size": self.draft_vocab})

    @property
    def trains_lm_head(self) -> bool:
        return self.lora is None and self.draft_vocab is not None

    @model_validator(mode="after")
    def _has_a_loss(self) -> Self:
        if not self.token_weight and not self.target_weight:
            raise ValueError("token_weight and target_weight are both 0, so that there is no loss; set one of them")
        if not self.target_weight and self.classification_loss != self.default("classification_loss"):
            raise ValueError(f"classification_loss is {self.classification_loss}, and target_weight is 0; set both")
        if self.top_k_weight:
            raise ValueError(f"top_k_weight is {self.top_k_weight}, which block drafters do not use; leave it out")
        if self.gamma is not None and self.position_weights != "exponential":
            raise ValueError(f"gamma is {self.gamma}, and position_weights is {self.position_weights}; leave gamma out")
        return self

    @model_validator(mode="after")
    def _can_hold_its_blocks(self) -> Self:
        size = self.head.rows
        if self.batch_tokens <= size:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, and a block of {size} rows needs a token before it; "
                f"set batch_tokens={size + 1} or more"
            )
        if self.draft_vocab is not None and self.loss_vocab is not None:
            raise ValueError(f"loss_vocab is {self.loss_vocab}, and the loss is over draft_vocab; set only that")
        if self.zero_stage == 3 and self.model_copy(update={"lora": None}).trains_lm_head:
            raise ValueError("zero_stage is 3, which would split weights that the loss multiplies with; set 0, 1 or 2")
        return self


class OnPolicy(Config):
    """``on_policy:``: train partly on answers that the draft model samples itself."""

    share: float = Field(0.5, gt=0, le=1, description="share of the dialogues whose answer is replaced")
    every: Amount = Field(1, ge=1, description="steps whose answers are sampled together")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    max_new_tokens: Length = Field(256, ge=1, description="of an answer, at most the length of the replaced one")
    batch: Size = Field(32, ge=1, description="answers sampled in one batch")


class Boost(Config):
    """``boost:``: train only on rows that earlier draft models do not cover (SpecInfer)."""

    after: list[str] = Field(min_length=1, description="folders or Hub names of the earlier draft models")
    length: DraftSize = Field(1, ge=1, description="tokens of a speculation; all must be right")
    keep: float = Field(0.0, ge=0, le=1, description="share of the covered rows that is trained on, too")


class DraftModelConfig(TrainConfig):
    """The keys of a draft model's run."""

    drafter: ClassVar[str] = "draft_model"

    draft_model: str = Field(
        description="folder or Hub name of the causal LM to train; it must have the target's tokenizer"
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "lk_alpha", "lk_lambda", "tokens"] = (
        Field("forward_kl", description="from the target's distribution; tokens: cross-entropy of the text (BiLD)")
    )
    beta: float = Field(0.5, gt=0, lt=1, description="of jsd: the target's share in the mixture")
    freeze_ends: bool = Field(
        False, description="do not train embeddings and LM head, for a model of the target's own layers"
    )
    on_policy: OnPolicy | None = None
    boost: Boost | None = None

    @property
    def measured_by(self) -> dict[str, Any]:
        return {"drafter": "speculative", "draft_model": str(self.out)}

    @property
    def trains_lm_head(self) -> bool:
        return self.lora is None and not self.freeze_ends

    @property
    def provenance_file(self) -> str:
        return "training.json"

    @property
    def lora_base(self) -> str | None:
        return self.draft_model

    @property
    def other_models(self) -> dict[str, str]:
        earlier = self.boost.after if self.boost else []
        return {"draft_model": self.draft_model} | {f"boost.after[{n}]": name for n, name in enumerate(earlier)}

    @model_validator(mode="after")
    def _fits_a_draft_model(self) -> Self:
        if self.draft_vocab is not None:
            raise ValueError(f"draft_vocab is {self.draft_vocab}, added later: python -m train.tools.draft_vocab")
        if self.loss_vocab is not None and self.trains_lm_head:
            raise ValueError(f"loss_vocab is {self.loss_vocab}, and the LM head is trained; set freeze_ends=true")
        if self.init_from is not None:
            raise ValueError(f"init_from is {self.init_from}, and a draft model starts as draft_model says; set that")
        for key in ("classification_loss", "top_k_weight"):
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is {value}, and a draft model learns by its divergence; set that instead")
        if self.on_policy and self.features != "online":
            raise ValueError(f"on_policy needs features: online, data.train and data.heldout, found {self.features}")
        if self.on_policy and self.save_every % self.on_policy.every:  # a resumed run would have other answers
            raise ValueError(f"save_every is {self.save_every}, no multiple of on_policy.every: {self.on_policy.every}")
        if self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split the draft model's LM head; set 0, 1 or 2")
        return self


class BoostConfig(Config):
    """The keys of train.tools.boost."""

    run: Path = Field(description="config of train/draft_model.py, without draft_model, boost, seed and out")
    draft_models: list[str] = Field(min_length=2, description="the model that each begins as; repetition is allowed")
    out: Path = Field(description="folder of the runs: 1, boosted-2, boosted-3, ... and seed-2, seed-3, ...")
    length: DraftSize = Field(1, ge=1, description="tokens of a speculation; all must be right")
    keep: float = Field(0.0, ge=0, le=1, description="share of the covered rows that is trained on, too")
    seeds: bool = Field(True, description="also train the same number on everything, to compare with")


START_SCRIPT = "run.sh"  # what train.start and train.adapt write last into their folder


class ScriptConfig(Config):
    """The command line of a program that writes configs and a script into ``out``.

    Class attributes:
        program: its name. facts: the file with its settings. source: the key of the data file.
    """

    program: ClassVar[str]
    facts: ClassVar[str]
    source: ClassVar[str]

    target: str
    out: Path
    hub: str | None = Field(None, description="repository that the drafter is pushed to")

    @field_validator("*")
    @classmethod
    def _is_one_line(cls, value: Any) -> Any:
        if isinstance(value, str | Path) and any(not one.isprintable() for one in str(value)):
            raise ValueError("has a line break or a character that is not printed, and goes into a script; rename it")
        return value

    @field_validator("hub")
    @classmethod
    def _is_a_repository(cls, name: str | None) -> str | None:
        if name is not None:
            validate_repo_id(name)
            if "/" not in name:
                raise ValueError("give it as user/name")
        return name

    def settings(self) -> dict[str, object]:
        """The settings that a repeated command must not change."""
        data = getattr(self, self.source)
        named = self.model_dump(mode="json", exclude={"out"})
        return named | {f"{self.source}_digest": None if data is None else source_digest(data)}

    def is_written(self) -> bool:
        """Whether ``out`` already holds the script of this command; raises ValueError if it holds something else."""
        check_folder(self.out, "--out")
        file = self.out / self.facts
        if not file.is_file():
            if self.out.is_dir() and any(self.out.iterdir()):
                raise ValueError(f"--out {self.out} holds files that no {self.program} has written; give a new folder")
            return False
        try:
            before = dict(json.loads(file.read_text())["settings"])
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{file} is not what this program writes; give another --out") from None
        if changed := changes(before, self.settings()):
            raise ValueError(f"--out {self.out} holds another {self.program}: {'; '.join(changed)}; give another --out")
        return (self.out / START_SCRIPT).is_file()


class StartConfig(ScriptConfig):
    """The command line of train.start."""

    program = "start"
    facts = "start.json"
    source = "data"

    data: str | None = None
    method: str = "eagle"
    minutes: float = Field(120, gt=0, le=1_000_000, description="of all steps together")

    @property
    def asked(self) -> str:
        """The file of the target's own questions."""
        return str(self.out / "asked" / "questions.jsonl")


class AdaptConfig(ScriptConfig):
    """The command line of train.adapt."""

    program = "adaptation"
    facts = "adapt.json"
    source = "traffic"

    drafter: str
    traffic: str
    guard: str | None = None
    lora: bool = False
    epochs: Amount = Field(4, ge=1, description="passes over the training conversations")
    conversations: Amount = Field(CONVERSATIONS, ge=1, description="most, the newest")
    max_length: Length = Field(2048, ge=2, description="tokens of a training dialogue; the rest is cut off")
    most_loss: float = Field(2.0, gt=0, le=100, description="accepted loss of tau on the guard, in percent")
    chat_template: str | None = None

    def settings(self) -> dict[str, object]:
        """The settings that a repeated command must not change; it may push to another repository."""
        return {key: value for key, value in super().settings().items() if key != "hub"}
