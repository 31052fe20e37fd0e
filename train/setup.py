"""Open and check everything a run reads, before an hour is spent on it; and build DeepSpeed's engine."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_prep.dialogues.encoding import load_tokenizer, template_hash, tokenizer_hash
from data_prep.disk import check_room
from data_prep.store.manifest import MANIFEST, StoreManifest
from data_prep.store.reader import FeatureStore
from drafters.checkpoint import make_config
from drafters.model.ends import FrozenEnds, load_frozen_ends
from drafters.model.target import TargetModel
from drafters.wording import size_text
from train.config import TrainConfig, deepspeed_config
from train.data.online import OnlineFeatures, load_target, open_online
from train.data.packing import Source
from train.optimizer import buffers_of, restore_buffers
from train.run.files import run_folder_bytes
from train.runtime import local_ranks
from train.tasks import Task


@dataclass
class Inputs:
    """What a run reads: the target's frozen ends, the training and the held-out features, and who computes them."""

    ends: FrozenEnds
    train: Source
    heldout: Source
    target: TargetModel | None = None

    def load_target(self, config: TrainConfig, device: torch.device) -> None:
        """Load the target of ``features: online`` onto ``device``; stores need none.

        Raises:
            ValueError: see ``train.data.online.load_target``.
        """
        online = [source for source in (self.train, self.heldout) if isinstance(source, OnlineFeatures)]
        if not online:
            return
        self.target = target = load_target(config, device)
        for source in online:
            source.target = target
        pairs: list[tuple[Any, Any]] = [
            (self.ends.embed, target.body.embed_tokens),
            (self.ends.lm_head, target.model.get_output_embeddings()),
        ]
        for ours, theirs in pairs:  # one copy of the two largest matrices suffices, where it lies right
            if (ours.weight.dtype, ours.weight.device) == (theirs.weight.dtype, theirs.weight.device):
                ours.weight = theirs.weight


@dataclass
class Target:
    """The target's identity in a checkpoint, as ``drafters.checkpoint`` asks for it, without the target."""

    name: str
    revision: str | None
    ends: FrozenEnds

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.ends.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """V, rows of the LM head."""
        return self.ends.lm_head.out_features

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.ends.config.num_hidden_layers)

    def fingerprint(self) -> str:
        """The target's fingerprint."""
        return self.ends.fingerprint


def open_inputs(config: TrainConfig, exit_layer: int | None = None, device: str = "cpu") -> Inputs:
    """Open both stores and the target's ends, and check that they belong together; or read the online run's dialogues.

    Args:
        config: the run's config.
        exit_layer: the layer whose hidden states the drafter reads; None for features alone.
        device: where the ends go; "meta" reads their shapes alone.

    Raises:
        ValueError: no store, one of another target, a missing tap, or no such target; for an online run see
            ``train.data.online.open_online``.
    """
    if isinstance(config.features, str):
        texts = open_online(config, exit_layer)
        check_batch_tokens(config, texts[0])
        return Inputs(load_frozen_ends(config.target, dtype=config.dtype, revision=config.revision), *texts)
    check_splits(config.features)
    train = FeatureStore.open(config.features / "train")
    heldout = FeatureStore.open(config.features / "heldout")
    ends = load_frozen_ends(config.target, dtype=config.dtype, device=device, revision=config.revision)
    target = Target(config.target, config.revision, ends)
    for split, manifest in (("train", train.manifest), ("heldout", heldout.manifest)):
        check_store(config, split, manifest, target, exit_layer)
    for key in ("tokenizer_hash", "template_hash"):
        here, there = getattr(train.manifest, key), getattr(heldout.manifest, key)
        if here != there:
            raise ValueError(
                f"{config.features}: train/ and heldout/ were made with different {key.removesuffix('_hash')}s "
                f"({here} and {there}); make both again with one data_prep.features config"
            )
    check_tokenizer(config, train.manifest)
    check_batch_tokens(config, train)
    return Inputs(ends, train, heldout)


def check_batch_tokens(config: TrainConfig, train: Source) -> None:
    """Raise ValueError where a batch of one dialogue can be larger than ``batch_tokens`` says."""
    longest = int(train.lengths.max())
    if longest > config.batch_tokens:
        raise ValueError(
            f"batch_tokens is {config.batch_tokens:,}, and the longest training dialogue has {longest:,} tokens; set "
            f"batch_tokens={longest} or more, or a smaller max_length where the dialogues are read"
        )
    if config.data is not None and longest > config.data.target_batch_tokens:
        raise ValueError(
            f"data.target_batch_tokens is {config.data.target_batch_tokens:,}, and the longest training dialogue has "
            f"{longest:,} tokens; set data.target_batch_tokens={longest} or more, or a smaller data.max_length"
        )


def check_run_disk(run: Path, module: nn.Module) -> None:
    """Raise ValueError unless the states and exports of ``module`` fit beside what the run folder holds already."""
    count = sum(weights.numel() for weights in module.parameters())
    there = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) if run.is_dir() else 0
    what = f"the run folder {run} (states and exports of {count:,} parameters)"
    check_room(run, run_folder_bytes(count) - there, what, "give an `out` on another disk, or make room")


def check_splits(features: Path) -> None:
    """Raise ValueError where the features have splits of other names than training looks for."""
    found = sorted(manifest.parent.name for manifest in features.glob(f"*/{MANIFEST}"))
    missing = [split for split in ("train", "heldout") if split not in found]
    if found and missing:
        raise ValueError(
            f"{features} has no split {' and no split '.join(missing)}, but {', '.join(found)}: training reads "
            "train/ and heldout/; name the splits so in the features config, or rename the folder"
        )


def check_tokenizer(config: TrainConfig, manifest: StoreManifest) -> None:
    """Raise ValueError if the target's tokenizer or chat template changed since the features were made.

    A target whose tokenizer lies elsewhere cannot be compared, and is not.
    """
    try:
        chat = load_tokenizer(config.target, config.revision, manifest.chat_template)
    except ValueError:
        return
    now = {"tokenizer": tokenizer_hash(chat.tokenizer), "chat template": template_hash(chat.template)}
    then = {"tokenizer": manifest.tokenizer_hash, "chat template": manifest.template_hash}
    for what, value in now.items():
        if value != then[what]:
            raise ValueError(
                f"{config.features} was made with another {what} ({then[what]}) than {config.target!r} has now "
                f"({value}); restore it, or make the features again"
            )


def check_store(
    config: TrainConfig, split: str, manifest: StoreManifest, target: Target, exit_layer: int | None
) -> None:
    """Raise ValueError unless the store was made with ``target`` and holds what the drafter reads."""
    store = Path(config.features) / split
    sizes = (
        ("hidden size", manifest.hidden_size, target.hidden_size),
        ("vocabulary", manifest.vocab_size, target.vocab_size),
    )
    differing = [f"{what} {there} against {here}" for what, there, here in sizes if there != here]
    if not differing and manifest.target_fingerprint != target.fingerprint():
        differing = [f"fingerprint {manifest.target_fingerprint} against {target.fingerprint()}, so other weights"]
    if differing:
        fix = f"set target: {manifest.target_name} or make the features again with {target.name!r}"
        if manifest.target_name == target.name:
            fix = f"{target.name!r} is no longer what it was then: restore it, or make the features again"
        raise ValueError(
            f"{store} was made with target {manifest.target_name!r}, the config says target: {target.name!r} "
            f"({'; '.join(differing)}); {fix}"
        )
    if exit_layer is None:
        return
    if exit_layer >= target.num_layers:
        raise ValueError(f"exit_layer: {exit_layer} must be below the {target.num_layers} layers of {target.name!r}")
    if exit_layer not in manifest.taps:
        raise ValueError(
            f"{store} holds no hidden states after layer {exit_layer} (exit_layer), only taps {manifest.taps}; set "
            f"exit_layer to one of these, or make the features again with exit_layers: [{exit_layer}]"
        )


def target_identity(config: TrainConfig, ends: FrozenEnds) -> dict[str, Any]:
    """The ``target`` section of the checkpoint's config.json."""
    identity: dict[str, Any] = make_config("", {}, Target(config.target, config.revision, ends))["target"]
    return identity


def make_engine(task: Task, config: TrainConfig) -> Any:
    """DeepSpeed's engine around the task's module; the frozen ends go to its device, outside of it.

    Raises:
        ValueError: ``offload`` needs more host memory than there is.
    """
    import deepspeed

    module = task.module
    if config.offload != "none":
        _check_host_memory(module, config)
    if config.activation_checkpointing:
        checkpoint_activations(module)
    buffers = buffers_of(module)
    with quiet_bf16_optimizer():
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
            config=deepspeed_config(config),
            dist_init_required=False,
        )
    restore_buffers(module, buffers, engine.device)
    task.ends.embed.to(engine.device)
    task.ends.lm_head.to(engine.device)
    return engine


def full_state(engine: Any) -> dict[str, Tensor]:
    """The trained module's whole weights by name, in the dtype that it computes in, copied to the CPU.

    A collective: every rank has to call it, and every rank gets all weights, whatever the ZeRO stage.
    """
    import deepspeed

    weights = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        # At ZeRO-3 a rank holds a part of each weight; one at a time, so that the device never holds all of them.
        with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
            weights[name] = value.detach().to("cpu", copy=True)
    return weights


def checkpoint_activations(module: nn.Module) -> None:
    """Make ``module`` keep its inputs alone for the backward pass, and compute everything between once more then."""
    forward = module.forward

    def twice(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    module.forward = twice


@contextlib.contextmanager
def quiet_bf16_optimizer() -> Iterator[None]:
    """DeepSpeed's bf16 optimizer prints memory figures when it starts, past the logger."""
    from deepspeed.runtime import bf16_optimizer

    loud = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = loud


def _check_host_memory(module: nn.Module, config: TrainConfig) -> None:
    """Float32 weights, gradients and two moments of Adam; with ``offload: parameters`` the weights once more."""
    count = sum(parameter.numel() for parameter in module.parameters())
    parts = local_ranks(1) / torch.distributed.get_world_size()  # of the whole state, on this machine
    need = round(count * (20 if config.offload == "parameters" else 16) * parts)
    free = psutil.virtual_memory().available
    if need > free:
        raise ValueError(
            f"offload: {config.offload} keeps {size_text(need)} of {count:,} weights' state in this host's memory, "
            f"which has {size_text(free)} free; use more hosts, or offload: none with a higher zero_stage"
        )
