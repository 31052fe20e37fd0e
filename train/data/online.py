"""Features computed by the target while a drafter trains: no store, and no disk but that of a cache.

The dialogues are those that data_prep.features would store, in the same order: the same reader, tokenizer, mask and
checks. A micro-batch's dialogues go through the target together, packed into rows as long as the longest of them, and
their features stay on the device. Dialogues in the cache (train/data/cache.py) are read instead.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data_prep.common.progress import quiet_in_log_files
from data_prep.common.ranks import find_rank, refuse_shared_map
from data_prep.configs import FeatureKeys
from data_prep.dialogues.encoding import EncodedSplit, encode_split, load_tokenizer
from data_prep.extraction.headers import make_headers
from data_prep.store.reader import StoredDialogue, StoreManifest
from drafters.config import validate
from drafters.model.files import resolve_dtype
from drafters.model.rows import Rows
from drafters.model.target import TargetModel
from train.core.config import OnlineData, TrainConfig
from train.data.cache import Cache, fill_cache
from train.data.packing import Batch, Span, split_evenly

States = dict[int | None, Tensor]  # by layer, the hidden states after it; None: the features


class OnlineFeatures:
    """One split's dialogues in memory (9 bytes a token), read like a FeatureStore; their features are empty
    (``[T, 0]``) until ``complete`` computes them.

    Args:
        split: tokens and masks.
        header: the manifest of a store of this split, without counts.
        batch_tokens: tokens of one forward of the target, padding included.

    Attributes:
        target: must be set before the first ``complete``.
        cache: states that are not computed again; see ``fill``.
    """

    target: TargetModel
    cache: Cache | None = None

    def __init__(self, split: EncodedSplit, header: StoreManifest, batch_tokens: int) -> None:
        self.split, self.header, self.batch_tokens = split, header, batch_tokens
        self.lengths = torch.tensor(split.lengths)
        count, trained = len(split.dialogues), sum(int(one.loss_mask.sum()) for one in split.dialogues)
        counts = {"dialogues": count, "consumed": count, "tokens": split.tokens, "response_tokens": trained}
        changes = {"dropped": dict(split.counts.dropped), "changed": dict(split.counts.changed)}
        self.manifest = header.model_copy(update=counts | changes | {"complete": True})
        self.left_out: set[int] = set()  # dialogues whose features were not finite

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> StoredDialogue:
        one, taps = self.split.dialogues[index], self.manifest.taps
        none = torch.empty(len(one.input_ids), 0, dtype=resolve_dtype(self.manifest.dtype))
        ids, mask = torch.from_numpy(one.input_ids), torch.from_numpy(one.loss_mask)
        return StoredDialogue(ids, mask, none, dict.fromkeys(taps, none))

    def fill(self, folder: Path, disk_gb: float) -> None:
        """Cache as many dialogues as ``disk_gb`` holds in ``folder``; on all ranks. Raises as ``fill_cache``."""
        split, rank = self.split, find_rank(None, None)
        self.cache = fill_cache(folder, disk_gb, split, self.header, self.target, self.batch_tokens, rank)

    @torch.no_grad()
    def complete(self, batch: Batch, taps: tuple[int, ...]) -> Batch:
        """``batch`` with features and taps ``[R, L, H]`` on the target's device, zeros in the padding.

        A dialogue whose features are not all finite (fp16 overflows in some targets) is reported once and gets an empty
        loss mask, because a store would omit it.
        """
        shape, device = (*batch.input_ids.shape, self.target.hidden_size), self.target.device
        dtype = resolve_dtype(self.manifest.dtype)
        keys: list[int | None] = [None, *taps]
        states = {key: torch.zeros(shape, dtype=dtype, device=device) for key in keys}
        # The places of the dialogues; a batch of a rank without work has no spans, and is one dialogue.
        places = batch.spans or [Span(0, 0, batch.input_ids.shape[1], -1)]
        places = [span for span in places if not self._read(batch, span, states)]
        if places:
            self._compute(batch, places, states)
        bad = torch.stack([~states[key].isfinite().all(-1) for key in keys]).any()
        loss_mask = self._leave_out(batch, places, states) if bool(bad) else batch.loss_mask
        return replace(batch, loss_mask=loss_mask, features=states[None], taps={key: states[key] for key in taps})

    def _read(self, batch: Batch, span: Span, states: States) -> bool:
        """Copy a cached dialogue into ``states``; False if it is not cached."""
        if self.cache is None:
            return False
        views = {key: span.of(values) for key, values in states.items()}
        return self.cache.read(span.dialogue, span.of(batch.input_ids), views)

    def _compute(self, batch: Batch, places: list[Span], states: States) -> None:
        """Run the target on the dialogues at ``places``, in rows of up to ``batch_tokens``, and fill ``states``."""
        lengths = [span.length for span in places]
        shares = split_evenly(list(range(len(places))), lengths, -(-sum(lengths) // max(lengths)))
        longest = max(sum(lengths[index] for index in share) for share in shares)
        if self.target.chains_only or longest > self.batch_tokens:  # a running state reads one dialogue
            shares = [[index] for index in range(len(places))]
        rows = sorted(([places[index] for index in share] for share in shares), key=len)
        at_once = max(1, self.batch_tokens // max(sum(span.length for span in row) for row in rows))
        # Rows of one dialogue apart from the others: they need no mask.
        for alike in ([row for row in rows if len(row) == 1], [row for row in rows if len(row) > 1]):
            for first in range(0, len(alike), at_once):
                self._forward(batch, alike[first : first + at_once], states)

    def _forward(self, batch: Batch, rows: list[list[Span]], states: States) -> None:
        """Run the target on ``rows`` of dialogues, padded on the right, and write the result into ``states``."""
        target, taps = self.target, tuple(key for key in states if key is not None)

        def packed(values: Tensor, padding: int = 0) -> Tensor:
            parts = [torch.cat([span.of(values) for span in row]) for row in rows]
            return pad_sequence(parts, batch_first=True, padding_value=padding).to(target.device)

        if any(len(row) > 1 for row in rows):
            see = dialogue_mask(packed(batch.segments, -1))
            output = target.run(packed(batch.input_ids), None, Rows(see, packed(batch.position_ids)), taps=taps)
        else:
            output = target.features(packed(batch.input_ids), taps=taps)
        for key, hidden in [(None, output.features), *output.taps.items()]:
            for row, members in zip(hidden, rows, strict=True):
                lengths = [span.length for span in members]
                for span, part in zip(members, row[: sum(lengths)].split(lengths), strict=True):
                    span.of(states[key]).copy_(part)

    def _leave_out(self, batch: Batch, places: list[Span], states: States) -> Tensor:
        """Run every dialogue again in a row of its own, because NaN spreads along a row. Return the loss mask without
        bad dialogues; write zeros for them into ``states``.
        """
        loss_mask = batch.loss_mask.clone()
        for span in places:
            self._forward(batch, [[span]], states)
            parts = [span.of(each) for each in states.values()]
            if all(bool(part.isfinite().all()) for part in parts):
                continue
            for part in parts:
                part.zero_()
            span.of(loss_mask).zero_()
            if span.dialogue >= 0 and span.dialogue not in self.left_out:
                self.left_out.add(span.dialogue)
                name = self.split.ids[span.dialogue]
                text = f"warning: left out, the target's features are NaN or infinite: dialogue {name}"
                tqdm.write(f"{text} ({len(self.left_out)} of {len(self)} so far)", file=sys.stderr)
        return loss_mask


def dialogue_mask(segments: Tensor) -> Tensor:
    """bool ``[R, L, L]`` from segments ``[R, L]``: causal within each dialogue. Padding sees padding: no NaN."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return (segments[:, :, None] == segments[:, None, :]) & causal


def open_online(config: TrainConfig, date: str | None = None) -> tuple[OnlineFeatures, OnlineFeatures]:
    """The training and held-out dialogues of ``features: online``; the target is not loaded yet.

    Args:
        date: date for a chat template that prints one (default: today).

    Raises:
        ValueError: a missing or unreadable data file, one file given for both splits, a layer that the target does not
            have, a ``max_length`` above its context, a tokenizer that does not fit, or no dialogue left.
    """
    data = config.data
    assert data is not None
    rank = find_rank(None, None)  # torch.distributed is not started yet
    refuse_shared_map(rank, data.target_device_map, "data.target_device_map")
    chat = load_tokenizer(config.target, config.revision, data.chat_template, date)
    headers = make_headers(as_feature_keys(config, data), chat, heads=[config.drafter], download=True)
    opened = []
    for split, source in (("train", data.train), ("heldout", data.heldout)):
        encoded = encode_split(source, chat, data.max_length, data.limit)
        if rank.index == 0:
            print(f"{split}: {source}: {encoded.counts.describe()}")
        opened.append(OnlineFeatures(encoded, headers[split], data.target_batch_tokens))
    return opened[0], opened[1]


def as_feature_keys(config: TrainConfig, data: OnlineData) -> FeatureKeys:
    """The keys with which data_prep.features would store these features."""
    same = data.model_dump(include={"chat_template", "max_length", "limit"})
    of_target = {"target": config.target, "revision": config.revision, "dtype": data.target_dtype}
    splits = {"train": data.train, "heldout": data.heldout}
    return validate(FeatureKeys, same | of_target | {"splits": splits, "exit_layers": list(config.taps)}, source="data")


def load_target(config: TrainConfig, device: torch.device) -> TargetModel:
    """The target on the training device, on transformers' layers, because other engines copy the weights.

    Raises:
        ValueError: nothing loadable there, or an unsupported model.
    """
    data = config.data
    assert data is not None
    quiet_in_log_files()
    place: dict[str, Any] = {"device_map": data.target_device_map} if data.target_device_map else {"device": device}
    return TargetModel.from_pretrained(
        config.target, data.target_dtype, revision=config.revision, engine="stock", capture_only=True, **place
    )
