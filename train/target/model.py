"""The model of a target, its loss, its optimiser, its schedule and its checkpoints, for training on CPU cores."""

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.common.files import replacing_files, save_tensors
from train.configs import TargetConfig

PROGRESS = "progress.json"  # of a checkpoint, written last


def build_model(config: TargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialised Llama of the configured shape; raises ValueError if it exceeds `max_bytes` in bf16."""
    shape = config.model
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
    )
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    if size > config.max_bytes:
        raise ValueError(f"the model takes {size:,} bytes in bf16, more than max_bytes={config.max_bytes:,}")
    return model


class Optimizer:
    """Muon on the hidden matrices, AdamW on embeddings and norms, over float32 master weights.

    With `precision: bf16` the model computes in bf16 and the masters are copies; else they are its parameters.
    """

    def __init__(self, model: nn.Module, config: TargetConfig, pool: ThreadPoolExecutor) -> None:
        self.config, self.pool = config, pool
        self.working = dict(model.named_parameters())
        self.copied = next(iter(self.working.values())).dtype != torch.float32
        self.master = {n: p.detach().float().clone() if self.copied else p for n, p in self.working.items()}
        matrices = [p for n, p in self.master.items() if p.ndim == 2 and "embed" not in n]
        embeddings = [p for n, p in self.master.items() if "embed" in n]
        norms = [p for p in self.master.values() if p.ndim == 1]
        adam_groups = [{"params": embeddings, "lr": config.embed_lr}, {"params": norms, "lr": config.norm_lr}]
        adam = torch.optim.AdamW(adam_groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        # Muon takes a fifth of a step's time, matrix by matrix, so the workers share the matrices.
        shares = [matrices[i :: config.threads] for i in range(config.threads)]
        muon = partial(torch.optim.Muon, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95)
        self.parts: list[torch.optim.Optimizer] = [adam, *(muon(share) for share in shares if share)]
        self.base = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, gradients: list[Tensor], scale: float) -> float:
        """One update at `scale` times the base learning rates; returns the gradient norm."""
        for master, gradient in zip(self.master.values(), gradients, strict=True):
            master.grad = gradient
        norm = float(nn.utils.clip_grad_norm_(list(self.master.values()), self.config.grad_clip))
        for part, rates in zip(self.parts, self.base, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        list(self.pool.map(lambda part: part.step(), self.parts))
        for master in self.master.values():
            master.grad = None
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the computing model."""
        if self.copied:
            for name, parameter in self.working.items():
                parameter.copy_(self.master[name])


def lr_scale(step: int, config: TargetConfig) -> float:
    """Warm-up, constant, linear decay to zero over the last `decay_fraction` of `steps` (step counts from 0)."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    decay_steps = config.decay_fraction * config.steps
    left = config.steps - step
    return min(warm, left / decay_steps) if left < decay_steps else warm


def next_token_loss(model: LlamaForCausalLM, rows: Tensor, precision: str) -> Tensor:
    """Mean cross-entropy of every next token; logits in the computing dtype, the softmax in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@dataclasses.dataclass
class DataPosition:
    """The run's position in its data, whose order depends only on the seed and the epoch."""

    epoch: int = 0
    cursor: int = 0


@dataclasses.dataclass
class TargetProgress:
    """The part of a checkpoint beside tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    position: DataPosition = dataclasses.field(default_factory=DataPosition)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; an incomplete one has no progress.json."""
    return sorted(file.parent for file in run_dir.glob(f"checkpoint-*/{PROGRESS}") if not file.parent.suffix)


def save_target_state(run_dir: Path, optimizer: Optimizer, progress: TargetProgress) -> None:
    """Write `checkpoint-<step>`, then remove the older ones."""
    older, folder = checkpoints(run_dir), run_dir / f"checkpoint-{progress.step:08d}"
    if folder in older:  # the same state; replacing it would risk losing it
        return
    with replacing_files(folder, last=(PROGRESS,)) as temporary:
        save_tensors({n: p.detach() for n, p in optimizer.master.items()}, temporary / "model.safetensors")
        torch.save([part.state_dict() for part in optimizer.parts], temporary / "optimizer.pt")
        (temporary / PROGRESS).write_text(json.dumps(dataclasses.asdict(progress)))
    for other in older:
        shutil.rmtree(other, ignore_errors=True)


@torch.no_grad()
def load_target_state(run_dir: Path, optimizer: Optimizer) -> TargetProgress:
    """Restore the newest checkpoint into `optimizer` and its model."""
    if not (found := checkpoints(run_dir)):
        raise ValueError(f"--resume: no checkpoint in {run_dir}; start without --resume")
    weights = load_file(found[-1] / "model.safetensors")
    states = torch.load(found[-1] / "optimizer.pt", weights_only=True)
    if {name: tensor.shape for name, tensor in weights.items()} != {n: p.shape for n, p in optimizer.master.items()}:
        raise ValueError(f"{found[-1]} holds a model of another shape than the config's")
    if len(states) != len(optimizer.parts):
        raise ValueError(f"{found[-1]} was written with threads={len(states) - 1}; resume with the same number")
    for name, parameter in optimizer.master.items():
        parameter.copy_(weights[name])
    for part, state in zip(optimizer.parts, states, strict=True):
        part.load_state_dict(state)
    optimizer.publish()
    raw = json.loads((found[-1] / PROGRESS).read_text())
    return TargetProgress(**raw | {"position": DataPosition(**raw["position"])})
