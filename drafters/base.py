"""Drafter, what the loop asks of a method; LearnedDrafter, one with trained weights."""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import Config, validate
from drafters.hub import checkpoint
from drafters.hub.publishing import PublishMixin
from drafters.loop.acceptance import Rule, Verdict, rule_for
from drafters.loop.call import check_loaded
from drafters.loop.hf_generate import TransformersMixin
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.model import head_adapter
from drafters.model.draft_head import DRAFT_IDS, DraftHead, DraftHeadOptions, check_ids, kept_ids
from drafters.model.target import FeatureOutput, TargetModel

if TYPE_CHECKING:
    from drafters.loop.state import DecodeState


class Policy(Protocol):
    """Chooses the shape of a drafter's drafts from measured costs and acceptance (``drafters.policy``)."""

    def prepare(self, drafter: "Drafter", batch: int, sampling: Sampling, longest: int) -> None:
        """Measure the step costs for rows of up to ``longest`` tokens, unless they are known. Takes seconds."""

    def expected(self) -> "Expected | None":
        """What the policy expected of all steps so far; None before the first."""


class Expected(NamedTuple):
    """Expected tokens and expected time over ``steps`` steps of a batch row; time is in units of one plain step.

    ``choice``: the latest choice, in words.
    """

    steps: float
    tokens: float
    plain_steps: float
    choice: str


class Drafter(TransformersMixin):
    """Proposes tokens for a target. One file per method; the loop knows only this class.

    Class attributes:
        name: the method's name in configs, and the name of its file.
        options: pydantic schema of the method's options and their defaults; the constructor takes an instance.
        max_batch: most rows that the method can decode at once; None for any number.
        rewinds: True if committed tokens can be taken back, so that the method can accelerate a draft model (cascade).
        follows: True if another drafter may draft some of the steps (hybrid).

    Attributes:
        lossless: False where the target's output distribution may change; shown beside results.
        max_draft: most nodes of one draft; the loop sizes its buffers by it.
        max_context: positions that the target, and a draft model, were made for.
        taps: hidden states needed from every target forward, by the number of layers before them.
        remembers: True if what one prompt taught is used for the next (a pool that outlives the prompt).
        settings: the options that the drafter was built with.
        parts: inner drafters (hybrid, cascade).
        policy: chooses the shape of the drafts (``tree: auto``); None where the options fix it.
    """

    name: ClassVar[str] = ""
    options: ClassVar[type[Config]] = Config
    max_batch: ClassVar[int | None] = 1
    rewinds: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    lossless: bool = True
    max_draft: int = 0
    taps: tuple[int, ...] = ()
    remembers: bool = False
    parts: "tuple[Drafter, ...]" = ()
    policy: Policy | None = None

    def __init__(self, target: TargetModel, options: Config) -> None:
        self.target, self.max_context, self.settings = target, target.max_context, options

    @classmethod
    def from_options(cls, target: TargetModel, **options: Any) -> Self:
        """Build from a config's options.

        Raises:
            ValueError: an unknown or wrong option.
        """
        check_loaded(target)
        return cls(target, validate(cls.options, options, source=f"options of drafter {cls.name!r}"))

    def rule(self, sampling: Sampling) -> Rule:
        """The acceptance rule; lossless unless overridden."""
        return rule_for(sampling)

    def begin(self, state: "DecodeState", output: FeatureOutput) -> None:
        """Reset per-prompt state after the prefill (``output`` holds the prompt's rows) and the first sampled token.

        A drafter's own prefill belongs here, where the clock counts it as prefill.
        """

    def join(self, state: "DecodeState", rows: list[int], part: "DecodeState", output: FeatureOutput) -> None:
        """Replace ``rows`` of a running batch by the prompts of ``part``, which were prefilled as for ``begin``.

        Raises:
            NotImplementedError: the method decodes one row at a time, or a batch only as a whole.
        """
        raise NotImplementedError(f"{self.name} takes no prompt into a running batch")

    def propose(self, state: "DecodeState") -> DraftTree:
        """Return the draft that follows the last committed token of every row."""
        return state.nothing

    def while_verifying(self, state: "DecodeState", draft: DraftTree, output: FeatureOutput) -> None:
        """Called after the launch of the target's forward over ``draft``. On CUDA it may still run: read no values."""

    def rewind(self, state: "DecodeState", kept: int) -> None:
        """Forget all observed tokens but the first ``kept``. Tokens that follow may be unobserved (a cascade).

        Raises:
            NotImplementedError: the method cannot go back; ``rewinds`` says so beforehand.
        """
        raise NotImplementedError(f"{self.name} cannot go back")

    def observe(self, state: "DecodeState", draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        """Update caches and pools after a committed step that was not the last; ``output`` holds [root, nodes].

        Another drafter's nodes may follow the nodes of ``draft`` (hybrid): see ``Verdict.own_rows``.
        """

    def follow(self, state: "DecodeState", output: FeatureOutput, verdict: Verdict) -> None:
        """As ``observe``, for a step that another drafter drafted.

        Raises:
            NotImplementedError: the method drafts every step itself; ``follows`` says so beforehand.
        """
        raise NotImplementedError(f"{self.name} drafts every step itself")


class LearnedDrafter(PublishMixin, Drafter):
    """A drafter with a trained ``module``; saved as config.json and model.safetensors, on disk or on the Hub.

    Class attributes:
        card_title: the method on the model card, with a link to its paper.
        layout: how its authors' code and engines store such a head; by default only this toolkit loads it.
        recipe: how train.start trains and measures it; None: it does not.
    """

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

    def draft_head(self, options: DraftHeadOptions, own: nn.Linear | None = None) -> DraftHead:
        """The target's LM head, or the drafter's ``own``, as this drafter uses it.

        Raises:
            ValueError: ``draft_vocab`` is set, and the module has no ids, or fewer.
        """
        listed = getattr(self.module, DRAFT_IDS, None)
        ids, text = kept_ids(listed, options, self.target.vocab_size, "the checkpoint")
        return DraftHead(self.target, ids, options.draft_dtype, own, text)
