"""Drafter: what the decoding loop asks of a method."""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from drafters.config import Config, validate
from drafters.loop.acceptance import Rule, Verdict, verify_greedy, verify_sampled
from drafters.loop.call import check_loaded
from drafters.loop.hf_generate import ForTransformers
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.model.running import CHAINS_ONLY
from drafters.model.target import FeatureOutput, TargetModel

if TYPE_CHECKING:
    from drafters.loop.state import DecodeState


class Policy(Protocol):
    """Chooses the shape of a drafter's drafts from measured costs and acceptance (``drafters.policy``)."""

    def prepare(self, drafter: "Drafter", batch: int, sampling: Sampling, longest: int) -> None:
        """Measure the step costs for sequences of up to ``longest`` tokens, unless they are known. Takes seconds."""

    def begin(self) -> None:
        """Forget what was counted before: a generation depends on its own text only, not on those before it."""

    def expected(self) -> "Expected | None":
        """What the policy expected of all steps so far, of all generations; None before the first."""


class Expected(NamedTuple):
    """Expected tokens and expected time over ``steps`` steps of a sequence; time is in units of one plain step.

    ``choice``: the latest choice, in words.
    """

    steps: float
    tokens: float
    plain_steps: float
    choice: str


class Drafter:
    """Proposes tokens for a target. One file per method; the loop knows only this class.

    Class attributes:
        name: the method's name in configs, and the name of its file.
        options: pydantic schema of the method's options and their defaults; the constructor takes an instance.
        max_batch: most sequences that the method can decode at once; None for any number.
        trees: True if its drafts are trees or have scratch rows with any options; such a method needs a target that
            verifies trees.
        rewinds: True if committed tokens can be taken back, so that the method can accelerate a draft model (cascade).
        follows: True if another drafter may draft some of the steps (hybrid).

    Attributes:
        lossless: False where the target's output distribution may change; shown beside results.
        max_draft: most nodes of one draft; the loop sizes its buffers by it.
        max_context: positions that the target, and a draft model, were made for.
        taps: hidden states needed from every target forward, by the number of layers before them.
        back: committed tokens that ``rewind`` may take back beyond a draft of its own (cascade).
        remembers: True if what one prompt taught is used for the next (a pool that outlives the prompt).
        settings: the options that the drafter was built with.
        parts: inner drafters (hybrid, cascade).
        policy: chooses the shape of the drafts (``tree: auto``); None where the options fix it.
    """

    name: ClassVar[str] = ""
    options: ClassVar[type[Config]] = Config
    max_batch: ClassVar[int | None] = 1
    trees: ClassVar[bool] = False
    rewinds: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    lossless: bool = True
    max_draft: int = 0
    taps: tuple[int, ...] = ()
    back: int = 0
    remembers: bool = False
    parts: "tuple[Drafter, ...]" = ()
    policy: Policy | None = None

    def __init__(self, target: TargetModel, options: Config) -> None:
        self.target, self.max_context, self.settings = target, target.max_context, options
        if self.trees:
            self.needs_trees("use a method that drafts chains, such as speculative or prompt_lookup")

    @classmethod
    def from_options(cls, target: TargetModel, **options: Any) -> Self:
        """Build from a config's options.

        Raises:
            ValueError: an unknown or wrong option.
        """
        check_loaded(target)
        return cls(target, validate(cls.options, options, source=f"options of drafter {cls.name!r}"))

    def needs_trees(self, instead: str) -> None:
        """Raise ValueError if the target verifies chains only; ``instead``: what to use or to set."""
        if self.target.chains_only:
            raise ValueError(f"{self.name} drafts trees, and {self.target.name} {CHAINS_ONLY}; {instead}")

    def for_transformers(self, streamer: Any = None, seed: int | None = None) -> ForTransformers:
        """Return what decodes with this drafter: ``model.generate(**inputs, custom_generate=...)``.

        ``model`` is the target's own model.

        Args:
            streamer: gets the tokens as they are committed; transformers does not pass on the one of ``generate``.
            seed: seed of the random numbers; None draws one from torch's global generator, which ``set_seed`` sets.

        Raises:
            ValueError: the method is lossy.
        """
        return ForTransformers(self, streamer, seed)

    def rule(self, sampling: Sampling) -> Rule:
        """The acceptance rule; lossless unless overridden."""
        return verify_greedy if sampling.greedy else verify_sampled

    def begin(self, state: "DecodeState", output: FeatureOutput) -> None:
        """Reset per-prompt state after the prefill (``output`` is the prompt's) and the first sampled token.

        A drafter's own prefill belongs here, where the clock counts it as prefill.
        """
        if self.policy is not None:
            self.policy.prepare(self, state.batch, state.sampling, state.longest)
            self.policy.begin()

    def join(self, state: "DecodeState", rows: list[int], part: "DecodeState", output: FeatureOutput) -> None:
        """Replace sequences ``rows`` of a running batch by the prompts of ``part``, prefilled as for ``begin``.

        Raises:
            NotImplementedError: the method decodes one sequence at a time, or a batch only as a whole.
        """
        raise NotImplementedError(f"{self.name} takes no prompt into a running batch")

    def propose(self, state: "DecodeState") -> DraftTree:
        """Return the draft that follows the last committed token of every sequence."""
        return state.nothing

    def while_verifying(self, state: "DecodeState", draft: DraftTree, output: FeatureOutput) -> None:
        """Called after the launch of the target's forward over ``draft``. On CUDA it may still run: read no values."""

    def rewind(self, state: "DecodeState", length: int) -> None:
        """Forget all observed tokens but the first ``length``. Tokens that follow may be unobserved (a cascade).

        Raises:
            NotImplementedError: the method cannot go back; ``rewinds`` says so beforehand.
        """
        raise NotImplementedError(f"{self.name} cannot go back")

    def observe(self, state: "DecodeState", draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        """Update caches and pools after a committed step that was not the last; ``output`` holds [root, nodes]."""

    def follow(self, state: "DecodeState", output: FeatureOutput, verdict: Verdict) -> None:
        """As ``observe``, for a step that another drafter drafted.

        Raises:
            NotImplementedError: the method drafts every step itself; ``follows`` says so beforehand.
        """
        raise NotImplementedError(f"{self.name} drafts every step itself")
