"""The configuration of a target's training run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from drafters.config import Amount, Config, Layers, Length, Seed, Size, Vocabulary, Width


class ModelShape(Config):
    """Shape of the model, a Llama."""

    vocab_size: Vocabulary = Field(default=4096, ge=300)
    hidden_size: Width = Field(default=256, ge=8)
    layers: Layers = Field(default=12, ge=1)
    heads: Width = Field(default=8, ge=1)
    kv_heads: Width = Field(default=4, ge=1)
    head_dim: Width = Field(default=32, ge=2, multiple_of=2)
    intermediate_size: Width = Field(default=480, ge=8)
    max_positions: Length = Field(default=2048, ge=16)

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class TargetConfig(Config):
    """One training run, complete."""

    name: str
    corpus: Path = Path("runs/stdlib")
    tokenizer: str | None = None  # the target's folder, for a draft model; default: one made for the corpus
    run_dir: Path
    final_dir: Path
    model: ModelShape = Field(default_factory=ModelShape)
    max_bytes: int = Field(default=16_000_000, description="largest allowed size of the weights in bf16")
    steps: Amount = Field(ge=1)
    warmup_steps: Amount = Field(default=100, ge=0)
    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    seq_len: Length = Field(default=512, ge=8)
    batch_rows: Size = Field(default=8, ge=1)
    micro_rows: Size = Field(default=1, ge=1, description="rows of one worker's forward")
    muon_lr: float = Field(default=0.02, gt=0)
    embed_lr: float = Field(default=3e-3, gt=0)
    norm_lr: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    precision: Literal["auto", "float32", "autocast", "bf16"] = "auto"
    threads: Size = Field(default=2, ge=1, description="workers, each with its own rows and one core")
    seed: Seed = 0
    eval_every: Amount = Field(default=200, ge=1)
    eval_tokens: Amount = Field(default=40_000, ge=1)
    save_minutes: float = Field(default=5, ge=0)
    export_minutes: float = Field(default=10, ge=0)

    @model_validator(mode="after")
    def _check(self) -> TargetConfig:
        if self.batch_rows % self.micro_rows:
            raise ValueError(f"batch_rows ({self.batch_rows}) must be a multiple of micro_rows ({self.micro_rows})")
        if self.seq_len > self.model.max_positions:
            raise ValueError(f"seq_len ({self.seq_len}) exceeds model.max_positions ({self.model.max_positions})")
        return self
