"""The run configurations of train/eagle.py and train/kangaroo.py, and DeepSpeed's, derived from them."""

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from drafters.config import Config


class TrainConfig(Config):
    """What every drafter's training run has in common. All paths are relative to the working directory."""

    target: str = Field(description="folder or Hub name of the frozen target")
    revision: str | None = Field(None, description="the target's Hub revision")
    features: Path = Field(description="folder with the feature stores train/ and heldout/")
    out: Path = Field(description="run folder: logs, resumable state and, at its top, the trained drafter")

    steps: int | None = Field(None, ge=1, description="optimiser steps; the run ends at whichever limit comes first")
    epochs: int | None = Field(None, ge=1, description="passes over the training store")
    minutes: float | None = Field(
        None, gt=0, description="wall-clock limit; the schedule then follows the clock, which no two runs do alike"
    )

    batch_tokens: int = Field(ge=1, description="tokens of one optimiser step, over all ranks and micro-batches")
    gradient_accumulation: int = Field(1, ge=1, description="micro-batches a rank takes one after another in a step")
    learning_rate: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(2000, ge=0, description="linear warm-up from 0")
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    gradient_clipping: float = Field(0.5, gt=0, description="by the norm of the whole gradient")

    precision: Literal["bf16", "float32"] = Field("bf16", description="bf16 keeps float32 master weights")
    zero_stage: Literal[0, 1, 2] = 0
    threads: int | None = Field(None, ge=1, description="CPU threads of a rank; default: the cores shared out")
    loss_chunk_rows: int = Field(256, ge=1, description="rows of [rows, vocabulary] logits that exist at once")
    seed: int = 0

    log_every: int = Field(10, ge=1, description="steps between lines in metrics.jsonl and TensorBoard")
    eval_every: int = Field(1000, ge=1, description="steps between held-out evaluations; there is one at the end, too")
    heldout_tokens: int = Field(16384, ge=1, description="tokens of the held-out store that an evaluation reads")
    save_every: int = Field(1000, ge=1, description="steps between resumable checkpoints; the last two are kept")
    export_every: int = Field(1000, ge=1, description="steps between exports of the drafter; the last is at the end")

    tau_every: int | None = Field(
        None,
        ge=0,
        description="steps between runs of the real decoding loop on held-out prompts (one before and one at the end, "
        "too); null or 0: never. Their time counts neither into tokens/s nor into `minutes`, nor into its schedule",
    )
    tau_prompts: int = Field(16, ge=1, description="held-out dialogues whose first question is answered for tau")
    tau_new_tokens: int = Field(64, ge=2, description="most tokens of such an answer")
    tau_device: str | None = Field(None, description="where the target runs for tau; default: where rank 0 trains")
    tau_keep_target: bool = Field(False, description="keep the target in memory from one tau to the next")
    peak_tflops: float | None = Field(
        None, gt=0, description="bf16 peak of one device in 1e12 FLOP/s, for MFU; default: of the GPUs that we know"
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError("no limit given: set steps, epochs or minutes")
        return self


class EagleConfig(TrainConfig):
    """train/eagle.py."""

    classification_weight: float = Field(0.1, ge=0, description="w_cls of the EAGLE paper, section 3.2")
    noise: Literal["paper", "code", "none"] = "paper"
    mask_alignment: Literal["shifted", "paper-code"] = "shifted"


class KangarooConfig(TrainConfig):
    """train/kangaroo.py."""

    exit_layer: int = Field(ge=1, description="the adapter reads the hidden state after so many decoder layers")


ConfigT = TypeVar("ConfigT", bound=TrainConfig)

# Changing these between a run and its --resume leaves what was trained so far valid; any other change does not.
FREE_ON_RESUME = {
    "steps",
    "epochs",
    "minutes",
    "threads",
    "log_every",
    "eval_every",
    "heldout_tokens",
    "save_every",
    "export_every",
    "tau_every",
    "tau_prompts",
    "tau_new_tokens",
    "tau_device",
    "tau_keep_target",
    "peak_tflops",
}


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration. A "sample" is a micro-batch of packed dialogues, so its micro-batch size is 1."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.gradient_clipping,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": config.learning_rate,
                "betas": list(config.betas),
                "weight_decay": config.weight_decay,
                "torch_adam": True,  # DeepSpeed's own Adam would be compiled at the first start
            },
        },
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": {"stage": config.zero_stage},
        "steps_per_print": 2**31,  # the loop reports
    }
