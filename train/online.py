"""Features computed by the target while a drafter trains: no store, no disk.

The dialogues are those that data_prep.features would store, in the same order: the same reader, tokenizer, mask and
checks. A packed micro-batch goes through the target as it is, each dialogue attending only to itself, so its features
come out where the drafter's step needs them and stay on the device.
"""

import itertools
import os
import sys
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data_prep.encoding import EncodedSplit, encode_split, load_tokenizer
from data_prep.features import FeaturesConfig, make_headers
from data_prep.store import StoredDialogue, StoreManifest
from drafters.config import validate
from drafters.decoding.model_files import resolve_dtype
from drafters.decoding.target import FeatureOutput, TargetModel
from train.config import OnlineData, TrainConfig
from train.data import Batch, LiveFeatures, dialogue_mask

States = dict[int | None, Tensor]  # None: the features; else the hidden states after so many layers


class OnlineFeatures(LiveFeatures):
    """One split's dialogues in memory (5 bytes a token) and, once ``target`` is set, their features.

    Args:
        split: tokens and masks.
        header: the manifest that a store of this split would begin with; its counts are filled in.
        batch_tokens: tokens of one forward of the target, padding included.
    """

    def __init__(self, split: EncodedSplit, header: StoreManifest, batch_tokens: int) -> None:
        self.ids, self.batch_tokens = split.ids, batch_tokens
        self._lengths = torch.tensor([len(dialogue.input_ids) for dialogue in split.dialogues])
        self._starts = [0, *itertools.accumulate(self._lengths.tolist())]
        self._tokens = torch.cat([torch.from_numpy(one.input_ids).int() for one in split.dialogues])
        self._mask = torch.cat([torch.from_numpy(one.loss_mask) for one in split.dialogues])
        self.manifest = header.model_copy(
            update={
                "dialogues": len(split.dialogues),
                "consumed": len(split.dialogues),
                "tokens": len(self._tokens),
                "response_tokens": int(self._mask.sum()),
                "dropped": dict(split.counts.dropped),
                "changed": dict(split.counts.changed),
                "complete": True,
            }
        )
        self.target: TargetModel | None = None
        self.left_out: set[int] = set()  # dialogues whose features were not finite

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> StoredDialogue:
        rows = slice(*self._starts[index : index + 2])
        none = torch.empty(int(self._lengths[index]), 0, dtype=resolve_dtype(self.manifest.dtype))
        return StoredDialogue(
            self._tokens[rows].long(), self._mask[rows], none, dict.fromkeys(self.manifest.taps, none)
        )

    @torch.no_grad()
    def complete(self, batch: Batch, taps: tuple[int, ...]) -> Batch:
        """``batch`` with features and taps ``[R, L, H]`` on the target's device, zeros in the padding.

        A dialogue whose features are not all finite (fp16 overflows in some targets) is reported once and gets an empty
        loss mask: a store would have left it out.
        """
        target = self._loaded()
        ids, segments = (each.to(target.device, non_blocking=True) for each in (batch.input_ids, batch.segments))
        positions = batch.position_ids.to(target.device, non_blocking=True)
        states: States = {}
        shared = {span.row for span in batch.spans if span.start}
        alone = [row for row in range(len(ids)) if row not in shared]
        at_once = max(1, self.batch_tokens // ids.shape[1])
        for kind in (alone, sorted(shared)):
            for first in range(0, len(kind), at_once):
                rows = torch.tensor(kind[first : first + at_once], device=target.device)
                if kind is alone:  # padding only on the right: plain causal attention needs no mask
                    output = target.features(ids[rows], taps=taps)
                else:
                    see = dialogue_mask(segments[rows])
                    output = target.run(ids[rows], None, see=see, depths=positions[rows], taps=taps)
                for key, value in _states(output):
                    if key not in states:
                        states[key] = value.new_zeros(*ids.shape, value.shape[-1], device=target.device)
                    states[key][rows] = value.to(target.device)
        for value in states.values():
            value[segments < 0] = 0
        finite = torch.stack([value.isfinite().all(-1).all(-1) for value in states.values()]).all(0)
        bad = [row for row, fine in enumerate(finite.tolist()) if not fine]
        loss_mask = self._leave_out(batch, bad, states, taps) if bad else batch.loss_mask
        tapped = {layer: states[layer] for layer in taps}
        return Batch(batch.input_ids, loss_mask, states[None], tapped, batch.position_ids, batch.segments, batch.spans)

    def _leave_out(self, batch: Batch, rows: list[int], states: States, taps: tuple[int, ...]) -> Tensor:
        """Run the dialogues of ``rows`` again one by one, since NaN spreads along a row; the loss mask without the bad.

        Writes into ``states``; a bad dialogue's are zeros.
        """
        target, loss_mask = self._loaded(), batch.loss_mask.clone()
        for row, start, length, dialogue in (span for span in batch.spans if span.row in rows):
            cut = slice(start, start + length)
            output = target.features(batch.input_ids[row : row + 1, cut].to(target.device), taps=taps)
            finite = all(bool(value.isfinite().all()) for _, value in _states(output))
            for key, value in _states(output):
                states[key][row, cut] = value[0] if finite else 0
            if finite:
                continue
            loss_mask[row, cut] = False
            if dialogue not in self.left_out:
                self.left_out.add(dialogue)
                text = f"warning: left out, the target's features are NaN or infinite: dialogue {self.ids[dialogue]}"
                tqdm.write(f"{text} ({len(self.left_out)} of {len(self)} so far)", file=sys.stderr)
        return loss_mask

    def _loaded(self) -> TargetModel:
        assert self.target is not None, "load_target comes before the first batch"
        return self.target


def _states(output: FeatureOutput) -> list[tuple[int | None, Tensor]]:
    return [(None, output.features), *output.taps.items()]


def open_online(config: TrainConfig, exit_layer: int | None) -> tuple[OnlineFeatures, OnlineFeatures]:
    """The training and held-out dialogues of ``features: online``; the target is not loaded yet.

    Raises:
        ValueError: a missing or unreadable data file, one file given for both splits, an exit layer that the target
            does not have, a ``max_length`` above its context, a tokenizer that does not fit, or no dialogue left.
    """
    data = config.data
    assert data is not None
    if data.target_device_map and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"data.target_device_map: {data.target_device_map} gives all GPUs to one process, and "
            f"{os.environ['WORLD_SIZE']} were started: start one, or leave the key out so that each has its own target"
        )
    chat = load_tokenizer(config.target, config.revision, data.chat_template)
    headers = make_headers(as_features_config(config, data, exit_layer), chat)
    opened = []
    for split, source in (("train", data.train), ("heldout", data.heldout)):
        encoded = encode_split(source, chat, data.max_length, data.limit)
        if os.environ.get("RANK", "0") == "0":
            print(f"{split}: {source}: {encoded.counts.describe()}")
        opened.append(OnlineFeatures(encoded, headers[split], data.target_batch_tokens))
    return opened[0], opened[1]


def as_features_config(config: TrainConfig, data: OnlineData, exit_layer: int | None) -> FeaturesConfig:
    """The config with which data_prep.features would store these features."""
    values = {
        "target": config.target,
        "revision": config.revision,
        "dtype": data.target_dtype,
        "chat_template": data.chat_template,
        "splits": {"train": data.train, "heldout": data.heldout},
        "out": "nowhere",
        "exit_layers": [] if exit_layer is None else [exit_layer],
        "max_length": data.max_length,
        "limit": data.limit,
    }
    return validate(FeaturesConfig, values, source="data")


def load_target(config: TrainConfig, device: torch.device) -> TargetModel:
    """The target on the training device, on transformers' own layers: other engines keep copies of the weights.

    Raises:
        ValueError: nothing loadable there, or an unsupported model.
    """
    data = config.data
    assert data is not None
    place: dict[str, Any] = {"device": device}
    if data.target_device_map:
        place = {"device_map": data.target_device_map}
    return TargetModel.from_pretrained(
        config.target, data.target_dtype, revision=config.revision, engine="eager", **place
    )
