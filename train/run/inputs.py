"""Open and check all inputs of a run before it starts."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from data_prep.dialogues.encoding import load_tokenizer, template_hash, tokenizer_hash
from data_prep.store.manifest import StoreManifest
from data_prep.store.reader import FeatureStore
from drafters.common.fingerprints import same_weights
from drafters.common.states import state_name
from drafters.hub.checkpoint import TargetIdentity
from drafters.methods import taps_for
from drafters.model.ends import FrozenEnds, load_frozen_ends
from drafters.model.files import load_config_only
from drafters.model.target import TargetModel
from train.core.config import TrainConfig
from train.core.runtime import dtype_of
from train.data.cache import check_disk
from train.data.online import OnlineFeatures, load_target, open_online
from train.data.packing import Source
from train.run.files import CACHE, begun_on


@dataclass
class Inputs:
    """The target's embeddings and LM head, the training and held-out features, and the target that computes them."""

    ends: FrozenEnds
    train: Source
    heldout: Source
    target: TargetModel | None = None

    def load_target(self, config: TrainConfig, device: torch.device) -> None:
        """Load the target of ``features: online`` onto ``device`` and fill its cache; stores need neither."""
        if not isinstance(self.train, OnlineFeatures) or not isinstance(self.heldout, OnlineFeatures):
            return
        self.target = self.train.target = self.heldout.target = target = load_target(config, device)
        shared: Any = (
            (self.ends.embed, target.model.get_input_embeddings()),
            (self.ends.lm_head, target.model.get_output_embeddings()),
        )
        for ours, theirs in shared:  # the two largest matrices, if dtype and device are the same
            if (ours.weight.dtype, ours.weight.device) == (theirs.weight.dtype, theirs.weight.device):
                ours.weight = theirs.weight
        if config.data is not None and config.data.disk_gb is not None:
            self.train.fill(config.out / CACHE, config.data.disk_gb)


def open_inputs(config: TrainConfig, device: str = "cpu") -> Inputs:
    """Open both stores and the target's ends, and check that they belong together; or read the online run's dialogues.

    ``device``: device of embeddings and LM head; "meta" reads only their shapes.

    Raises:
        ValueError: no store, one of another target, a missing tap, no such target, or a disk too small for the cache;
            or as ``open_online``.
    """
    dtype = dtype_of(config)
    if config.taps:
        check_taps(config, config.target, load_config_only(config.target, config.revision).num_hidden_layers)
    if isinstance(config.features, str):
        texts = open_online(config, begun_on(config.out))
        check_batch_tokens(config, texts[0])
        if config.data is not None and config.data.disk_gb is not None:
            check_disk(config.out / CACHE, texts[0].split, texts[0].header, config.data.disk_gb)
        return Inputs(load_frozen_ends(config.target, dtype=dtype, revision=config.revision), *texts)
    train, heldout = (FeatureStore.open(config.features / split) for split in ("train", "heldout"))
    ends = load_frozen_ends(config.target, dtype=dtype, device=device, revision=config.revision)
    target = ends.identity(config.target, config.revision)
    for store in (train, heldout):
        check_store(config, store, target)
    ends.fingerprint = train.manifest.target_fingerprint  # of the weights that computed what the head learns
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


def check_tokenizer(config: TrainConfig, train: StoreManifest, heldout: StoreManifest) -> None:
    """Raise ValueError if the target's tokenizer or chat template differs from that of a store.

    A target without a tokenizer in its folder is not compared.
    """
    others = {"heldout/": (heldout.tokenizer_hash, heldout.template_hash)}
    with suppress(ValueError):
        chat = load_tokenizer(config.target, config.revision, train.chat_template)
        others[repr(config.target)] = tokenizer_hash(chat.tokenizer), template_hash(chat.template)
    for name, now in others.items():
        if now != (then := (train.tokenizer_hash, train.template_hash)):
            raise ValueError(
                f"{config.features}: train/ was made with another tokenizer or chat template (hashes "
                f"{', '.join(then)}) than {name} has ({', '.join(now)}); restore it, or make the features again with "
                "one data_prep.features config"
            )


def check_store(config: TrainConfig, store: FeatureStore, target: TargetIdentity) -> None:
    """Raise ValueError unless the store was made with ``target`` and has the drafter's layers."""
    manifest = store.manifest
    compared = {
        "hidden size": (manifest.hidden_size, target.hidden_size),
        "vocabulary": (manifest.vocab_size, target.vocab_size),
    }
    differing = [f"{what} {there} against {here}" for what, (there, here) in compared.items() if there != here]
    there, here = manifest.target_fingerprint, target.fingerprint
    if not same_weights(there, here, str(store.path)):
        differing.append(f"fingerprint of the weights {there} against {here}")
    if differing:
        raise ValueError(
            f"{store.path} was made with target {manifest.target_name!r}, the config says target: {target.name!r} "
            f"({'; '.join(differing)}); set or restore that target, or make the features again with {target.name!r}"
        )
    check_taps(config, target.name, target.num_hidden_layers)
    if missing := [tap for tap in config.taps if tap not in manifest.taps]:
        names = "; ".join(f"{state_name(tap)} (tap {tap})" for tap in missing)
        raise ValueError(
            f"{store.path} lacks {names}; it has the taps {manifest.taps or 'none'}. One more pass adds the states: "
            f"python -m data_prep.features --config F {states_asked(config, manifest, target.num_hidden_layers)} "
            "out=NEW, where F is the config of these features; then set features=NEW"
        )


def states_asked(config: TrainConfig, manifest: StoreManifest, layers: int) -> str:
    """The keys with which data_prep.features stores the states of ``manifest`` and those that the drafter reads."""
    with suppress(ValueError):  # a target too shallow for the method's default
        if sorted(config.taps) == taps_for([config.drafter], layers):
            return f"'for=[{config.drafter}]' 'exit_layers={manifest.taps}'"
    return f"'exit_layers={sorted({*manifest.taps, *config.taps})}'"


def check_taps(config: TrainConfig, target: str, layers: int) -> None:
    """Raise ValueError if the drafter reads a layer that ``target`` lacks, or a state that features do not hold."""
    last = layers if config.head.reads_last else layers - 1
    if beyond := [tap for tap in config.taps if not 1 <= tap <= last]:
        raise ValueError(
            f"{config.drafter} reads tap {beyond[0]}, the state after {beyond[0]} layers, and {target!r} has {layers} "
            f"layers; choose from 1 to {last}"
        )
