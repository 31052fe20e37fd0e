"""Drafter, what the loop asks of a method; LearnedDrafter, one with trained weights."""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

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
    from drafters.loop.generate import DecodeState
    from drafters.policy.shape import Chooser


class Promised(NamedTuple):
    """What so many ``steps`` (of a batch row) were to give, and to take, in times of a step without a draft.

    ``choice``: the latest, in words.
    """

    steps: float
    tokens: float
    plain_steps: float
    choice: str


class Drafter(TransformersMixin):
    """Proposes tokens for a target. One file a method; the loop knows nothing but this class.

    Class attributes:
        name: what configs call the method; also the name of its file in this package.
        options: pydantic schema of the method's options, where their defaults stand; the constructor takes one.
        max_batch: rows the method can decode at once; None for any number.
        rewinds: whether committed tokens may be taken back, so that the method can accelerate a draft model (cascade).
        follows: whether another drafter may draft some of the steps (hybrid).

    Attributes:
        lossless: False where the target's output distribution may change, by the method or an option of it; shown
            wherever results are.
        max_draft: the most nodes one draft may have; the loop sizes its buffers by it.
        max_context: positions that the target, and whatever else drafts, were made for.
        taps: hidden states wanted from every target forward, by the number of layers before them.
        remembers: whether what one prompt taught serves the next (a pool that outlives it).
        settings: the options that it was built with.
        auto: what chooses the shape of its drafts, where that is not fixed.
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
    auto: "Chooser | None" = None

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

    def prepare(self, batch: int, sampling: Sampling, longest: int) -> None:
        """Measure what steps cost, for texts of up to ``longest`` tokens, if drafts go by that and it is not known yet.

        That takes seconds, once on a machine. ``begin`` does it, too: whoever would not have the first prompt wait for
        it calls this before.
        """

    def begin(self, state: "DecodeState", output: FeatureOutput) -> None:
        """Reset per-prompt state: the prompt was prefilled (``output`` holds its rows) and the first token sampled.

        A drafter's own prefill belongs here, where the clock counts it as prefill.
        """

    def promised(self) -> "Promised | None":
        """What a drafter that shapes its drafts by itself has promised for all its steps so far; None: it does not."""
        return None

    def join(self, state: "DecodeState", rows: list[int], part: "DecodeState", output: FeatureOutput) -> None:
        """``rows`` of a running batch were given to the prompts of ``part``, prefilled beside it as for ``begin``.

        Raises:
            NotImplementedError: the method decodes one row at a time, or a batch only as a whole.
        """
        raise NotImplementedError(f"{self.name} takes no prompt into a running batch")

    def propose(self, state: "DecodeState") -> DraftTree:
        """The draft that follows the last committed token of every row."""
        return state.nothing

    def while_verifying(self, state: "DecodeState", draft: DraftTree, output: FeatureOutput) -> None:
        """The target's forward over ``draft`` was launched; on CUDA it may still run: do not read ``output`` yet."""

    def rewind(self, state: "DecodeState", kept: int) -> None:
        """Go back: of the observed tokens only the first ``kept`` still hold; others may follow unobserved (a cascade).

        Raises:
            NotImplementedError: the method cannot go back; ``rewinds`` says so beforehand.
        """
        raise NotImplementedError(f"{self.name} cannot go back")

    def observe(self, state: "DecodeState", draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        """Catch caches and pools up: a step was committed (``output`` holds [root, nodes]), and it was not the last.

        Of a drafter that ``follows``, other nodes may hang behind its ``draft``: see ``Verdict.own_rows``.
        """

    def may_rest(self) -> int:
        """After a step without a draft: how many of the next ones will have none, whatever comes.

        Where a step takes half a millisecond, asking for nothing takes a twentieth of it.
        """
        return self.auto.may_rest() if self.auto is not None else 0

    def rest(self, steps: int) -> None:
        """The last so many steps had no draft, and ``propose`` was not asked for one. What became of each, ``follow``
        has said; of the last one it will, or ``observe``, if a row of several has ended with it."""
        if self.auto is not None:
            self.auto.rest(steps)

    def follow(self, state: "DecodeState", output: FeatureOutput, verdict: Verdict) -> None:
        """As ``observe``, of a step that another drafter drafted.

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
