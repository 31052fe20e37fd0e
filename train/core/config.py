"""What the configurations of all training runs have in common; each method adds its own in train/<method>.py."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from drafters.config import Amount, Config, Dtype, Length, Seed, Size, Vocabulary, Width

if TYPE_CHECKING:  # it takes seconds, and a mistyped key should not wait for it
    import torch


class OnlineData(Config):
    """``data:`` of a run with ``features: online``: what data_prep.features would be given, and how the target runs."""

    train: str = Field(description="ShareGPT file or Hub dataset (owner/name[:config][:split])")
    heldout: str = Field(description="the same, of held-out dialogues")
    max_length: Length = Field(2048, ge=2, description="tokens of a dialogue; the rest is cut off")
    limit: Amount | None = Field(None, ge=1, description="dialogues of each split, the first ones; default: all")
    chat_template: str | None = Field(None, description="file with a Jinja template, in place of the tokenizer's own")
    target_dtype: Dtype = Field("auto", description="in which the target runs; auto: bf16 where it is fast")
    target_device_map: Literal["auto"] | None = Field(None, description="auto: over all GPUs, in a run of one process")
    target_batch_tokens: Amount = Field(8192, ge=1, description="tokens of one forward of the target, padding included")


class Lora(Config):
    """``lora:``: train matrices of low rank beside the projections, by peft, and leave what they are for as it is."""

    r: Width = Field(16, ge=1, description="their rank")
    alpha: Width = Field(32, ge=1, description="what they add counts alpha / r times")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = Field("all-linear", description="modules by name, as peft takes them")


DEVICE = r"(cpu|cuda|mps|xpu|hpu|npu|mlu|musa)(:[1-9]?\d)?"  # as torch.device knows them
Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Config):
    """What every drafter's training run has in common. All paths are relative to the working directory."""

    drafter: ClassVar[str]  # what it trains; also the name of its script in train/
    older: ClassVar[dict[str, Any]] = {}  # by key, what runs did before it existed, unless its default now

    target: str = Field(description="folder or Hub name of the frozen target")
    revision: str | None = Field(None, description="the target's Hub revision")
    features: Literal["online"] | Path = Field(
        union_mode="left_to_right",
        description="folder with the feature stores train/ and heldout/; or online: computed by the target meanwhile",
    )
    data: OnlineData | None = Field(None, description="the dialogues, with features: online")
    init_from: str | None = Field(
        None, description="a drafter to start from, in place of new weights: folder or Hub repository"
    )
    lora: Lora | None = Field(
        None, description="train an adapter of the drafter in init_from, for one domain: docs/training.md"
    )
    out: Path = Field(description="run folder: logs, resumable state and, at its top, the trained drafter")

    steps: Amount | None = Field(None, ge=1, description="optimiser steps; the run ends at whichever limit comes first")
    epochs: Amount | None = Field(None, ge=1, description="passes over the training store")
    minutes: float | None = Field(None, gt=0, description="wall-clock limit, which the schedule follows, too")

    batch_tokens: Amount = Field(ge=1, description="tokens of one optimiser step, over all ranks and micro-batches")
    gradient_accumulation: Size = Field(1, ge=1, description="micro-batches a rank takes one after another in a step")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: for matrices; docs/training.md")
    learning_rate: float = Field(gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: Amount = Field(2000, ge=0, description="linear warm-up from 0")
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    gradient_clipping: float = Field(0.5, gt=0, description="by the norm of the whole gradient")

    weight_average: float | None = Field(
        None, ge=0, lt=1, description="decay of a moving average of the weights, which is judged and exported instead"
    )

    precision: Literal["auto", "bf16", "float16", "float32"] = Field(
        "auto", description="auto: bf16 where the device has instructions for it; 16 bits keep float32 master weights"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="split over the ranks: 1 optimizer, 2 gradients, 3 weights")
    offload: Literal["none", "optimizer", "parameters"] = Field("none", description="to host memory; see zero_stage")
    activation_checkpointing: bool = Field(False, description="compute the drafter's activations twice, keep none")
    threads: Size | None = Field(None, ge=1, description="CPU threads of a rank; default: OMP_NUM_THREADS, or by load")
    loss_chunk_rows: Amount | None = Field(None, ge=1, description="rows of logits at once; default: by the device")
    seed: Seed = 0
    verify: bool = Field(True, description="check each shard's SHA-256 once, beside the training; a broken one ends it")

    draft_vocab: Vocabulary | None = Field(
        None, ge=1, description="draft with the LM head's rows of so many tokens, the most frequent of the answers"
    )
    loss_vocab: Vocabulary | None = Field(
        None, ge=1, description="take the cross-entropy over so many tokens, the most frequent of the answers"
    )
    classification_loss: Literal["cross_entropy", "total_variation", "lk_alpha", "lk_lambda"] = Field(
        "cross_entropy", description="of the drafter's distribution against the target's: docs/training.md"
    )
    lk_eta: float = Field(3.0, ge=0, description="of lk_lambda: how early it goes over from KL to the total variation")
    top_k_weight: float = Field(0.0, ge=0, description="of HASS's Top-K loss, added to the classification loss")
    top_k: Vocabulary = Field(10, ge=1, description="tokens in that loss, the target's most likely")

    log_every: Amount = Field(10, ge=1, description="steps between lines in metrics.jsonl and TensorBoard")
    eval_every: Amount = Field(1000, ge=1, description="steps between held-out evaluations; one more is at the end")
    heldout_tokens: Amount = Field(16384, ge=1, description="tokens of the held-out store that an evaluation reads")
    save_every: Amount = Field(1000, ge=1, description="steps between resumable checkpoints; the last two are kept")
    export_every: Amount = Field(1000, ge=1, description="steps between exports of the drafter; the last is at the end")

    # Its time counts neither into tokens/s nor into `minutes`. There is one before the first step and one at the end.
    tau_every: Amount | None = Field(
        None, ge=0, description="steps between runs of the real decoding loop on held-out prompts; null or 0: never"
    )
    tau_prompts: Amount = Field(16, ge=1, description="held-out dialogues whose first question is answered for tau")
    tau_new_tokens: Length = Field(64, ge=2, description="most tokens of such an answer")
    tau_device: str | None = Field(None, description="where the target runs for tau; default: where rank 0 trains")
    tau_keep_target: bool = Field(False, description="keep the target in memory from one tau to the next")
    peak_tflops: float | None = Field(None, gt=0, description="bf16 peak of one device, 1e12 FLOP/s; default: if known")

    @field_validator("tau_device")
    @classmethod
    def _is_a_device(cls, value: str | None) -> str | None:
        if not re.fullmatch(DEVICE, value or "cpu"):
            raise ValueError("this is no device; give cpu, cuda or cuda:1, say, or null")
        return value

    @property
    def dtype(self) -> "torch.dtype":
        """What the drafter computes in, on the device that this process trains on."""
        from drafters.model.files import resolve_dtype
        from train.core.runtime import rank_device

        return resolve_dtype("bfloat16" if self.precision == "bf16" else self.precision, rank_device())

    def last_step(self, steps_in: Callable[[int], int]) -> int | None:
        """The step after which ``steps`` or ``epochs`` end the run, whichever comes first; None: only the clock does.

        ``steps_in``: how many steps so many epochs have.
        """
        limits = [self.steps] if self.steps else []
        limits += [steps_in(self.epochs)] if self.epochs else []
        return min(limits, default=None)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers after which the drafter reads hidden states, beside the features: 2 is after the second."""
        return ()

    @property
    def measured_by(self) -> dict[str, Any]:
        """The drafter, as a config of eval names it, that decodes with what was trained."""
        return {"drafter": self.drafter, "checkpoint": str(self.out)}

    @property
    def measured_target(self) -> dict[str, Any]:
        """The target, as a config of eval names it, that the drafter is for."""
        return {"path": self.target} | ({"revision": self.revision} if self.revision else {})

    @property
    def trains_lm_head(self) -> bool:
        """Whether the loss multiplies, outside of the module's forward, with weights that are trained."""
        return False

    @property
    def provenance_file(self) -> str:
        """The file of an export that says what it came from."""
        return "config.json"

    @property
    def lora_base(self) -> str | None:
        """What ``lora`` is for: folder or Hub repository."""
        return self.init_from

    @property
    def weights_file(self) -> str:
        """The file of an export that has the weights."""
        return "adapter_model.safetensors" if self.lora else "model.safetensors"

    @property
    def other_models(self) -> dict[str, str]:
        """What else is loaded beside the target, by key."""
        return {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError("no limit given: set steps, epochs or minutes")
        if self.lora is not None and self.lora_base is None:
            raise ValueError("lora adapts a trained drafter, and none is given: set init_from, or leave lora out")
        if self.lora is not None and self.trains_lm_head:  # the loss multiplies with its weights as they are
            raise ValueError(
                "lora leaves LM heads as they are, and this trains one of the drafter's own; set one of the two"
            )
        if self.lora is not None and self.draft_vocab is not None:
            raise ValueError(
                f"draft_vocab is {self.draft_vocab:,}, and with lora that of the drafter in init_from stays; leave one "
                "of the two out"
            )
        if self.features == "online" and self.data is None:
            raise ValueError("features: online needs dialogues: set data.train and data.heldout, or give a folder")
        if self.features != "online" and self.data is not None:
            raise ValueError(
                f"data is only read with features: online, and features is {str(self.features)!r}: set features=online "
                "or leave data out"
            )
        stage = self.zero_stage
        if self.offload == "optimizer" and stage == 0:
            raise ValueError("offload: optimizer needs zero_stage: 1, 2 or 3 (it is 0); set one, or offload: none")
        if self.offload == "parameters" and stage != 3:
            raise ValueError(f"offload: parameters needs zero_stage: 3 (it is {stage}); set it, or offload: optimizer")
        if self.optimizer == "muon" and (stage == 3 or self.offload != "none"):
            raise ValueError(
                f"optimizer: muon needs zero_stage: 0, 1 or 2 and offload: none (they are {stage} and {self.offload}); "
                "set them, or optimizer: adamw"
            )
        if self.optimizer == "muon" and self.lora is not None:
            raise ValueError("optimizer: muon is for whole matrices, and lora trains parts; set optimizer=adamw")
        if self.weight_average is not None and stage == 3:
            raise ValueError(
                f"weight_average: {self.weight_average} needs zero_stage: 0, 1 or 2 (it is 3, where no rank has whole "
                "weights); set one, or weight_average: null"
            )
        return self


# Changing these between a run and its --resume leaves what was trained so far valid; any other change does not.
LIMITS = {"steps", "epochs", "minutes"}
MACHINE = {"gradient_accumulation", "zero_stage", "offload", "activation_checkpointing", "loss_chunk_rows", "threads"}
MACHINE |= {"precision", "data.target_batch_tokens", "data.target_device_map", "data.target_dtype"}
WATCHING = {"log_every", "eval_every", "heldout_tokens", "save_every", "export_every", "peak_tflops", "verify"}
WATCHING |= {"draft_vocab"}  # the loss is over loss_vocab: only what drafts, and is exported, changes
WATCHING |= {"tau_every", "tau_prompts", "tau_new_tokens", "tau_device", "tau_keep_target"}
FREE_ON_RESUME = {"out"} | LIMITS | MACHINE | WATCHING
