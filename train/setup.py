"""Open and check everything a run reads, before an hour is spent on it; and build DeepSpeed's engine."""

from dataclasses import dataclass
from typing import Any

import torch

from data_prep.encoding import load_tokenizer, template_hash, tokenizer_hash
from data_prep.store import FeatureStore, StoreManifest
from drafters.checkpoint import make_config
from drafters.config import load_config
from drafters.decoding.frozen import FrozenEnds, load_frozen_ends
from train.config import ConfigT, TrainConfig, deepspeed_config
from train.run_files import check_run_folder
from train.tasks import Task


@dataclass
class Inputs:
    """What a run reads: the target's frozen ends, the training store and the held-out store."""

    ends: FrozenEnds
    train: FeatureStore
    heldout: FeatureStore


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


def read_config(schema: type[ConfigT], path: str, overrides: list[str], resume: bool) -> ConfigT:
    """The run's config, and a run folder that is free or, with ``resume``, holds this very run.

    Raises:
        ValueError: see ``drafters.config.load_config`` and ``run_files.check_run_folder``.
    """
    config = load_config(schema, path, overrides)
    check_run_folder(config, resume)
    return config


def open_inputs(config: TrainConfig, exit_layer: int | None = None, device: str = "cpu") -> Inputs:
    """Open both stores and the target's ends, and check that they belong together.

    Args:
        config: the run's config.
        exit_layer: the layer whose hidden states the drafter reads; None for features alone.
        device: where the ends go; "meta" reads their shapes alone.

    Raises:
        ValueError: no store, one of another target, a missing tap, or no such target.
    """
    train = FeatureStore.open(config.features / "train")
    heldout = FeatureStore.open(config.features / "heldout")
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    ends = load_frozen_ends(config.target, dtype=dtype, device=device, revision=config.revision)
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
    return Inputs(ends, train, heldout)


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
    store = config.features / split
    sizes = (
        ("hidden size", manifest.hidden_size, target.hidden_size),
        ("vocabulary", manifest.vocab_size, target.vocab_size),
    )
    differing = [f"{what} {there} against {here}" for what, there, here in sizes if there != here]
    if not differing and manifest.target_fingerprint != target.fingerprint():
        differing = [f"fingerprint {manifest.target_fingerprint} against {target.fingerprint()}, so other weights"]
    if differing:
        raise ValueError(
            f"{store} was made with target {manifest.target_name!r}, the config says target: {target.name!r} "
            f"({'; '.join(differing)}); set target: {manifest.target_name} or make the features again with "
            f"{target.name!r}"
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


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """The drafter's whole weights, copied to the CPU. A collective: every rank must call it."""
    return {name: value.detach().cpu().clone() for name, value in engine.module.state_dict().items()}


def make_engine(task: Task, config: TrainConfig) -> Any:
    """DeepSpeed's engine around the task's module; the frozen ends go to its device, outside of it."""
    import deepspeed

    module = task.module
    # Casting a module to bf16 casts the rotary frequencies, too, which moves position 500 by several tokens.
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
        config=deepspeed_config(config),
        dist_init_required=False,
    )
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, buffer.to(engine.device))
    task.ends.embed.to(engine.device)
    task.ends.lm_head.to(engine.device)
    return engine
