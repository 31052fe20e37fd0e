"""LearnedDrafter: a drafter with a trained head."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.base import Drafter
from drafters.config import Config, validate
from drafters.drafting.head import Head
from drafters.drafting.tree_plan import TreePlan, check_children
from drafters.heads.forms import HeadForms
from drafters.heads.shape import HeadShape, split
from drafters.hub import checkpoint
from drafters.hub.model_card import Card
from drafters.hub.publishing import GENERATE_FILES, push_to_hub
from drafters.loop.acceptance import Verdict
from drafters.loop.call import check_loaded
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.model import head_adapter
from drafters.model.candidates import add_pair
from drafters.model.draft_head import DRAFT_IDS, DraftHead, check_ids
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import ShapePolicy
from drafters.policy.shaper import Shaper


class LearnedDrafter(Drafter):
    """A drafter that holds a trained head and a shaper; saved as config.json and model.safetensors, or on the Hub.

    A method's constructor calls this one, then ``hold``. config.json stores the head's shape and the drafting options.

    Class attributes:
        shape: schema of the head's shape. module_class: class of the head's module, which is built from a shape.
        card_title: the method on the model card, with a link to its paper.
        forms: forms in which its authors' code and engines store such a head; by default only this toolkit loads it.
        stitched: True if engines load it from its target's own files (``drafters.stitch``), not from an export.
        unread: options that it does not read, by ``tree``.
        unsaved: options that config.json does not store.
    """

    shape: ClassVar[type[HeadShape]] = HeadShape
    module_class: ClassVar[type[nn.Module]]
    card_title: ClassVar[str] = ""
    forms: ClassVar[HeadForms] = HeadForms()
    stitched: ClassVar[bool] = False
    unread: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    unsaved: ClassVar[frozenset[str]] = frozenset()
    head: Head
    shaper: Shaper

    def __init__(self, target: TargetModel, module: nn.Module, options: Config) -> None:
        super().__init__(target, options)
        self.module = module.to(target.device, target.dtype).eval().requires_grad_(False)
        self.provenance: dict[str, Any] = {}
        self._plan: TreePlan | None = None  # of the latest draft

    def hold(self, head: Head, shaper: Shaper, rows: int = 0) -> None:
        """Take the head and the shaper; ``rows``: cache slots that the head needs for a draft, if more than its nodes.

        Raises:
            ValueError: nodes with more children than the drafter has tokens; trees, on a target that verifies chains.
        """
        if self.target.chains_only and isinstance(shaper.policy, ShapePolicy):
            shaper.nodes = shaper.policy.most_nodes = shaper.depth
            shaper.policy.ranks = 1
        elif shaper.branches:
            self.needs_trees("draft a chain: set tree to chain, and no paths")
        for plan in shaper.fixed.values():
            check_children(plan, head.lm_head.width)
        self.head, self.shaper, self.taps = head, shaper, head.taps
        self.max_draft = max(shaper.nodes, rows)

    @property
    def policy(self) -> Any:
        """The policy of the shaper (``tree: auto``, ``truncate``); None where the options fix the drafts."""
        return self.shaper.policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        self.shaper.policy = policy

    @property
    def lm_head(self) -> DraftHead:
        """The LM head that the head drafts with."""
        return self.head.lm_head

    # ------------------------------------------------------------------------------------------- drafting

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self.head.begin(state, output)
        for each in self.head.lm_heads:
            each.read(state.tokens)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self.head.join(state, rows, part, output)

    def propose(self, state: DecodeState) -> DraftTree:
        depth = state.longest_draft(self.shaper.depth)
        self._plan = plan = self.shaper.plan(state, depth)
        if depth < 1 or (plan is not None and not plan.size):
            return state.nothing
        for each in self.head.lm_heads:
            each.read(state.tokens)
        if (draft := self.head.grown(state, plan)) is not None:
            return draft
        draft = self.shaper.grow(self.head.slots(state, plan), plan, depth, state)
        if draft.size:
            names = self.head.lm_head
            draft.tokens, draft.q = names.tokens(draft.tokens), None if draft.q is None else names.spread(draft.q)
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self.head.follow(state, output, verdict)
        if self.shaper.policy is not None and self._plan is not None:
            self.shaper.policy.learn(self._plan, draft.size, state, verdict)

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        self.head.follow(state, output, verdict)

    # ------------------------------------------------------------------------------------------- loading and saving

    @classmethod
    def from_target(cls, target: TargetModel, **options: Any) -> Self:
        """Load the drafter that the target's own files hold, if the method has any there.

        Raises:
            ValueError: there is none.
        """
        raise ValueError(f"drafter {cls.name!r} is learned: give checkpoint: a folder or a Hub repository")

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, shape: HeadShape) -> nn.Module:
        """The untrained module of this shape, for a target of this configuration."""
        return cls.module_class(target_config, shape)

    @classmethod
    def read_section(cls, section: Mapping[str, Any], source: str) -> tuple[Any, Any]:
        """Shape and options in the ``drafter`` section of a config.json.

        Raises:
            ValueError: an unknown, missing or wrong key; ``source`` is the name that errors give it.
        """
        keys, rest = split(cls.shape, dict(section))
        if "taps" in cls.shape.model_fields and not keys.get("taps"):
            raise ValueError(f"{source}: missing key 'taps', the target's states that the head was trained on")
        return validate(cls.shape, keys, source), validate(cls.options, rest, source)

    @classmethod
    def from_checkpoint(
        cls, target: TargetModel, path: str, revision: str | None = None, adapter: str | None = None, **options: Any
    ) -> Self:
        """Load a trained drafter from a folder or a Hub repository, strictly; ``adapter``: with that LoRA merged.

        Raises:
            ValueError: nothing loadable there, another method's checkpoint, one of another target, wrong options, or an
                adapter of another drafter.
        """
        check_loaded(target)
        config, state = head_adapter.load_head(path, revision, adapter)
        if config["drafter_type"] != cls.name:
            raise ValueError(f"{path} holds a drafter of type {config['drafter_type']!r}, not {cls.name!r}")
        checkpoint.check_target(config, target)
        drafter = cls.from_weights(target, state, config["drafter"] | options)
        drafter.refuse_unread(options)
        drafter.provenance = config
        return drafter

    def refuse_unread(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError if ``options`` has one that the drafter's ``tree`` does not read."""
        tree = getattr(self.settings, "tree", "")
        if wrong := [name for name in self.unread.get(tree, ()) if options.get(name) is not None]:
            raise ValueError(f"{wrong[0]} is given, and tree={tree} does not read it; leave one of them out")

    @classmethod
    def from_weights(cls, target: TargetModel, weights: dict[str, Tensor], options: dict[str, Any]) -> Self:
        """A drafter whose module has a copy of ``weights``, and of ids and a pair of candidates if they are among them.

        Raises:
            ValueError: weights that are not the module's, ids that are no tokens, or wrong options.
        """
        shape, chosen = cls.read_section(options, f"options of drafter {cls.name!r}")
        module = cls.build_module(target.config, shape)
        if (ids := weights.get(DRAFT_IDS)) is not None:
            check_ids(ids, target.vocab_size, "the checkpoint")
            module.register_buffer(DRAFT_IDS, torch.zeros_like(ids))  # loaded and saved with the weights
        add_pair(module, weights)
        checkpoint.load_state(module, weights)
        return cls(target, module, chosen)

    def drafter_config(self) -> dict[str, Any]:
        """The ``drafter`` section of config.json: the keys of shape and options that are no defaults."""
        module: Any = self.module
        return module.shape.stored() | self.settings.model_dump(exclude_defaults=True, exclude=set(self.unsaved))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and the two files of ``model.generate(custom_generate=folder)``."""
        names = {checkpoint.HUB_NAMES: [self.target.name] if self.target.on_hub else []}
        known = self.provenance or checkpoint.make_config(self.name, {}, self.target, names)
        checkpoint.save_checkpoint(folder, self.module, known | {"drafter": self.drafter_config()})
        for name, content in GENERATE_FILES.items():
            file = Path(folder) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)

    def push_to_hub(self, repo_id: str, card: Card | None = None, **hub_options: Any) -> str:
        """Upload to the Hub with a model card; returns the repository's address.

        Args:
            card: license, figures and more: ``Card(license="mit", certificate=..., report=...)``.
            hub_options: options of ``publishing.push_to_hub``: ``private``, ``revision``, ``token``.
        """
        card = card or Card()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_to_hub(folder, repo_id, card=replace(card, title=card.title or self.card_title), **hub_options)
