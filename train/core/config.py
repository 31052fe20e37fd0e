"""The keys of every training run; the methods' own keys are in train/<method>.py. Imports no torch."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from data_prep.store.manifest import read_header
from drafters.common.states import disorder
from drafters.config import Amount, Config, Dtype, Length, Seed, Threads, Vocabulary, Width
from drafters.heads.shape import HeadShape


class OnlineData(Config):
    """``data:`` of a run with ``features: online``: the dialogues, and how the target runs."""

    train: str = Field(description="ShareGPT file or Hub dataset (owner/name[:config][:split])")
    heldout: str = Field(description="the same, of held-out dialogues")
    max_length: Length = Field(2048, ge=2, description="tokens of a dialogue; the rest is cut off")
    limit: Amount | None = Field(None, ge=1, description="dialogues of each split, the first ones; default: all")
    chat_template: str | None = Field(None, description="file with a Jinja template instead of the tokenizer's own")
    target_dtype: Dtype = Field("auto", description="dtype of the target; auto: bf16 if it is fast here")
    target_device_map: Literal["auto"] | None = Field(None, description="auto: over all GPUs, in a run of one process")
    target_batch_tokens: Amount = Field(8192, ge=1, description="tokens of one forward of the target, padding included")
    disk_gb: float | None = Field(None, gt=0, description="GB for a cache of the dialogues' states; default: no cache")


class Lora(Config):
    """``lora:``: train low-rank matrices beside frozen projections, by peft."""

    r: int = Field(16, ge=1, le=4096, description="rank of the matrices")
    alpha: Width = Field(32, ge=1, description="their product is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = Field("all-linear", description="names of modules, in peft's format")


TENSORBOARD: Literal["tensorboard"] = "tensorboard"  # the tracker that training installs
DEVICE = r"(cpu|cuda|mps|xpu|hpu|npu|mlu|musa)(:[1-9]?\d)?"  # as torch.device knows them
Beta = Annotated[float, Field(ge=0, lt=1)]


def _in_float32(weight: float) -> float:
    if weight and not 1e-6 <= weight <= 1e6:
        raise ValueError("give 0, or a number from 0.000001 to 1,000,000: others leave the range of float32")
    return weight


# A factor of a loss. Outside of these bounds products and quotients of two are infinite or NaN in float32, and the run
# would end at its first step with advice on the learning rate.
Weight = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]
Decay = Annotated[float, Field(ge=0.01, le=1)]  # a factor that is applied up to 16 times
LONG = 4096  # most tokens of a dialogue up to which block heads attend to all of it by default
WINDOW = 2048  # tokens of a block head's window for longer dialogues; the published heads have it
OLDER_KEYS = {"tap_layers": "taps"}  # names that keys of a head had beside the others


class TrainConfig(Config):
    """The keys of every drafter's training run. All paths are relative to the working directory."""

    drafter: ClassVar[str]  # the method; also the name of its script in train/
    older: ClassVar[dict[str, Any]] = {}  # by key, what runs did before the key existed, if not its default
    extends: ClassVar[tuple[str, ...]] = ()  # methods whose heads init_from takes, too; new parts stay new
    sizes_lm_head: ClassVar[bool] = False  # whether draft_vocab is the size of an LM head of the drafter's own

    head: HeadShape = Field(HeadShape(), description="the shape of the head; its keys may also stand beside it")

    target: str = Field(description="folder or Hub name of the frozen target")
    revision: str | None = Field(None, description="the target's Hub revision")
    features: Literal["online"] | Path = Field(
        union_mode="left_to_right",
        description="folder with the feature stores train/ and heldout/; or online: computed during training",
    )
    data: OnlineData | None = Field(None, description="the dialogues, with features: online")
    init_from: str | None = Field(
        None, description="a trained drafter to start from: folder or Hub repository; default: new weights"
    )
    lora: Lora | None = Field(
        None, description="train an adapter of the drafter in init_from, for one domain: docs/lora.md"
    )
    out: Path = Field(description="run folder: logs, resumable state and the trained drafter")

    steps: Amount | None = Field(None, ge=1, description="optimiser steps; the run ends at the first of its limits")
    epochs: Amount | None = Field(None, ge=1, description="passes over the training store")
    minutes: float | None = Field(None, gt=0, le=10_000_000, description="wall-clock limit, also of the schedule")

    batch_tokens: Amount = Field(ge=1, description="tokens of one optimiser step, over all ranks and micro-batches")
    gradient_accumulation: int = Field(1, ge=1, le=1024, description="micro-batches of a rank in one step")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: for matrices; docs/training-options.md")
    learning_rate: float = Field(gt=0)
    first_learning_rate: float | None = Field(
        None, gt=0, description="the head's before any adaptation: train.adapt records it, and uses a share of it"
    )
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0, le=100)
    warmup_steps: Amount = Field(2000, ge=0, description="linear warm-up from 0")
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    gradient_clipping: float = Field(0.5, ge=1e-6, description="by the norm of the whole gradient")

    weight_average: float | None = Field(
        None, ge=0, lt=1, description="decay of a moving average of the weights, which is judged and exported instead"
    )

    precision: Literal["auto", "bf16", "float16", "float32"] = Field(
        "auto", description="auto: bf16 if the device has instructions for it; 16 bits have float32 master weights"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="split over the ranks: 1 optimizer, 2 gradients, 3 weights")
    offload: Literal["none", "optimizer", "parameters"] = Field("none", description="to host memory; see zero_stage")
    activation_checkpointing: bool = Field(False, description="compute activations again in the backward pass")
    threads: Threads | None = Field(None, description="CPU threads of a rank; default: OMP_NUM_THREADS, or by load")
    loss_chunk_rows: Amount | None = Field(None, ge=1, description="rows of logits in memory; default: by the device")
    seed: Seed = 0
    verify: bool = Field(True, description="check each shard's SHA-256 once, during training")

    draft_vocab: Vocabulary | None = Field(
        None, ge=1, description="draft only with this number of tokens, the most frequent of the answers"
    )
    loss_vocab: Vocabulary | None = Field(
        None, ge=1, description="compute the loss over this number of tokens, the most frequent of the answers"
    )
    classification_loss: Literal["cross_entropy", "total_variation", "lk_alpha", "lk_lambda"] = Field(
        "cross_entropy", description="compares the drafter's distribution with the target's: docs/losses.md"
    )
    lk_eta: float = Field(3.0, ge=0, le=1e6, description="of lk_lambda: how early it is the total variation")
    top_k_weight: Weight = Field(0.0, description="weight of HASS's Top-K loss, added to the classification loss")
    top_k: Vocabulary = Field(10, ge=1, description="tokens in that loss, the target's most likely")

    log_every: Amount = Field(10, ge=1, description="steps between lines in metrics.jsonl and TensorBoard")
    eval_every: Amount = Field(1000, ge=1, description="steps between held-out evaluations; also at the end")
    heldout_tokens: Amount = Field(16384, ge=1, description="tokens of the held-out store in an evaluation")
    save_every: Amount = Field(1000, ge=1, description="steps between resumable checkpoints; the last two are kept")
    export_every: Amount = Field(1000, ge=1, description="steps between exports of the drafter; also at the end")

    # Its time counts neither in tokens/s nor in `minutes`. It is also measured before the first step and at the end.
    tau_every: Amount | None = Field(
        None, ge=0, description="steps between runs of the real decoding loop on held-out prompts; null or 0: never"
    )
    tau_prompts: Amount = Field(16, ge=1, description="held-out dialogues whose first question is answered for tau")
    tau_new_tokens: Length = Field(64, ge=2, description="most tokens of such an answer")
    tau_device: str | None = Field(None, description="where the target runs for tau; default: where rank 0 trains")
    tau_keep_target: bool = Field(False, description="keep the target in memory between measurements")
    keep: Literal["best", "last"] | None = Field(
        None, description="exported weights: those with the best tau, or the last; null: best where tau is measured"
    )
    patience: Amount | None = Field(None, ge=1, description="stop after this number of measurements without a gain")
    trackers: list[Literal["tensorboard", "mlflow", "swanlab", "trackio", "wandb"]] = Field(
        [TENSORBOARD], description="where the figures go, beside metrics.jsonl: docs/watching-training.md"
    )
    peak_tflops: float | None = Field(None, gt=0, description="bf16 peak of one device, 1e12 FLOP/s; default: if known")

    @field_validator("tau_device")
    @classmethod
    def _is_a_device(cls, value: str | None) -> str | None:
        if not re.fullmatch(DEVICE, value or "cpu"):
            raise ValueError("not a device; give for example cpu, cuda, cuda:1 or null")
        return value

    @property
    def keeps_best(self) -> bool:
        """Whether the weights with the best tau are exported, and not the last ones."""
        return self.keep == "best" or (self.keep is None and bool(self.tau_every))

    @property
    def computes_in(self) -> str:
        """The precision that the drafter computes in; `train.core.runtime.dtype_of` is its dtype on this machine."""
        return self.precision

    def last_step(self, steps_in: Callable[[int], int]) -> int | None:
        """The last step by ``steps`` or ``epochs``; None: only the clock limits the run.

        ``steps_in``: returns the number of steps in a number of epochs.
        """
        limits = [self.steps] if self.steps else []
        limits += [steps_in(self.epochs)] if self.epochs else []
        return min(limits, default=None)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers after which the drafter reads hidden states, beside the features: 2 is after the second."""
        return self.head.reads

    def settled(self, layers: Callable[[], int]) -> Self:
        """Return this config with what it leaves to the target; ``layers`` returns the target's number of layers."""
        if "taps" not in type(self.head).model_fields or self.taps:
            return self
        return self.model_copy(update={"head": self.head.settled(layers())})

    @property
    def shape(self) -> HeadShape:
        """The shape of the trained head, as config.json stores it."""
        return self.head

    @property
    def one_pass_until(self) -> float:
        """Share of the run that trains one pass of an unrolled head."""
        return 0.0

    @property
    def loss_tokens(self) -> int | None:
        """Number of tokens that the loss is over; None: all."""
        return (self.draft_vocab if self.sizes_lm_head else None) or self.loss_vocab

    @property
    def starts_in_target(self) -> bool:
        """Whether the first weights are in the target's own files."""
        return False

    @property
    def solves_weights(self) -> bool:
        """Whether some new weights are solved for from the training data."""
        return getattr(self, "start", None) == "regression"

    @property
    def measured_by(self) -> dict[str, Any]:
        """The trained drafter, as an entry of eval's configs."""
        return {"drafter": self.drafter, "checkpoint": str(self.out)}

    @property
    def measured_target(self) -> dict[str, Any]:
        """The drafter's target, as an entry of eval's configs."""
        return {"path": self.target} | ({"revision": self.revision} if self.revision else {})

    @property
    def trains_lm_head(self) -> bool:
        """Whether the loss multiplies with trained weights outside of the module's forward."""
        return False

    @property
    def provenance_file(self) -> str:
        """The file of an export with its provenance."""
        return "config.json"

    @property
    def lora_base(self) -> str | None:
        """The base of ``lora``: folder or Hub repository."""
        return self.init_from

    @property
    def weights_file(self) -> str:
        """The file of an export with the weights."""
        return "adapter_model.safetensors" if self.lora else "model.safetensors"

    @property
    def other_models(self) -> dict[str, str]:
        """Models that are loaded beside the target, by key."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _gather_head(cls, data: Any) -> Any:
        known = isinstance(data, dict) and isinstance(data.get("head", {}), dict | HeadShape)
        return cls.gathered(data) if known else data

    @classmethod
    def gathered(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Move keys of the head that stand at the top, as in older configs, under ``head``."""
        kind: Any = cls.model_fields["head"].annotation
        head = data.get("head", {})
        given = head.model_dump() if isinstance(head, HeadShape) else head
        flat = {OLDER_KEYS.get(key, key): key for key in data if key not in cls.model_fields}
        flat = {key: old for key, old in flat.items() if key in kind.model_fields}
        for key in flat.keys() & given.keys():
            raise ValueError(f"{flat[key]} and head.{key} are both given; leave one of them out")
        rest = {key: value for key, value in data.items() if key not in flat.values()}
        return rest | {"head": kind.usual | {key: data[old] for key, old in flat.items()} | given}

    @field_validator("head")
    @classmethod
    def _reads_in_order(cls, head: HeadShape) -> HeadShape:
        if wrong := disorder(head.reads):
            raise ValueError(f"taps: {wrong} (found {list(head.reads)})")
        return head

    @model_validator(mode="after")
    def _can_keep(self) -> Self:
        if self.keep == "best" and not self.tau_every:
            raise ValueError("keep: best is chosen by tau, and tau_every is null; set tau_every=500, or keep=last")
        if self.patience is not None and not self.keeps_best:
            raise ValueError(
                f"patience is {self.patience}, and nothing is chosen by tau (keep: {self.keep or 'last'}, tau_every: "
                f"{self.tau_every}); set keep=best and tau_every=500, or leave patience out"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError("no limit given: set steps, epochs or minutes")
        if self.solves_weights and self.init_from is not None:
            raise ValueError(f"start: regression replaces weights of init_from: {self.init_from}; set start=random")
        if self.lora is not None and self.lora_base is None:
            raise ValueError("lora needs a trained drafter: set init_from, or leave lora out")
        if self.lora is not None and self.trains_lm_head:  # the loss multiplies with its weights as they are
            raise ValueError("lora leaves LM heads as they are, and a head like this trains its own; leave lora out")
        if self.lora is not None and self.draft_vocab is not None and not self.sizes_lm_head:
            raise ValueError(f"draft_vocab is {self.draft_vocab}, and with lora that of init_from stays; leave it out")
        if self.features == "online" and self.data is None:
            raise ValueError("features: online needs dialogues: set data.train and data.heldout, or give a folder")
        if self.features != "online" and self.data is not None:
            raise ValueError(f"data is only read with features: online, and features is {str(self.features)!r}")
        stage = self.zero_stage
        if self.offload == "optimizer" and stage == 0:
            raise ValueError("offload: optimizer needs zero_stage: 1, 2 or 3 (it is 0); set one, or offload: none")
        if self.offload == "parameters" and stage != 3:
            raise ValueError(f"offload: parameters needs zero_stage: 3 (it is {stage}); set it, or offload: optimizer")
        if self.optimizer == "muon" and (stage == 3 or self.offload != "none"):
            raise ValueError("optimizer: muon needs zero_stage: 0, 1 or 2 and offload: none; set optimizer=adamw")
        if self.optimizer == "muon" and self.lora is not None:
            raise ValueError("optimizer: muon is for whole matrices, and lora trains parts; set optimizer=adamw")
        if self.weight_average is not None and stage == 3:
            raise ValueError("weight_average needs zero_stage: 0, 1 or 2, where each rank has whole weights (it is 3)")
        return self


def with_windows(data: Any) -> Any:
    """Add ``sliding_window`` to an unchecked config for dialogues above ``LONG`` tokens, unless it or ``init_from``
    decides."""
    head = data.get("head", {}) if isinstance(data, dict) else None
    if not isinstance(head, dict) or data.get("init_from") or "sliding_window" in {*data, *head}:
        return data
    longest: Any = None
    if isinstance(online := data.get("data"), dict):
        longest = online.get("max_length")
    elif isinstance(features := data.get("features"), str | Path):
        with suppress(ValueError, OSError):  # reported when the features are opened
            longest = read_header(Path(features) / "train").max_length
    return data | {"sliding_window": WINDOW} if isinstance(longest, int) and longest > LONG else data


# Keys that may change on --resume; any other change would make the earlier training invalid.
LIMITS = {"steps", "epochs", "minutes"}
MACHINE = {"gradient_accumulation", "zero_stage", "offload", "activation_checkpointing", "loss_chunk_rows", "threads"}
MACHINE |= {"precision", "data.target_batch_tokens", "data.target_device_map", "data.target_dtype", "data.disk_gb"}
WATCHING = {"log_every", "eval_every", "heldout_tokens", "save_every", "export_every", "peak_tflops", "verify"}
WATCHING |= {"draft_vocab"}  # of the exported drafter, unless its own LM head has this size (sizes_lm_head)
WATCHING |= {"tau_every", "tau_device", "tau_keep_target"}
WATCHING |= {"keep", "patience", "trackers"}
FREE_ON_RESUME = {"out"} | LIMITS | MACHINE | WATCHING
