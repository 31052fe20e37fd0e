"""Open and check all inputs of a run before it starts."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.dialogues.encoding import load_tokenizer, template_hash, tokenizer_hash
from data_prep.store.manifest import MANIFEST, StoreManifest
from data_prep.store.reader import FeatureStore
from drafters.hub.checkpoint import TargetIdentity
from drafters.model.ends import FrozenEnds, load_frozen_ends
from drafters.model.target import TargetModel
from train.core.config import TrainConfig
from train.core.runtime import dtype_of
from train.data.online import OnlineFeatures, load_target, open_online
from train.data.packing import Source
from train.run.files import begun_on


@dataclass
class Inputs:
    """The target's embeddings and LM head, the training and held-out features, and the target that computes them."""

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
        for ours, theirs in pairs:  # share the two largest matrices if dtype and device are the same
            if (ours.weight.dtype, ours.weight.device) == (theirs.weight.dtype, theirs.weight.device):
                ours.weight = theirs.weight


def open_inputs(config: TrainConfig, device: str = "cpu") -> Inputs:
    """Open both stores and the target's ends, and check that they belong together; or read the online run's dialogues.

    Args:
        config: the run's config.
        device: where the ends go; "meta" reads only their shapes.

    Raises:
        ValueError: no store, one of another target, a missing tap, or no such target; for an online run see
            ``train.data.online.open_online``.
    """
    if isinstance(config.features, str):
        texts = open_online(config, begun_on(config.out))
        check_batch_tokens(config, texts[0])
        return Inputs(load_frozen_ends(config.target, dtype=dtype_of(config), revision=config.revision), *texts)
    check_splits(config.features)
    train, heldout = (FeatureStore.open(config.features / split) for split in ("train", "heldout"))
    ends = load_frozen_ends(config.target, dtype=dtype_of(config), device=device, revision=config.revision)
    target = target_identity(config, ends)
    for split, manifest in (("train", train.manifest), ("heldout", heldout.manifest)):
        check_store(config, split, manifest, target)
    check_tokenizer(config, train.manifest, heldout.manifest)
    check_batch_tokens(config, train)
    return Inputs(ends, train, heldout)


def check_batch_tokens(config: TrainConfig, train: Source) -> None:
    """Raise ValueError if the longest dialogue does not fit into a batch."""
    longest = int(train.lengths.max())
    limits = [("batch_tokens", config.batch_tokens, "max_length where the dialogues are read")]
    if config.data is not None:
        limits.append(("data.target_batch_tokens", config.data.target_batch_tokens, "data.max_length"))
    for key, most, cut in limits:
        if longest > most:
            raise ValueError(
                f"{key} is {most:,}, and the longest training dialogue has {longest:,} tokens; set {key}={longest} or "
                f"more, or a smaller {cut}"
            )


def check_splits(features: Path) -> None:
    """Raise ValueError if the features' splits have other names than train and heldout."""
    found = sorted(manifest.parent.name for manifest in features.glob(f"*/{MANIFEST}"))
    missing = [split for split in ("train", "heldout") if split not in found]
    if found and missing:
        raise ValueError(
            f"{features} has no split {' and no split '.join(missing)}, but {', '.join(found)}: training reads "
            "train/ and heldout/; name the splits so in the features config, or rename the folder"
        )


def check_tokenizer(config: TrainConfig, train: StoreManifest, heldout: StoreManifest) -> None:
    """Raise ValueError if the target's tokenizer or chat template differs from that of a store.

    A target without a tokenizer in its folder is not compared.
    """
    made_with = {"tokenizer": train.tokenizer_hash, "chat template": train.template_hash}
    others = {"heldout/": (heldout.tokenizer_hash, heldout.template_hash)}
    with suppress(ValueError):
        chat = load_tokenizer(config.target, config.revision, train.chat_template)
        others[repr(config.target)] = tokenizer_hash(chat.tokenizer), template_hash(chat.template)
    for name, hashes in others.items():
        for (what, then), now in zip(made_with.items(), hashes, strict=True):
            if then != now:
                raise ValueError(
                    f"{config.features}: train/ was made with another {what} ({then}) than {name} has ({now}); restore "
                    "it, or make the features again with one data_prep.features config"
                )


def check_store(config: TrainConfig, split: str, manifest: StoreManifest, target: TargetIdentity) -> None:
    """Raise ValueError unless the store was made with ``target`` and has the drafter's layers."""
    store = Path(config.features) / split
    sizes = (
        ("hidden size", manifest.hidden_size, target.hidden_size),
        ("vocabulary", manifest.vocab_size, target.vocab_size),
    )
    differing = [f"{what} {there} against {here}" for what, there, here in sizes if there != here]
    if not differing and manifest.target_fingerprint != target.fingerprint:
        differing = [f"fingerprint {manifest.target_fingerprint} against {target.fingerprint}, so other weights"]
    if differing:
        fix = f"set target: {manifest.target_name} or make the features again with {target.name!r}"
        if manifest.target_name == target.name:
            fix = f"{target.name!r} has changed since then: restore it, or make the features again"
        raise ValueError(
            f"{store} was made with target {manifest.target_name!r}, the config says target: {target.name!r} "
            f"({'; '.join(differing)}); {fix}"
        )
    check_taps(config, target.name, target.num_hidden_layers)
    for layer in config.taps:
        if layer not in manifest.taps:
            raise ValueError(
                f"{store} holds no hidden states after layer {layer}, only taps {manifest.taps}; set the exit layer to "
                f"one of these, or make the features again with exit_layers: [{layer}]"
            )


def check_taps(config: TrainConfig, target: str, layers: int) -> None:
    """Raise ValueError if the drafter reads a layer that ``target`` lacks."""
    for layer in config.taps:
        if layer >= layers:
            raise ValueError(f"exit layer {layer} must be below the {layers} layers of {target!r}")


def target_identity(config: TrainConfig, ends: FrozenEnds) -> TargetIdentity:
    """The target's identity for a checkpoint."""
    return ends.identity(config.target, config.revision)
