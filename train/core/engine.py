"""The only module that uses DeepSpeed: its configuration, its engine, and the engine's state as whole tensors.

DeepSpeed is imported within functions, because that takes seconds. Comments mark each use of its private parts.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.common.threads import fit_threads, fix_threads
from drafters.common.wording import size_text
from train.core.config import TrainConfig
from train.core.muon import SHAPE, Muon, matrix_groups
from train.core.optimizer import exact_buffers
from train.core.runtime import Ranks, describe_process, dtype_of, local_ranks, take_device, threads_of_rank

# Ranks wait while the first one measures tau, exports or saves. (If a rank dies, the launcher ends the others.)
PATIENCE = timedelta(hours=2)
PART = "part"  # key of a parameter group: the prefix of its weights' names
WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")  # kinds of tensors in a state, for each parameter


def start(config: TrainConfig) -> Ranks:
    """Start torch.distributed through DeepSpeed, with the ranks of its launcher or ``srun``, or a single one.

    Raises:
        ValueError: more processes on this machine than GPUs, or MASTER_PORT is taken.
    """
    describe_process(os.environ)
    if torch.accelerator.is_available():
        take_device(os.environ)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to find out
    import deepspeed
    from deepspeed.runtime import bf16_optimizer

    deepspeed.utils.logger.setLevel("ERROR")
    # It prints memory figures when it starts, without the logger, and collects garbage for each.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # from DeepSpeed
    # No extension of DeepSpeed's is needed. An empty table keeps its CPU backend from compiling a shared-memory
    # all-reduce at the first start (30 s and a C++ compiler); gloo does that instead.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    timeout = {} if "DEEPSPEED_TIMEOUT" in os.environ else {"timeout": PATIENCE}  # DeepSpeed's default is ten minutes
    try:
        deepspeed.init_distributed(verbose=False, **timeout)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"port {os.environ.get('MASTER_PORT')} is taken, perhaps by another training on this machine: start with "
            "deepspeed --master_port 29501 train/..., or torchrun --master-port 29501 ..."
        ) from error
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    threads = threads_of_rank(os.environ, local_ranks(ranks.count))
    if config.threads:  # also on a GPU: for offloaded optimisers and tau_device: cpu
        fix_threads(config.threads)
    elif threads:
        fit_threads(threads)
    return ranks


def stop() -> None:
    """Leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. Its "sample" is a micro-batch of packed dialogues, so its micro-batch size is 1.

    Gradients are summed over micro-batches and ranks in float32. With 16-bit weights DeepSpeed does that only from
    stage 1 on, so stage 0 runs as stage 1, which splits nothing on one rank.
    """
    bf16, fp16 = dtype_of(config) == torch.bfloat16, dtype_of(config) == torch.float16
    zero: dict[str, Any] = {
        "stage": max(1, config.zero_stage) if bf16 or fp16 else config.zero_stage,
        "reduce_bucket_size": 50_000_000,  # elements; DeepSpeed's default keeps 2 GB, more than a drafter's gradients
    }
    host = {"device": "cpu", "pin_memory": torch.accelerator.is_available()}
    if config.offload != "none":
        zero["offload_optimizer"] = host
    if config.offload == "parameters":
        zero["offload_param"] = host
    adam = {
        "type": "AdamW",
        "params": {
            **adam_settings(config),
            "torch_adam": True,  # DeepSpeed's own Adam would be compiled at the first start
        },
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.gradient_clipping,
        # Muon is our own: DeepSpeed's would have its orthogonal matrices clipped by their norm.
        **({"optimizer": adam} if config.optimizer == "adamw" else {"zero_allow_untested_optimizer": True}),
        # By default DeepSpeed clears gradients when the gradient of the module's output arrives. The LM head is behind
        # the output, so its gradient arrives earlier and would be lost.
        "bf16": {"enabled": bf16, "immediate_grad_update": bf16 and config.trains_lm_head},
        "fp16": {"enabled": fp16},  # with a loss scale that follows overflows; steps that overflow are skipped
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "steps_per_print": 2**31,  # never: the loop reports
    }


def adam_settings(config: TrainConfig) -> dict[str, Any]:
    """AdamW's arguments."""
    return {
        "lr": config.learning_rate,
        "betas": list(config.betas),
        "weight_decay": config.weight_decay,
        "fused": True,  # as fast as DeepSpeed's own, also on the host
    }


class Engine:
    """DeepSpeed's engine around a module: its backward pass, its update, and its state as whole tensors.

    Args:
        parts: prefixes of weights' names; the weights of each prefix can have their own learning rate.
        lm_heads: names of LM heads and embeddings.

    Raises:
        ValueError: ``offload`` needs more host memory than is free.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, parts: Iterable[str] = (), lm_heads: Collection[str] = ()
    ) -> None:
        import deepspeed

        if config.offload != "none":
            _check_host_memory(module, config)
        if config.activation_checkpointing:
            checkpoint_activations(module)
        groups, muon = parameter_groups(module, [*parts, ""]), None
        if config.optimizer == "muon":
            leave = [module.get_parameter(name) for name in lm_heads]
            groups = [part for group in groups for part in matrix_groups(group, leave)]
            muon = Muon(groups, **adam_settings(config))
        self._matrices = {id(weights) for group in groups if SHAPE in group for weights in group["params"]}
        with exact_buffers(module):
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=muon,
                model_parameters=groups if muon is None else None,
                config=deepspeed_config(config),
                dist_init_required=False,
            )
        self.module: nn.Module = module
        self.device: torch.device = self._engine.device
        self._stage: int = self._engine.zero_optimization_stage()
        self._float16 = dtype_of(config) == torch.float16
        if len(groups) > 1 and self._stage in (1, 2):  # else DeepSpeed wants all after it has updated the first
            self.make_moments(0)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        return self._engine(*arguments, **keywords)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` over ranks and micro-batches."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Update after the last micro-batch of a step; after earlier ones, only count."""
        self._engine.step()

    def update(self, learning_rate: float, factors: Mapping[str, float] | None = None) -> Tensor:
        """``step`` for the last micro-batch; return the gradient norm before clipping, float64 ``[1]`` (0: skipped).

        ``factors``: factor on the learning rate by part.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * (factors or {}).get(group[PART], 1.0)
        norm = None
        if self._stage == 0:  # DeepSpeed clips here without returning the norm
            norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        if self._float16 and self._engine.optimizer.overflow:  # the step was skipped, and the loss scale lowered
            norm = torch.zeros(1)
        return torch.as_tensor(norm, dtype=torch.float64, device=self.device).reshape(1)

    def weights(self) -> dict[str, Tensor]:
        """The module's whole weights by name, in its dtype, copied to the CPU, at every ZeRO stage.

        A collective: every rank must call it, and gets all weights.
        """
        import deepspeed

        weights = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            # At ZeRO-3 a rank holds a part of each weight. One weight at a time, so that all never have to fit.
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                weights[name] = value.detach().to("cpu", copy=True)
        return weights

    def kept_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The kinds of tensors that a state holds for a trained weight; Muon has one moment of a matrix."""
        return (WEIGHTS, *MOMENTS[: 1 if id(parameter) in self._matrices else None])

    def gather(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Return a whole float32 tensor: the parameter's master weights, or a moment. A collective."""
        from deepspeed import utils

        if self._stage == 0:
            return parameter.detach() if kind == WEIGHTS else self._engine.optimizer.state[parameter][kind]
        if kind == WEIGHTS:
            return utils.safe_get_full_fp32_param(parameter)
        return utils.safe_get_full_optimizer_state(parameter, kind)

    def scatter(self, parameter: Any, kind: str, whole: Tensor) -> None:
        """Take this rank's part of a whole tensor, the reverse of ``gather``."""
        from deepspeed import utils

        if self._stage == 0:
            self.gather(parameter, kind).copy_(whole)
        elif self._stage == 3:  # parts have one size, rounded up, which DeepSpeed ignores when it cuts
            size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
            part = whole.flatten()[rank * size : (rank + 1) * size]
            part = nn.functional.pad(part, (0, size - len(part)))
            if kind == WEIGHTS:
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, kind)
        elif kind == WEIGHTS:
            utils.safe_set_full_fp32_param(parameter, whole)
        else:
            utils.safe_set_full_optimizer_state(parameter, whole, kind)

    def make_moments(self, steps: int) -> None:
        """Make the optimizer's state, which the first step would make, with zero moments, after ``steps`` steps."""
        optimizer = self._engine.optimizer
        adam = optimizer if self._stage == 0 else optimizer.optimizer
        held = [
            (value, MOMENTS[: 1 if SHAPE in group else None])
            for group in adam.param_groups
            for value in group["params"]
        ]
        if self._stage == 3:  # whose groups are empty between steps
            held = [(value, MOMENTS) for value in optimizer.fp32_partitioned_groups_flat]
        for value, kinds in held:
            adam.state[value] = {"step": torch.tensor(float(steps), device=value.device)}
            adam.state[value] |= {kind: torch.zeros_like(value, requires_grad=False) for kind in kinds}
        if self._stage in (1, 2):
            # Link each parameter to its moments in the flat tensors, again if it was linked before.
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()


def parameter_groups(module: nn.Module, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: the trained weights by the first of ``parts`` that their names begin with."""
    groups: list[dict[str, Any]] = [{"params": [], PART: part} for part in parts]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[next(n for n, part in enumerate(parts) if name.startswith(part))]["params"].append(parameter)
    return groups


def checkpoint_activations(module: nn.Module) -> None:
    """Make ``module`` keep only its inputs for the backward pass, which computes the activations again."""
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _check_host_memory(module: nn.Module, config: TrainConfig) -> None:
    """Raise ValueError unless the offloaded state fits: float32 weights, gradients and two moments; weights twice with
    ``offload: parameters``."""
    count = sum(parameter.numel() for parameter in module.parameters())
    parts = local_ranks(1) / torch.distributed.get_world_size()  # of the whole state, on this machine
    need = round(count * (20 if config.offload == "parameters" else 16) * parts)
    free = psutil.virtual_memory().available
    if need > free:
        raise ValueError(
            f"offload: {config.offload} keeps {size_text(need)} of {count:,} weights' state in this host's memory, "
            f"which has {size_text(free)} free; use more hosts, or offload: none with a higher zero_stage"
        )
