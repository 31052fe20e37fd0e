"""DeepSpeed: what a run asks of it, and the only module that imports it (late: that takes seconds).

Where DeepSpeed has no call for what is needed, its insides are used here, and each such place says why.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
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
from train.core.runtime import Ranks, describe_process, local_ranks, take_device, threads_of_rank

# Ranks wait for the first one while it measures tau, exports or saves. (Where one dies, the launcher ends the others.)
PATIENCE = timedelta(hours=2)
PART = "part"  # of a group of parameters, which of the parts it is
WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")  # what a state has of each parameter


def start(config: TrainConfig) -> Ranks:
    """Start torch.distributed through DeepSpeed: as many ranks as its launcher or ``srun`` made, alone a single one.

    Raises:
        ValueError: more processes on this machine than GPUs.
    """
    describe_process(os.environ)
    if torch.accelerator.is_available():
        take_device(os.environ)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it had to find out
    import deepspeed
    from deepspeed.runtime import bf16_optimizer

    deepspeed.utils.logger.setLevel("ERROR")
    # It prints memory figures when it starts, past the logger, and collects garbage for each.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of DeepSpeed's calls
    # Of DeepSpeed's extensions none is needed here. An empty table keeps its CPU backend from compiling a shared-memory
    # all-reduce at the first start (30 s and a C++ compiler); gloo does that work.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    join_ranks(os.environ)
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    threads = threads_of_rank(config, os.environ, local_ranks(ranks.count))
    if config.threads:  # on a GPU, too: offloaded optimisers and tau_device: cpu use them
        fix_threads(config.threads)
    elif threads:
        fit_threads(threads)
    return ranks


def join_ranks(environment: Mapping[str, str]) -> None:
    """Meet the other ranks.

    Raises:
        ValueError: somebody else listens at MASTER_PORT.
    """
    import deepspeed

    try:
        own = None if "DEEPSPEED_TIMEOUT" in environment else PATIENCE  # DeepSpeed's own default is ten minutes
        deepspeed.init_distributed(verbose=False, **({} if own is None else {"timeout": own}))
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = environment.get("MASTER_PORT")
        raise ValueError(
            f"port {port} is taken, perhaps by another training on this machine: start this one with another, "
            "deepspeed --master_port 29501 train/..., or torchrun --master-port 29501 ..."
        ) from error


def stop() -> None:
    """Leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration. A "sample" is a micro-batch of packed dialogues, so its micro-batch size is 1.

    Gradients are summed over micro-batches and ranks in float32. With weights of 16 bits DeepSpeed does that from
    stage 1 on only; stage 0 therefore runs as stage 1, which splits nothing on one rank.
    """
    bf16, fp16 = config.dtype == torch.bfloat16, config.dtype == torch.float16
    zero: dict[str, Any] = {
        "stage": max(1, config.zero_stage) if bf16 or fp16 else config.zero_stage,
        "reduce_bucket_size": 50_000_000,  # numbers; DeepSpeed's default keeps 2 GB, more than a drafter's gradients
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
        # Muon is handed over as it is: DeepSpeed's own would have its orthogonal matrices clipped by their norm.
        **({"optimizer": adam} if config.optimizer == "adamw" else {"zero_allow_untested_optimizer": True}),
        # By default it clears gradients when those of the module's output arrive: those of an LM head, behind which the
        # loss is, are there before.
        "bf16": {"enabled": bf16, "immediate_grad_update": bf16 and config.trains_lm_head},
        "fp16": {"enabled": fp16},  # with a loss scale that follows overflows; steps that overflow are skipped
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "steps_per_print": 2**31,  # the loop reports
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
        parts: beginnings of weights' names; those that begin alike can have a learning rate of their own.
        lm_heads: names of matrices that are LM heads or embeddings.

    Raises:
        ValueError: ``offload`` needs more host memory than there is.
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
            groups = [own for group in groups for own in matrix_groups(group, leave)]
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
        self._float16 = config.dtype == torch.float16
        if len(groups) > 1 and self._stage in (1, 2):  # or DeepSpeed looks for all when only the first has been updated
            self.make_moments(0)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        return self._engine(*arguments, **keywords)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` over ranks and micro-batches."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Update at the boundary of the gradient accumulation; before it, count the micro-batch."""
        self._engine.step()

    def update(self, learning_rate: float, factors: Mapping[str, float] | None = None) -> Tensor:
        """The last micro-batch's ``step``; the gradient's norm before clipping (0: skipped), float64 ``[1]``.

        ``factors``: by part, its share of the learning rate.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * (factors or {}).get(group[PART], 1.0)
        norm = None
        if self._stage == 0:  # DeepSpeed clips here without telling the norm
            norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        if self._float16 and self._engine.optimizer.overflow:  # skipped, and the loss scale is lowered
            norm = torch.zeros(1)
        return torch.as_tensor(norm, dtype=torch.float64, device=self.device).reshape(1)

    def weights(self) -> dict[str, Tensor]:
        """The module's whole weights by name, in the dtype that it computes in, copied to the CPU.

        A collective: every rank has to call it, and every rank gets all weights, whatever the ZeRO stage.
        """
        import deepspeed

        weights = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            # At ZeRO-3 a rank holds a part of each weight; one at a time, so that the device never holds all of them.
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                weights[name] = value.detach().to("cpu", copy=True)
        return weights

    def kept_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """What a state has of a trained weight: Muon keeps one moment of a matrix."""
        return (WEIGHTS, *MOMENTS[: 1 if id(parameter) in self._matrices else None])

    def gather(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """One whole float32 tensor: the parameter's master weights, or a moment of them. A collective."""
        from deepspeed import utils

        if self._stage == 0:
            return parameter.detach() if kind == WEIGHTS else self._engine.optimizer.state[parameter][kind]
        if kind == WEIGHTS:
            return utils.safe_get_full_fp32_param(parameter)
        return utils.safe_get_full_optimizer_state(parameter, kind)

    def scatter(self, parameter: Any, kind: str, whole: Tensor) -> None:
        """The reverse of ``gather``: take this rank's part of a whole tensor."""
        from deepspeed import utils

        if self._stage == 0:
            self.gather(parameter, kind).copy_(whole)
        elif self._stage == 3:  # parts are rounded up to one size, which DeepSpeed forgets where it cuts a whole tensor
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
        """The optimizer's state as it is after ``steps`` steps, zero as yet; without, it would be made in the first."""
        optimizer = self._engine.optimizer
        adam = optimizer if self._stage == 0 else optimizer.optimizer
        held = [
            (value, MOMENTS[: 1 if SHAPE in group else None])
            for group in adam.param_groups
            for value in group["params"]
        ]
        if self._stage == 3:  # its groups are empty between steps
            held = [(value, MOMENTS) for value in optimizer.fp32_partitioned_groups_flat]
        for value, kinds in held:
            adam.state[value] = {"step": torch.tensor(float(steps), device=value.device)}
            adam.state[value] |= {kind: torch.zeros_like(value, requires_grad=False) for kind in kinds}
        if self._stage in (1, 2):
            optimizer._hp_optimizer_states_linked = False  # to others, perhaps
            optimizer._lazy_init_hp_params_optimizer_state()  # where each parameter's moments lie in the flat ones


def parameter_groups(module: nn.Module, parts: Sequence[str]) -> list[dict[str, Any]]:
    """The trained weights by the first of ``parts`` that their names begin with, as optimizers take them."""
    groups: list[dict[str, Any]] = [{"params": [], PART: part} for part in parts]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[next(n for n, part in enumerate(parts) if name.startswith(part))]["params"].append(parameter)
    return groups


def checkpoint_activations(module: nn.Module) -> None:
    """Make ``module`` keep only its inputs for the backward pass, which then computes everything between once more."""
    forward = module.forward

    def twice(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    module.forward = twice


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
