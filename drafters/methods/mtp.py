"""MTP: the target's own next-token-prediction layer drafts (DeepSeek-V3, arXiv 2412.19437, section 2.2).

At index i the layer takes the target's hidden state at i and the embedding of token i + 1, and predicts the hidden
state whose logits are those of token i + 2. A further step takes its own output in place of the target's state. So it
is EAGLE with other inputs: each is normed, and the output goes through the layer's own norm before the target's LM
head. Without a checkpoint the layer in the target's own files drafts.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from drafters.config import Config
from drafters.heads.mtp.module import MTPLayer
from drafters.heads.mtp.own import load_own
from drafters.heads.mtp.shape import MTPShape
from drafters.heads.shape import split
from drafters.hub.checkpoint import EXACT
from drafters.learned import LearnedDrafter
from drafters.loop.call import check_loaded
from drafters.methods.eagle import EagleDrafter, EagleOptions, FeatureHead, shaped
from drafters.model.candidates import with_candidates
from drafters.model.draft_head import listed_head, quantize_layers
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import identity
from drafters.model.target import TargetModel

DEPTHS = {"auto": 6, "chain": 3, "static": 5, "dynamic": 4}


class MTPOptions(EagleOptions):
    """Options of the MTP drafter: those of EAGLE. ``depth``: by default 3 (chain), 4 (dynamic), at most 6 (auto)."""


class MTPFeatures(FeatureHead):
    """An MTP layer in the loop."""

    def __init__(self, target: TargetModel, module: MTPLayer, options: MTPOptions) -> None:
        lm_head, runner = with_candidates(listed_head(target, module, options), module, options), target.runner
        norm, fc = runner.norm(module.norm), runner.linear(module.fc)
        if not module.shape.feeds_back_normed:
            lm_head.enter = norm

        def enter(states: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
            return module.enter(states, target.embed(tokens), first, fc)

        leave = norm if module.shape.feeds_back_normed else identity
        part = runner.part(list(module.layers), enter, leave)
        if options.draft_dtype is not None:
            quantize_layers(part, options.draft_dtype, fc)
        super().__init__(target, module, part, lm_head)
        self.layer = target.config

    def extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        begins = [
            not (length or dropped) for length, dropped in zip(self.cache.lengths, self.cache.dropped, strict=True)
        ]
        first = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        if rows is CHAIN and any(begins):
            first[:, 0] = torch.tensor(begins, device=tokens.device)
        return self.target.runner.run(self.part, [features, tokens, first], self.cache, rows)[0]


class MTPDrafter(LearnedDrafter):
    """Drafts with an MTP layer, of the target's own files or of a checkpoint.

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
        head = MTPFeatures(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, *shaped(options, head, options.depth or DEPTHS[options.tree]))

    @classmethod
    def from_target(cls, target: TargetModel, **options: Any) -> Self:
        """Load the layer of the target's own files; ``options`` may have keys of its shape.

        Raises:
            ValueError: the files have none that can be read, its tensors do not fit the target's family, or options
                that belong to a checkpoint or to another tree.
        """
        check_loaded(target)
        if options.get("adapter") is not None:
            raise ValueError("adapter is given, and no checkpoint; give checkpoint: the drafter that it is for")
        keys, _ = split(cls.shape, options)
        name = target.source or target.config.name_or_path or target.name
        kind, weights = load_own(name, target.revision)
        if keys.get("kind", kind) != kind:
            raise ValueError(f"kind is {keys['kind']}, and the MTP layer of {name} is of kind {kind}; leave it out")
        drafter = cls.from_weights(target, weights, options | {"kind": kind})
        drafter.refuse_unread(options)
        return drafter
