"""Memory of a training run: weights by ZeRO stage, and a forward and backward pass by a formula or as measured here."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from data_prep.common.ranks import find_rank
from data_prep.store.reader import FeatureStore
from drafters.common.wording import size_text
from drafters.model.files import free_memory, load_config_only, resolve_device, resolve_dtype
from train.core.attention import BLOCK
from train.core.config import TrainConfig
from train.core.engine import checkpoint_activations, deepspeed_config
from train.core.losses import default_chunk_rows
from train.core.runtime import dtype_of, local_ranks, rank_device
from train.core.task import Task
from train.preflight.estimate import meta_task, parameters, random_task, target_parameters

SIZES = ("layers", "heads", "markov_rank", "draft_vocab")  # keys of a training that the size of its head depends on
# Float32 matrices [chunk, vocabulary] at the peak of the loss: p, log q, their gradients, and what a divergence needs.
CROSS_ENTROPY, OTHER_LOSSES = 4.4, 5.4
SURELY = 0.75  # of the estimate of a pass, which may be 25% above what is measured


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
    config: TrainConfig, task: Task, lengths: list[int], checkpointing: bool = False, on_gpu: bool = False
) -> dict[str, int]:
    """Peak bytes of a forward and backward pass by a formula, without weights and gradients.

    A linear layer keeps its input and output, a norm also a float32 copy, attention by matrix products its scores and
    float32 copies of its states. A test compares it with measured passes; 20% off is usual.

    Args:
        task: task whose module has no contents.
        lengths: tokens of the micro-batch's dialogues; every position is trained.
        checkpointing: the backward pass computes the module's activations again.
        on_gpu: attention is the fused kernel, which keeps no scores; the default chunk of the loss is a GPU's.

    Returns:
        ``batch``: the micro-batch; ``loss``: the loss's own peak, its rows of logits; ``pass``: all.
    """
    width, hidden, tokens = dtype_of(config).itemsize, task.ends.config.hidden_size, sum(lengths)
    rows, predicted = task.most_rows(lengths)
    batch = tokens * (width * hidden * (1 + len(config.taps)) + 3 * 8 + 1)  # ids, positions, dialogues; mask
    predictions = task.predictions * predicted * hidden * (width + 4)  # gradients, and float32 copies
    loss, own_heads = _loss_memory(config, task, predicted, on_gpu)
    loss += predictions + own_heads
    linear, scores = _activations(task, lengths, rows, width)
    by_products = task.passes - 1 if on_gpu else task.passes  # a GPU's kernel runs the first of unrolled passes
    whole = batch + task.passes * linear + by_products * scores + loss
    if checkpointing:
        inputs = 2 * rows * hidden * width * task.passes
        # One pass again. Of unrolled ones, the chains' states have gradients too.
        again = linear + round(scores * min(by_products, 2.2)) + predictions + own_heads
        whole = min(whole, batch + inputs + predictions + max(loss, again))
    return {"batch": batch, "loss": loss, "pass": whole}


def _activations(task: Task, lengths: list[int], rows: int, width: int) -> tuple[int, int]:
    """Bytes that a pass of ``rows`` keeps for its backward pass, and those more if matrix products attend."""
    context = sum(lengths) if task.block_rows else 0  # tokens that blocks attend to, beside their own rows
    read = {"fc": context or rows, "k_proj": rows + context, "v_proj": rows + context, "k_norm": rows + context}
    ends, outputs = {name.rpartition(".")[0] for name in task.lm_heads}, {"q_proj": 0, "k_proj": 0}
    saved = layers = 0
    copied = 4 if width < 4 else 0  # bytes of a float32 copy of a 16-bit number
    for path, part in task.module.named_modules():
        name = path.rpartition(".")[2]
        count = read.get(name, rows)
        if isinstance(part, nn.Linear) and path not in ends:
            saved += count * (part.in_features + part.out_features) * width
            outputs[name] = part.out_features
            layers += name == "q_proj"
        elif "norm" in type(part).__name__.lower() and isinstance(weight := getattr(part, "weight", None), Tensor):
            heads = {"q_norm": outputs["q_proj"], "k_norm": outputs["k_proj"]}  # one weight for all heads
            saved += count * heads.get(name, weight.numel()) * (width + copied)
    if task.block_rows:
        seen = [min(length / 2, task.reach or length) + task.block_rows for length in lengths]
        pairs = sum(task.most_rows([length])[0] * keys for length, keys in zip(lengths, seen, strict=True))
    else:
        pairs = sum(length * (length + BLOCK) / 2 for length in lengths)
    states = (2 * (rows + context) + rows * (3 if copied else 1)) * outputs["q_proj"]
    return saved, round(layers * 4 * (task.layers_config.num_attention_heads * pairs + states))


def _loss_memory(config: TrainConfig, task: Task, predicted: int, on_gpu: bool) -> tuple[int, int]:
    """Bytes of the loss's rows of logits, and of the gradients of the drafter's own LM heads."""
    vocabulary = min(task.config.loss_tokens or task.ends.lm_head.out_features, task.ends.lm_head.out_features)
    sliced = nn.Linear(1, vocabulary, bias=False, device="meta")
    chunk = min(config.loss_chunk_rows or default_chunk_rows(sliced, on_gpu), predicted)
    cross_entropy = getattr(config, "classification_loss", "cross_entropy") == "cross_entropy"
    kinds = CROSS_ENTROPY if cross_entropy else OTHER_LOSSES
    logits = round(4 * kinds * chunk * vocabulary)
    trained = [weights for name, weights in task.module.named_parameters() if name in task.lm_heads]
    count = sum(weights.numel() for weights in trained if weights.requires_grad)
    return logits, count * (4 + dtype_of(config).itemsize)


def measured_pass(config: TrainConfig, task: Task, lengths: list[int]) -> int:
    """Peak bytes of one forward and backward pass here, of a new module and a random micro-batch.

    ``task``: task whose module has no contents.
    """
    device = resolve_device()
    task, batch = random_task(config, task.ends.config, lengths)
    for weights in task.module.parameters():
        if weights.requires_grad:  # ``memory_parts`` counts gradients
            weights.register_post_accumulate_grad_hook(lambda weights: setattr(weights, "grad", None))
    if config.activation_checkpointing:
        checkpoint_activations(task.module)
    inputs = sum(each.nbytes for each in [batch.features, *batch.taps.values(), batch.input_ids])

    def run() -> None:
        task.losses(task.pairs(task.module, task.choose(batch, seed=0), seed=0))["loss"].backward()

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return inputs + torch.cuda.max_memory_allocated(device) - before
    with PeakMemory() as memory:
        run()
    return inputs + memory.peak


def rank_memory(
    config: TrainConfig, task: Task, lengths: list[int], ranks: int, on_gpu: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """All bytes of a rank by part, with a target that it loads; and ``pass_memory``, which is one part."""
    target = task.ends.config
    passes = pass_memory(config, task, lengths, config.activation_checkpointing, on_gpu)
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
    """Raise ValueError if drafter or micro-batch are too large for this machine, before a weight is made.

    Of the passes, three quarters of the estimate count, for dialogues of the store's mean length; with ``features:
    online`` their number is not known yet, so only weights count.
    """
    task, ranks = meta_task(config, load_config_only(config.target, config.revision)), find_rank(None, None).count
    check_weights(config, task, ranks, local_ranks(1))
    if isinstance(config.features, str) or ranks > 1:
        return
    manifest = FeatureStore.open(config.features / "train").manifest
    mean = max(1, manifest.tokens // max(manifest.dialogues, 1))
    count = min(manifest.dialogues, config.batch_tokens // (config.gradient_accumulation * mean))
    passes = pass_memory(config, task, [mean] * count, config.activation_checkpointing, torch.cuda.is_available())
    needed = sum(memory_parts(config, task, ranks).values()) + round(SURELY * passes["pass"])
    fix = "lower batch_tokens or loss_chunk_rows, or raise gradient_accumulation"
    check_memory(needed, f"training on micro-batches of {mean * count:,} tokens", fix)


def check_weights(config: TrainConfig, task: Task, ranks: int, here: int = 1) -> None:
    """Raise ValueError if weights, gradients and optimizer of ``here`` of the ``ranks`` do not fit into this machine.

    ``task``: task whose module has no contents.
    """
    sizes = config.model_dump() | config.head.model_dump()
    keys = [f"{key}={sizes[key]}" for key in SIZES if sizes.get(key) is not None]
    fix = f"lower {' or '.join(keys)}" if keys else "set zero_stage or offload, or use a machine with more memory"
    what = f"a drafter of {parameters(task.module):,} parameters"
    whole = sum(memory_parts(config, task, ranks).values())
    if resolve_device().type == "cpu":
        check_memory(here * whole, f"training {what}", fix)
        return
    check_memory(here * 4 * parameters(task.module), f"making {what} in float32", fix, on="cpu")
    if ranks == 1:  # of several, none has chosen its device yet
        check_memory(whole, f"training {what}", fix)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made inside: ``now``, and the maximum so far (``peak``).

    A view of a tensor from outside, such as a transposed weight, takes none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(torch.Tensor, lambda tensor: self._known.add(tensor.untyped_storage()), (args, kwargs))
        outputs = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, outputs)
        return outputs

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self._count(storage.nbytes())
            weakref.finalize(storage, self._count, -storage.nbytes())

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
