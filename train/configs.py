"""The YAML schemas of the programs in train/, without torch: a mistyped key is answered within a second.

Keys of every drafter's training are in train/core/config.py.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.utils import validate_repo_id
from pydantic import Field, field_validator, model_validator

from data_prep.dialogues.reader import source_digest
from drafters.config import Amount, Config, DraftSize, Length, Size
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.heads.medusa.shape import MedusaShape
from drafters.heads.peagle.shape import PEagleShape
from drafters.methods import method_names
from train.core.block_config import DFlash2Config, DFlashConfig, DSparkConfig
from train.core.config import Decay, Lora, TrainConfig, Weight


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
    """The schema of a method's training: one of ``SCHEMAS``, or that of the task in ``train/<method>.py``."""
    if method in SCHEMAS:
        return SCHEMAS[method]
    schema: type[TrainConfig] = import_module("train.core.task").task_class(method).schema
    return schema


class EagleConfig(TrainConfig):
    """The keys of an EAGLE run."""

    drafter: ClassVar[str] = "eagle"
    older: ClassVar[dict[str, Any]] = {"layer": "target"}

    head: EagleShape
    classification_weight: Weight = Field(0.1, description="w_cls of the EAGLE paper, section 3.2")
    start: Literal["random", "regression"] = Field(
        "random", description="first weights of fc: docs/training-options.md"
    )
    noise: Literal["paper", "code", "none"] = "paper"
    mask_alignment: Literal["shifted", "paper-code"] = "shifted"
    unroll: int = Field(1, ge=1, le=8, description="consecutive predictions from each trained position; 1 in the paper")
    unroll_weight: Weight = Field(1.0, gt=0, description="factor on the loss of each further prediction")

    @property
    def solves_weights(self) -> bool:
        return self.start == "regression"

    @model_validator(mode="after")
    def _has_what_to_feed_back(self) -> Self:
        inputs = self.head.inputs
        if inputs == "token" and self.unroll > 1:
            raise ValueError(f"unroll: {self.unroll} feeds features back, and inputs: token has none; set unroll=1")
        if self.start == "regression" and not self.head.has_fc:
            raise ValueError(f"start: regression fits fc, and inputs: {inputs} has none; set start=random")
        if self.start == "regression" and self.init_from is not None:
            raise ValueError(f"start: regression replaces weights of init_from: {self.init_from}; set start=random")
        return self


class Eagle3Config(TrainConfig):
    """The keys of an EAGLE-3 run. EAGLE-3.1 is ``fc_norm: true, norm_output: true``.

    ``draft_vocab``: tokens of the head's own LM head; null: all of the target's.
    """

    drafter: ClassVar[str] = "eagle3"
    sizes_lm_head: ClassVar[bool] = True

    head: Eagle3Shape
    lm_head_start: Literal["random", "target"] = Field("random", description="initial weights of its own LM head")
    ttt_steps: int = Field(7, ge=1, le=16, description="steps of the training-time test")
    step_decay: Decay = Field(0.8, description="weight of each step's loss, as a share of the one before")
    mask_uncovered: bool = Field(True, description="leave out positions whose likeliest token is no draft token")

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


class PEagleConfig(Eagle3Config):
    """The keys of a P-EAGLE run: those of EAGLE-3, whose steps are the head's depths.

    ``keep``, ``keep_least``: COD sampling. A share of max(keep^d, keep_least) of the positions trains depth d; those
    that train a depth train the ones before it, too.
    """

    drafter: ClassVar[str] = "peagle"

    head: PEagleShape
    ttt_steps: int = Field(1, ge=1, le=1, description="not of this head: its depths are trained")
    step_decay: float = Field(1.0, ge=0.01, le=1, description="weight of a depth's loss, as a share of the one before")
    keep: float = Field(0.7, gt=0, le=1, description="share of the positions of a depth that train the next one")
    keep_least: float = Field(0.2, ge=0, le=1, description="share of all positions that train every depth")

    @property
    def shape(self) -> PEagleShape:
        return self.head.model_copy(update={"draft_vocab_size": self.draft_vocab})

    @model_validator(mode="after")
    def _has_room_for_its_depths(self) -> Self:
        if (window := self.head.sliding_window) is not None and window <= self.head.depths:
            raise ValueError(
                f"sliding_window is {window}, and a draft of depths={self.head.depths} has to fit into it; set "
                f"sliding_window={self.head.depths + 1} or more"
            )
        return self


class KangarooConfig(TrainConfig):
    """The keys of a Kangaroo run."""

    drafter: ClassVar[str] = "kangaroo"

    head: KangarooShape

    @property
    def trains_lm_head(self) -> bool:
        return self.head.own_lm_head

    @model_validator(mode="after")
    def _keeps_its_lm_head_whole(self) -> Self:
        if self.head.own_lm_head and self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split the adapter's own LM head; set 0, 1 or 2")
        return self


class Joint(Config):
    """``joint:``: tune the target together with the heads (Medusa-2), which makes another target."""

    lora: Lora | None = Field(
        Lora(r=32, alpha=16, dropout=0.05, targets="all-linear"),
        description="of the target's layers, by peft; null: train all layers and the norm",
    )
    lambda_0: Weight = Field(0.2, gt=0, description="weight of the heads' losses beside the target's own")
    rate: float = Field(0.25, gt=0, le=1000, description="the target's learning rate, as a share of the heads'")
    heads_first: Amount = Field(0, ge=0, description="steps without updates of the target; then its rate warms up, too")


class MedusaConfig(TrainConfig):
    """The keys of a Medusa run.

    ``labels: target`` learns the target's distribution of the token that a head predicts, ``tokens`` the text's token,
    as published. The distribution has more information per token, and verifies drafts, also on text that the target did
    not write. Held-out figures compare with the target's distribution in both cases.
    """

    drafter: ClassVar[str] = "medusa"

    head: MedusaShape
    labels: Literal["target", "tokens"] = Field("target", description="what a head learns: see above")
    head_decay: Decay = Field(0.8, description="weight of head k's loss: lambda_k = head_decay^k")
    joint: Joint | None = None

    @property
    def tuned_folder(self) -> Path:
        """The folder of the tuned target, with ``joint``."""
        return self.out / "target"

    @property
    def measured_target(self) -> dict[str, Any]:
        return super().measured_target if self.joint is None else {"path": str(self.tuned_folder)}

    @property
    def trains_lm_head(self) -> bool:
        return self.head.own_lm_heads

    @property
    def computes_in(self) -> str:
        return "float32" if self.head.own_lm_heads else self.precision

    @model_validator(mode="after")
    def _has_such_a_loss(self) -> Self:
        if self.labels == "tokens" and (self.classification_loss != "cross_entropy" or self.top_k_weight):
            raise ValueError("labels: tokens needs classification_loss: cross_entropy and top_k_weight: 0; set them")
        if self.head.own_lm_heads and not (self.precision in ("auto", "float32") and self.zero_stage == 0):
            # The loss multiplies with them outside of the module's forward, where ZeRO collects no gradients.
            raise ValueError("with own_lm_heads, set precision=float32 zero_stage=0 or own_lm_heads=false")
        for key in ("own_lm_heads", "lora", "loss_vocab", "top_k_weight") if self.joint else ():
            if value := getattr(self.head if key == "own_lm_heads" else self, key):
                raise ValueError(f"{key} is {value}, and joint tunes the whole target (or by joint.lora); leave it out")
        if self.joint and self.classification_loss != "cross_entropy":
            raise ValueError(f"joint needs classification_loss: cross_entropy, found {self.classification_loss}")
        if self.joint and self.zero_stage == 3:
            raise ValueError("zero_stage is 3, and joint trains at 0, 1 or 2; set one of these")
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


# By method, the schemas that are read without torch.
SCHEMAS: dict[str, type[TrainConfig]] = {
    schema.drafter: schema
    for schema in (
        EagleConfig,
        Eagle3Config,
        PEagleConfig,
        DFlashConfig,
        DFlash2Config,
        DSparkConfig,
        KangarooConfig,
        MedusaConfig,
        DraftModelConfig,
    )
}


class BoostConfig(Config):
    """The keys of train.tools.boost."""

    run: Path = Field(description="config of train/draft_model.py, without draft_model, boost, seed and out")
    draft_models: list[str] = Field(min_length=2, description="the model that each begins as; repetition is allowed")
    out: Path = Field(description="folder of the runs: 1, boosted-2, boosted-3, ... and seed-2, seed-3, ...")
    length: DraftSize = Field(1, ge=1, description="tokens of a speculation; all must be right")
    keep: float = Field(0.0, ge=0, le=1, description="share of the covered rows that is trained on, too")
    seeds: bool = Field(True, description="also train the same number on everything, to compare with")


START_FACTS, START_SCRIPT = "start.json", "run.sh"  # files that train.start writes into its folder


class StartConfig(Config):
    """The command line of train.start."""

    target: str
    data: str | None = None
    out: Path
    method: str = "eagle"
    minutes: float = Field(120, gt=0, le=1_000_000, description="of all steps together")
    hub: str | None = Field(None, description="repository that the drafter is pushed to")

    @field_validator("target", "data", "out")
    @classmethod
    def _is_one_line(cls, name: str | Path | None) -> str | Path | None:
        if any(not one.isprintable() for one in str(name)):
            raise ValueError("has a line break or a character that is not printed, and goes into a script; rename it")
        return name

    @field_validator("hub")
    @classmethod
    def _is_a_repository(cls, name: str | None) -> str | None:
        if name is not None:
            validate_repo_id(name)
            if "/" not in name:
                raise ValueError("give it as user/name")
        return name

    def settings(self) -> dict[str, object]:
        """The settings that a repeated start must not change."""
        named = self.model_dump(mode="json", exclude={"out"})
        return named | {"data_digest": None if self.data is None else source_digest(self.data)}

    @property
    def asked(self) -> str:
        """The file of the target's own questions."""
        return str(self.out / "asked" / "questions.jsonl")
