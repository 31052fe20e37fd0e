"""LearnedDrafter: a drafter with trained weights."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.base import Drafter
from drafters.config import Config, validate
from drafters.hub import checkpoint
from drafters.hub.declared import Layout, Recipe
from drafters.hub.model_card import Card
from drafters.hub.publishing import GENERATE_FILES, push_to_hub
from drafters.loop.call import check_loaded
from drafters.model import head_adapter
from drafters.model.draft_head import D2T, DRAFT_IDS, DraftHead, DraftHeadOptions, check_ids, draft_ids, kept_ids
from drafters.model.target import TargetModel


class LearnedDrafter(Drafter):
    """A drafter with a trained ``module``; saved as config.json and model.safetensors, on disk or on the Hub.

    Class attributes:
        card_title: the method on the model card, with a link to its paper.
        layout: how its authors' code and engines store such a head; by default only this toolkit loads it.
        recipe: how train.start trains and measures it; None: it does not.
        unread: by ``tree``, options that it does not read.
    """

    card_title: ClassVar[str] = ""
    layout: ClassVar[Layout] = Layout()
    recipe: ClassVar[Recipe | None] = None
    unread: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, target: TargetModel, module: nn.Module, options: Config) -> None:
        super().__init__(target, options)
        self.module = module.to(target.device, target.dtype).eval().requires_grad_(False)
        self.provenance: dict[str, Any] = {}

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        """The untrained module of a checkpoint's ``drafter`` section, for a target of this configuration."""
        raise NotImplementedError

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
        tree = getattr(drafter.settings, "tree", "")
        if wrong := [name for name in cls.unread.get(tree, ()) if options.get(name) is not None]:
            raise ValueError(f"{wrong[0]} is given, and tree={tree} does not read it; leave one of them out")
        drafter.provenance = config
        return drafter

    @classmethod
    def from_weights(cls, target: TargetModel, weights: dict[str, Tensor], options: dict[str, Any]) -> Self:
        """A drafter whose module has a copy of ``weights``, and of the draft vocabulary's ids if they are among them.

        Raises:
            ValueError: weights that are not the module's, ids that are no tokens, or wrong options.
        """
        checked = validate(cls.options, options, source=f"options of drafter {cls.name!r}")
        module = cls.build_module(target.config, options)
        if (ids := weights.get(DRAFT_IDS)) is not None:
            check_ids(ids, target.vocab_size, "the checkpoint")
            module.register_buffer(DRAFT_IDS, torch.zeros_like(ids))  # loaded and saved with the weights
        checkpoint.load_state(module, weights)
        return cls(target, module, checked)

    def drafter_config(self) -> dict[str, Any]:
        """What ``build_module`` needs to build the module again."""
        return {}

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
            hub_options: of ``publishing.push_to_hub``: ``private``, ``revision``, ``token``.
        """
        card = card or Card()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_to_hub(folder, repo_id, card=replace(card, title=card.title or self.card_title), **hub_options)

    def own_draft_head(self, dtype: Literal["int8"] | None) -> DraftHead:
        """The module's ``lm_head``, whose rows ``d2t`` may name; the target's LM head if it has none.

        Raises:
            ValueError: a d2t that is not increasing, or points outside of the vocabulary.
        """
        module: Any = self.module
        ids = draft_ids(getattr(module, D2T, None), self.target.vocab_size)
        return DraftHead(self.target, ids, dtype, module.lm_head)

    def draft_head(self, options: DraftHeadOptions, own: nn.Linear | None = None) -> DraftHead:
        """The target's LM head, or the drafter's ``own``, as this drafter uses it.

        Raises:
            ValueError: ``draft_vocab`` is set, and the module has no ids, or fewer.
        """
        listed = getattr(self.module, DRAFT_IDS, None)
        ids, text = kept_ids(listed, options, self.target.vocab_size, "the checkpoint")
        return DraftHead(self.target, ids, options.draft_dtype, own, text)
