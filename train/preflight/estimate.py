"""Estimate a training run's memory, disk and FLOPs from shapes.

The memory of the forward and backward pass is traced: the run's own code processes one micro-batch of tensors without
contents (on the device "meta"), and the allocation and release of every tensor is counted.
"""

import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig
from transformers.modeling_utils import local_torch_dtype

from data_prep.common.ranks import find_rank
from data_prep.store.reader import StoredDialogue
from drafters.common.wording import size_text
from drafters.model.ends import FrozenEnds, LMHead
from drafters.model.files import free_memory, load_config_only, meta_model, resolve_device, resolve_dtype
from drafters.model.stock import logit_change
from train.core.attention import as_if_on
from train.core.config import TrainConfig
from train.core.engine import checkpoint_activations, deepspeed_config
from train.core.losses import Pairs, default_chunk_rows, two_chunks_only
from train.core.optimizer import exact_buffers
from train.core.runtime import dtype_of, local_ranks, rank_device
from train.core.task import Task, make_task
from train.data.packing import Batch, collate

MEASURED_STEPS = 3
TRACED_LAYERS = 4  # of a deeper head, this number and one less are traced: EAGLE-3's steps take seconds a layer
SIZES = ("layers", "heads", "markov_rank", "draft_vocab")  # keys of training configs that a head's size depends on


def meta_ends(config: PretrainedConfig, device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> FrozenEnds:
    """Embeddings and LM head of a target of this configuration, without contents, or random on another device."""
    vocab, hidden = config.vocab_size, config.hidden_size
    embed = nn.Embedding(vocab, hidden, device=device, dtype=dtype).requires_grad_(False)
    own = torch.randn(vocab, hidden, device=device, dtype=dtype)
    model: Any = meta_model(config)
    has_bias = model.get_output_embeddings().bias is not None
    bias = torch.randn(vocab, device=device, dtype=dtype) if has_bias else None
    head = LMHead(embed.weight if config.tie_word_embeddings else own, logit_change(model), bias)
    return FrozenEnds(embed, head, config, "")


class RandomStore:
    """Random tokens and states of given lengths, made by each read, always the same. The last tokens of each dialogue,
    a share of ``trained``, belong to answers."""

    def __init__(self, config: TrainConfig, target: PretrainedConfig, lengths: list[int], trained: float = 1.0) -> None:
        self.config, self.target, self.lengths, self.trained = config, target, lengths, trained

    def __getitem__(self, index: int) -> StoredDialogue:
        generator, length = torch.Generator().manual_seed(index), self.lengths[index]

        def states() -> Tensor:
            return torch.randn(length, self.target.hidden_size, generator=generator).to(dtype_of(self.config))

        return StoredDialogue(
            input_ids=torch.randint(self.target.vocab_size, (length,), generator=generator),
            loss_mask=torch.arange(length) >= min(round((1 - self.trained) * length), length - 1),
            features=states(),
            taps={layer: states() for layer in self.config.taps},
        )

    def batch(self) -> Batch:
        """All dialogues in one row, as in training."""
        store: Any = self
        return collate(store, list(range(len(self.lengths))), self.config.taps)


def meta_task(config: TrainConfig, target: PretrainedConfig) -> Task:
    """The task with a module without contents."""
    with torch.device("meta"):
        return make_task(config, meta_ends(target))


def parameters(module: nn.Module) -> int:
    """The number of weights."""
    return sum(weights.numel() for weights in module.parameters())


def target_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """A target's parameters, and those that one token uses: no embeddings, two experts of eight."""
    total = active = 0
    for name, weights in meta_model(config).named_parameters():
        total += weights.numel()
        if weights.dim() < 2 or ("embed_tokens" in name and not config.tie_word_embeddings):
            continue
        share = 1.0
        if ".experts." in name:
            experts = getattr(config, "num_local_experts", None) or config.num_experts
            share = config.num_experts_per_tok / experts
        active += round(weights.numel() * share)
    return total, active


# ------------------------------------------------------------------------------------------- memory


def memory_parts(config: TrainConfig, task: Task, ranks: int) -> dict[str, int]:
    """Bytes in a rank's memory during the whole run: DeepSpeed's tensors, by ZeRO stage, and embeddings and LM head.

    Bytes per weight in bf16: weight 2, float32 master 4, Adam's moments 8, gradient 2, float32 sum of gradients 4. Muon
    has one moment of a matrix, 4 bytes.
    Stage 1 (in bf16 also stage 0) splits masters and moments over the ranks, stage 2 the sums, stage 3 all. In float32
    masters exist from stage 1 on. docs/training-memory.md has the table, and a test of the engine counts it.
    """
    named = {name: weights for name, weights in task.module.named_parameters() if weights.requires_grad}
    trained = [weights.numel() for weights in named.values()]
    matrices = (weights.numel() for name, weights in named.items() if weights.dim() == 2 and name not in task.lm_heads)
    moments = 2 * sum(trained) - (sum(matrices) if config.optimizer == "muon" else 0)
    count, largest, frozen = sum(trained), max(trained), parameters(task.module) - sum(trained)
    settings = deepspeed_config(config)["zero_optimization"]
    stage = int(settings["stage"])
    width = dtype_of(config).itemsize
    part = count // ranks if stage >= 1 else count
    gradients = {
        0: width * count,
        1: (width + 4) * count,
        2: 4 * (part + largest),  # one weight's gradient is being summed
        3: 4 * (part + int(settings["reduce_bucket_size"])),
    }[stage]
    on_host = config.offload != "none"
    ends_count = task.ends.embed.weight.numel() * (1 if task.ends.config.tie_word_embeddings else 2)
    return {
        "weights": 0 if config.offload == "parameters" else width * (frozen + (part if stage == 3 else count)),
        "float32 masters": 0 if on_host or stage == 0 else 4 * part,
        "moments": 0 if on_host else 4 * (moments // ranks if stage >= 1 else moments),
        "gradients": gradients - (4 * part if on_host and stage >= 2 else 0),
        "embedding and LM head": width * ends_count,
    } | ({} if config.weight_average is None else {"weight average": 4 * count})


def pass_memory(
    config: TrainConfig, target: PretrainedConfig, lengths: list[int], checkpointing: bool = False, on_gpu: bool = False
) -> dict[str, int]:
    """Peak bytes of a forward and backward pass, without weights and gradients.

    Beyond ``TRACED_LAYERS`` each layer adds as much as the last one traced.

    Args:
        lengths: tokens of the micro-batch's dialogues; every position is trained.
        checkpointing: the backward pass computes the module's activations again.
        on_gpu: attention is the fused kernel, which keeps no scores; the default chunk of the loss is a GPU's.

    Returns:
        ``batch``: the micro-batch; ``loss``: the loss's own peak, its rows of logits; ``pass``: all.
    """
    more = getattr(config, "layers", 1) - TRACED_LAYERS
    if more <= 0:
        return _traced(config, target, lengths, checkpointing, on_gpu)
    shallow = (config.model_copy(update={"layers": TRACED_LAYERS - less}) for less in (1, 0))
    before, last = (_traced(each, target, lengths, checkpointing, on_gpu) for each in shallow)
    return {name: size + more * (size - before[name]) for name, size in last.items()}


def _traced(
    config: TrainConfig, target: PretrainedConfig, lengths: list[int], checkpointing: bool, on_gpu: bool
) -> dict[str, int]:
    dtype = dtype_of(config)
    with (
        torch.device("meta"),
        local_torch_dtype(dtype),
        torch.random.fork_rng(devices=[]),
        as_if_on("cuda" if on_gpu else "cpu"),
        two_chunks_only(),
    ):
        ends = meta_ends(target, dtype=dtype)
        task = _with_loss_ids(make_task(config, ends))
        task.heads.limit = config.loss_chunk_rows or default_chunk_rows(task.heads.sliced, on_gpu)
        for weights in task.module.parameters():
            if weights.requires_grad:
                # ``memory_parts`` counts gradients.
                weights.register_post_accumulate_grad_hook(lambda weights: setattr(weights, "grad", None))
        with PeakMemory() as memory:
            batch = RandomStore(config, target, lengths).batch()
            given = memory.now
            batch = task.choose_most(batch)
            if checkpointing:
                checkpoint_activations(task.module)
            pairs = task.pairs(task.module, batch, seed=0)
            shapes = {name: (each.shape, each.dtype) for name, each in vars(pairs).items() if each is not None}
            scalar = task.losses(pairs)["loss"]
            del pairs  # as in training, the losses keep what they need
            scalar.backward()
            whole = memory.peak
        pairs = Pairs(**{name: torch.empty(shape, dtype=kind) for name, (shape, kind) in shapes.items()})
        with PeakMemory() as memory:
            predicted = torch.empty_like(pairs.predictions, requires_grad=True)
            before = memory.now
            losses = task.losses(replace(pairs, predictions=predicted))
            loss = memory.peak - before
            del losses
    return {"batch": given, "loss": loss, "pass": whole}


def rank_memory(
    config: TrainConfig, task: Task, lengths: list[int], ranks: int, on_gpu: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """All bytes of a rank by part, with a target that it loads; and ``pass_memory``, which is one part."""
    target = task.ends.config
    passes = pass_memory(config, target, lengths, config.activation_checkpointing, on_gpu)
    parts = memory_parts(config, task, ranks) | {"forward and backward": passes["pass"]}
    if config.data is not None:
        dtype = resolve_dtype(config.data.target_dtype, rank_device())
        parts["target, for features"] = target_parameters(target)[0] * dtype.itemsize
    elif config.tau_every and config.tau_device is None:
        parts["target, for tau"] = target_parameters(target)[0] * dtype_of(config).itemsize
    return parts, passes


def check_memory(
    needed: int, what: str = "training", fix: str = "lower batch_tokens or loss_chunk_rows", on: str | None = None
) -> None:
    """Raise ValueError if the device ``on``, by default this machine's, has less than ``needed`` bytes free."""
    device = resolve_device(on)
    if needed > (free := free_memory(device)):
        raise ValueError(
            f"{what} needs {size_text(needed)} of memory, and {size_text(free)} are free on {device}; {fix}"
        )


def check_size(config: TrainConfig) -> None:
    """Raise ValueError if the drafter is too large for this machine's ranks, before its weights are made."""
    task = meta_task(config, load_config_only(config.target, config.revision))
    check_weights(config, task, find_rank(None, None).count, local_ranks(1))


def check_weights(config: TrainConfig, task: Task, ranks: int, here: int = 1) -> None:
    """Raise ValueError if weights, gradients and optimizer of ``here`` of the ``ranks`` do not fit into this machine.

    ``task``: with a module without contents.
    """
    keys = [f"{key}={value}" for key in SIZES if (value := getattr(config, key, None)) is not None]
    fix = f"lower {' or '.join(keys)}" if keys else "set zero_stage or offload, or use a machine with more memory"
    what = f"a drafter of {parameters(task.module):,} parameters"
    whole = sum(memory_parts(config, task, ranks).values())
    if resolve_device().type == "cpu":
        check_memory(here * whole, f"training {what}", fix)
        return
    check_memory(here * 4 * parameters(task.module), f"making {what} in float32", fix, on="cpu")
    if ranks == 1:  # of several, none has chosen its device yet
        check_memory(whole, f"training {what}", fix)


def _with_loss_ids(task: Task) -> Task:
    """``task`` with the number of tokens that its loss is over; which tokens makes no difference here."""
    if task.loss_tokens is not None:
        task.heads.ids = torch.arange(min(task.loss_tokens, task.ends.lm_head.out_features))
    return task


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made inside: ``now``, and the maximum so far (``peak``).

    A view of a tensor from outside, such as a transposed weight, takes none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(torch.Tensor, lambda given: self._known.add(given.untyped_storage()), (args, kwargs))
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, made)
        return made

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self._count(storage.nbytes())
            weakref.finalize(storage, self._count, -storage.nbytes())

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


# ------------------------------------------------------------------------------------------- speed


def measured_rate(config: TrainConfig, target: PretrainedConfig, lengths: list[int], trained: float = 1.0) -> float:
    """Tokens/s of one rank here: forward, backward and AdamW on random micro-batches, after one of warm-up.

    Without DeepSpeed, reading of data and communication. ``trained``: share of the positions that are trained.
    """
    device = resolve_device()
    task = _with_loss_ids(make_task(config, meta_ends(target, device=str(device), dtype=dtype_of(config))))
    with exact_buffers(task.module):
        module = task.module.to(device, dtype_of(config))
    optimizer = torch.optim.AdamW([weights for weights in module.parameters() if weights.requires_grad], lr=1e-6)
    batch = RandomStore(config, target, lengths, trained).batch().to(device, dtype_of(config))
    batch = task.choose(batch)
    for step in range(MEASURED_STEPS + 1):
        if step == 1:
            began = _now(device)
        loss = task.losses(task.pairs(module, batch, seed=step))["loss"]
        (loss / len(batch.rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return MEASURED_STEPS * sum(lengths) / (_now(device) - began)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
