"""MTP: the target's own next-token-prediction layers draft (DeepSeek-V3, arXiv 2412.19437, section 2.2).

At index i the layer takes the target's hidden state at i and the embedding of token i + 1, and predicts the hidden
state whose logits are those of token i + 2. A further step takes its own output in place of the target's state. So it
is EAGLE with other inputs: each is normed, and the output goes through the layer's own norm before the target's LM
head. Of several layers, step k runs layer k mod their number. Without a checkpoint the layers in the target's own files
draft.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import Config
from drafters.drafting.grow import Slots
from drafters.drafting.tree_plan import TreePlan
from drafters.heads.mtp.module import MTPLayer
from drafters.heads.mtp.own import load_own
from drafters.heads.mtp.shape import MTPShape
from drafters.heads.shape import split
from drafters.hub.checkpoint import EXACT
from drafters.learned import LearnedDrafter
from drafters.loop.call import check_loaded
from drafters.loop.state import DecodeState, last_of, padded, rows_of
from drafters.methods.eagle import EagleDrafter, EagleOptions, FeatureHead, FeatureSlots, shaped
from drafters.model.cache import KVCache
from drafters.model.candidates import with_candidates
from drafters.model.draft_head import listed_head, quantize_layers
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import identity
from drafters.model.target import FeatureOutput, TargetModel

DEPTHS = {"auto": 6, "chain": 3, "static": 5, "dynamic": 4}


class MTPOptions(EagleOptions):
    """Options of the MTP drafter: those of EAGLE. ``depth``: by default 3 (chain), 4 (dynamic), at most 6 (auto); with
    several layers their number."""


class MTPFeatures(FeatureHead):
    """MTP layers in the loop. The base class drafts with the first.

    Attributes:
        parts: each layer, from (features, tokens, at position 0) to what is fed back.
        norms: by layer, between what is fed back and the LM head.
    """

    def __init__(self, target: TargetModel, module: MTPLayer, options: MTPOptions) -> None:
        lm_head, runner = with_candidates(listed_head(target, module, options), module, options), target.runner
        normed = module.shape.feeds_back_normed
        self.parts, self.norms = [], []
        for number, layer in enumerate(module.layers):
            around = module.parts(number)
            norm, fc = runner.norm(around.norm), runner.linear(around.fc)

            def enter(states: Tensor, tokens: Tensor, first: Tensor, around: Any = around, fc: Any = fc) -> Tensor:
                return around.enter(states, target.embed(tokens), first, fc)  # type: ignore[no-any-return]

            part = runner.part([layer], enter, norm if normed else identity)
            if options.draft_dtype is not None:
                quantize_layers(part, options.draft_dtype, fc)
            self.parts.append(part)
            self.norms.append(identity if normed else norm)
        super().__init__(target, module, self.parts[0], lm_head)
        self.layer = target.config

    @property
    def caches(self) -> list[KVCache]:
        """The cache of each layer."""
        return [self.cache]

    def extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        return self.run(0, features, tokens, rows)

    def run(self, number: int, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        """Run one layer over features and tokens ``[B, R]``: what is fed back, ``[B, R, H]``."""
        cache = self.caches[number]
        begins = [not (length or dropped) for length, dropped in zip(cache.lengths, cache.dropped, strict=True)]
        first = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        if rows is CHAIN and any(begins):
            first[:, 0] = torch.tensor(begins, device=tokens.device)
        return self.target.runner.run(self.parts[number], [features, tokens, first], cache, rows)[0]


class OneLayer(MTPFeatures):
    """One MTP layer, which takes all steps."""

    def __init__(self, target: TargetModel, module: MTPLayer, options: MTPOptions) -> None:
        super().__init__(target, module, options)
        self.lm_head.enter = self.norms[0]


class SeveralLayers(MTPFeatures):
    """Several MTP layers. At each token, layer k reads what layer k - 1 gave one token before.

    So each layer has a cache of its own, which begins k tokens after the text. In a text of fewer tokens than layers,
    later layers read zeros.

    Attributes:
        later: caches of the second and later layers.
        latest: what each layer gave at the last token that it has read, ``[B, 1, H]``.
    """

    later: Sequence[KVCache] = ()  # before the first prompt
    latest: list[Tensor]

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache, *self.later]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        first, *self.later = (super(SeveralLayers, self).new_cache(batch, capacity) for _ in self.parts)
        for number, cache in enumerate(self.later, 1):
            cache.dropped = [number] * batch
        zeros = torch.zeros(batch, 1, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        self.latest = [zeros] * len(self.parts)
        return first

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        for cache in self.later:
            cache.release()
        super().begin(state, output)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        later, latest = self.later, self.latest
        super().join(state, rows, part, output)
        for cache, joined in zip(later, self.later, strict=True):
            for number, row in enumerate(rows):
                cache.copy_row(row, joined, number)
            joined.release()
        places = torch.tensor(rows, device=self.target.device)
        pairs = zip(latest, self.latest, strict=True)
        self.later, self.latest = later, [known.index_copy(0, places, new[: len(rows)]) for known, new in pairs]

    def catch_up(self, state: DecodeState) -> Any:
        for cache in self.later:
            state.empty_finished(cache)
        return super().catch_up(state)

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> Tensor:
        """As the base class, for every layer."""
        tokens, known, source = self.following(counts, state), list(self.cache.lengths), features
        before = [0] * len(counts)  # tokens of these that the previous layer skipped
        for number, cache in enumerate(self.caches):
            pairs = list(zip(known, counts, strict=True))
            skipped = [min(max(number - length, 0), count) for length, count in pairs]
            kept = [count - skip for count, skip in zip(counts, skipped, strict=True)]
            outputs = source[:, :0]
            if any(kept):
                ends = zip(skipped, counts, before, strict=True)
                hidden = rows_of(source, [list(range(skip - less, count - less)) for skip, count, less in ends])
                ids = [row[skip:] for row, skip in zip(tokens, skipped, strict=True)]
                outputs = self.run(number, hidden, padded(ids, self.target.device))
                cache.commit_first(kept)
            source = torch.cat([self.latest[number], outputs], dim=1)
            self.latest[number], before = last_of(source, [count + 1 for count in kept])[:, None], skipped
        return self.latest[0]

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        return LayeredSlots(self, self.catch_up(state))


class LayeredSlots(FeatureSlots):
    """Nodes scored by several layers. Step k runs its layer over all nodes so far, because each reads the output of
    step k - 1 for its parent."""

    def __init__(self, head: SeveralLayers, predicted: Tensor) -> None:
        super().__init__(head, predicted, None)
        self.head, self._outputs = head, predicted[:, :0]  # [B, nodes so far, H]
        self._seen: list[Tensor] = []  # by level, [B, n, nodes so far]
        self._tokens = self._parents = torch.zeros(len(predicted), 0, dtype=torch.long, device=predicted.device)

    def logits(self, depth: int) -> Tensor:
        self._depth, norm = depth, self.head.norms[depth % len(self.head.norms)]
        logits, self.places, self.among = self.head.lm_head.scored(norm(self._predicted))
        return logits

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        head, count = self.head, len(self.head.parts)
        parents = parents.expand(len(tokens), -1)
        level = self._rows(parents)
        assert level.see is not None
        self._seen.append(level.see)
        nodes = level.see.shape[-1]
        see = torch.cat([F.pad(rows, (0, nodes - rows.shape[-1])) for rows in self._seen], dim=1)
        above = self._seen[-2].shape[1] if self._depth else 0  # nodes of the level above
        first = level.offset - above + 1 if self._depth else 0  # of them among [root, nodes]
        self._tokens = torch.cat([self._tokens, head.lm_head.tokens(tokens)], dim=1)
        self._parents = torch.cat([self._parents, parents + first], dim=1)
        sources = torch.cat([head.latest[self._depth % count], self._outputs], dim=1)
        features = sources.gather(1, self._parents[..., None].expand(-1, -1, sources.shape[-1]))
        rows = Rows(see, level.depths)
        self._outputs = head.run((self._depth + 1) % count, features, self._tokens, rows)
        self._predicted = self._outputs[:, level.offset :]


class MTPDrafter(LearnedDrafter):
    """Drafts with MTP layers, of the target's own files or of a checkpoint.

    Raises:
        ValueError: ``paths`` that are no tree, or a static tree with more children of a node than draft tokens.
    """

    name = "mtp"
    shape: ClassVar[type[MTPShape]] = MTPShape
    module_class = MTPLayer
    options: ClassVar[type[Config]] = MTPOptions
    card_title = "MTP layer ([DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 2.2)"
    stitched = True
    max_batch = None
    follows = True
    unread = EagleDrafter.unread

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        exact = {name: value.clone() for name, value in module.named_buffers() if name.endswith(EXACT)}
        super().__init__(target, module, options)
        for name, value in exact.items():
            self.module.get_submodule(name.removesuffix(f".{EXACT}")).register_buffer(EXACT, value.to(target.device))
        layers: int = self.module.shape.layers  # type: ignore[union-attr, assignment]
        head = (OneLayer if layers == 1 else SeveralLayers)(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, *shaped(options, head, options.depth or (DEPTHS[options.tree] if layers == 1 else layers)))

    @classmethod
    def from_target(cls, target: TargetModel, **options: Any) -> Self:
        """Load the layers of the target's own files; ``options`` may have keys of their shape.

        Raises:
            ValueError: the files have none that can be read, its tensors do not fit the target's family, or options
                that belong to a checkpoint or to another tree.
        """
        check_loaded(target)
        if options.get("adapter") is not None:
            raise ValueError("adapter is given, and no checkpoint; give checkpoint: the drafter that it is for")
        asked, _ = split(cls.shape, options)
        name = target.source or target.config.name_or_path or target.name
        keys, weights = load_own(name, target.revision)
        for key in ("kind", "layers"):
            if asked.get(key, keys[key]) != keys[key]:
                raise ValueError(f"{key} is {asked[key]}, but the MTP layers of {name} have {keys[key]}; leave it out")
        drafter = cls.from_weights(target, weights, keys | options)
        drafter.refuse_unread(options)
        return drafter
