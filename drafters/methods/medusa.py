"""Medusa: K heads on the target's last feature predict the next K tokens in parallel (Cai et al. 2024).

From feature_i, the target's LM head predicts token_{i+1} and head k = 1 .. K predicts token_{i+k+1}, independently of
each other. So all nodes of a depth have the same candidates as children, and the heads run once per step for any tree.
Verification is lossless unless ``accept: typical`` is set.
"""

from itertools import islice
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from drafters.config import Config, DraftSize
from drafters.drafting.grow import Marginals, Slots
from drafters.drafting.head import Head
from drafters.drafting.tree_plan import TreePlan, chain_plan, tree_plan
from drafters.heads.medusa.module import MedusaHeads
from drafters.heads.medusa.shape import MedusaShape
from drafters.learned import LearnedDrafter
from drafters.loop.acceptance import TINY, Rule, Verdict, collect
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState, last_of
from drafters.loop.tree import DraftTree
from drafters.model.candidates import CandidateOptions, with_candidates
from drafters.model.draft_head import DraftHeadOptions, Scores, listed_head, quantize_layers
from drafters.model.runner import model_time
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import Hazards, Probability, Rates, Way, likeliest
from drafters.policy.shaper import Shaper, by_costs

# Prior acceptance of the candidates of each rank, given that those of lower ranks are wrong: first head, later heads.
PRIOR = [[0.5, 0.25, 0.17, 0.13, 0.1, 0.08, 0.07, 0.06], [0.3, 0.16, 0.12, 0.09, 0.07, 0.06, 0.05, 0.05]]


class MedusaOptions(DraftHeadOptions, CandidateOptions):
    """Options of the Medusa drafter.

    ``tree``: chain drafts the first choice of each head; static a fixed tree, ``paths`` or the likeliest ``nodes`` by
    ``acceptance`` (section 2.3.3); auto the chain or tree with the most expected tokens per second, or nothing.
    ``depth``: number of heads that draft; by default all.
    ``top_k``: most candidates of a head.
    ``nodes``: most nodes of a static or auto tree.
    ``paths``: a static tree, each node given by the ranks of its ancestors and itself among their siblings.
    ``acceptance``: by "greedy" and "sampled", per depth, the acceptance of each rank's candidate given that those of
    lower ranks are wrong.
    ``accept``: lossless; or typical (section 2.3.1), which is lossy and at a temperature above 0 accepts a candidate x
    with p(x) > min(epsilon, delta exp(-H(p))).
    ``epsilon``, ``delta``: constants of typical acceptance.
    """

    tree: Literal["auto", "chain", "static"] = "auto"
    depth: DraftSize | None = Field(default=None, ge=1)
    top_k: DraftSize = Field(default=10, ge=1)
    nodes: DraftSize = Field(default=63, ge=1)
    paths: list[list[DraftSize]] | None = None
    acceptance: dict[Way, list[list[Probability]]] | None = None
    accept: Literal["lossless", "typical"] = "lossless"
    epsilon: float = Field(default=0.09, gt=0.0, le=1.0)
    delta: float = Field(default=0.3, gt=0.0)


class ParallelHeads(Head):
    """Medusa's heads in the loop: one product per depth over the feature after the last accepted token."""

    def __init__(self, target: TargetModel, module: MedusaHeads, options: MedusaOptions) -> None:
        super().__init__(target, module)
        lm_heads: list[nn.Linear | None] = [*module.lm_heads()] or [None]
        heads = [listed_head(target, module, options, each) for each in lm_heads]
        self.lm_heads = [with_candidates(each, module, options) for each in heads]
        # The first blocks of all heads read the same feature and are one product.
        linear, blocks, width = target.runner.linear, module.blocks(), target.hidden_size
        first = nn.Linear(width, len(module) * width, device="meta")
        for part in ("weight", "bias"):
            whole = torch.cat([getattr(head[0].linear, part) for head in blocks])
            setattr(first, part, nn.Parameter(whole, requires_grad=False))
        self._first = linear(first)
        self._later = [[linear(block.linear) for block in head[1:]] for head in blocks]
        if options.draft_dtype is not None:
            quantize_layers(None, options.draft_dtype, self._first, *(part for head in self._later for part in head))
        self._feature: Tensor  # [B, 1, H] of the target, after the last accepted token

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._feature = last_of(output.features, state.prompt_lengths)[:, None].clone()

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self._feature[rows] = last_of(output.features, part.prompt_lengths)[:, None]

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        last = torch.tensor([path[-1] if path else 0 for path in verdict.rows], device=self.target.device)
        self._feature = output.features[torch.arange(state.batch, device=last.device), last][:, None]

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        return Marginals(*self.scores(self._feature, len(self.module) if plan is None else len(plan.levels)))

    def states(self, feature: Tensor) -> Tensor:
        """Features ``[B, 1, H]`` -> states of the heads ``[B, K, H]``; as ``MedusaHeads.forward``."""
        with model_time():
            states = feature + F.silu(self._first(feature).unflatten(-1, (len(self.module), -1))[:, 0])
            if not self._later[0]:
                return states
            each = []
            for state, layers in zip(states.unbind(1), self._later, strict=True):
                for layer in layers:
                    state = state + F.silu(layer(state))
                each.append(state)
            return torch.stack(each, dim=1)

    def scores(self, feature: Tensor, depth: int) -> Scores:
        """Logits ``[B, depth, W]`` of the first ``depth`` heads, over the draft vocabulary."""
        states = self.states(feature)[:, :depth]
        if len(self.lm_heads) == 1:
            return self.lm_head.scored(states)
        pairs = zip(self.lm_heads, states.unbind(1), strict=False)
        return Scores(torch.stack([head(state) for head, state in pairs], dim=1))


class MedusaDrafter(LearnedDrafter):
    """Drafts a chain or a tree of the heads' candidates.

    The draws of a depth are the children of all nodes above. This is lossless: verification walks one path, which meets
    each depth once, and the draws of depths are independent.

    Raises:
        ValueError: ``paths`` that are no tree; ``paths`` or ``depth`` deeper than the number of heads.
    """

    name = "medusa"
    shape: ClassVar[type[MedusaShape]] = MedusaShape
    module_class = MedusaHeads
    options: ClassVar[type[Config]] = MedusaOptions
    settings: MedusaOptions
    card_title = "Medusa heads ([Medusa](https://arxiv.org/abs/2401.10774))"
    max_batch = None
    follows = True
    unread: ClassVar = {"auto": ("paths",), "chain": ("paths",)}
    unsaved = frozenset({"accept", "epsilon", "delta"})  # a loaded drafter is lossless unless the user sets these

    def __init__(self, target: TargetModel, module: nn.Module, options: MedusaOptions) -> None:
        super().__init__(target, module, options)
        self.lossless = options.accept == "lossless"
        head = ParallelHeads(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, shaped(options, head, head.module.shape.heads))
        self.shaper.greedily = not self.lossless

    def rule(self, sampling: Sampling) -> Rule:
        if self.lossless or sampling.greedy:
            return super().rule(sampling)
        return Typical(self.settings.epsilon, self.settings.delta)


def shaped(options: MedusaOptions, head: ParallelHeads, heads: int) -> Shaper:
    """The shaper of Medusa's drafts: of the chain, of ``paths``, or of the likeliest nodes by prior acceptance.

    Raises:
        ValueError: ``paths`` that are no tree; ``paths`` or ``depth`` deeper than the number of ``heads``.
    """
    depth, deepest = options.depth or heads, max(map(len, options.paths or []), default=0)
    if max(depth, deepest) > heads:
        what = f"depth is {depth}" if depth > heads else f"a tree path has {deepest} nodes"
        raise ValueError(f"{what}, but the drafter has {heads} heads, one per depth; use {heads} or less")
    ranks, device = min(options.top_k, head.lm_head.width), head.target.device
    priors: dict[Way, Hazards] = {"greedy": PRIOR, "sampled": PRIOR}
    priors |= options.acceptance or {}
    if options.tree == "auto":
        return by_costs(options.nodes, depth, ranks, priors)

    def plan(prior: Hazards) -> TreePlan:
        if options.tree == "chain":
            return chain_plan(depth, device)
        if options.paths is not None:
            return tree_plan(tuple(map(tuple, options.paths)), device)
        best = islice(likeliest(Rates(depth, ranks, prior).acceptance(), depth), options.nodes)
        return tree_plan(tuple(path for _, path in best), device)

    fixed = {way: plan(prior) for way, prior in priors.items()}
    return Shaper(depth, max(each.size for each in fixed.values()), ranks, fixed=fixed)


class Typical:
    """Typical acceptance (section 2.3.1): the deepest path whose tokens all have p(x) > min(epsilon, delta exp(-H(p))).

    So a token needs less probability where the target's distribution p is flat. p is warped by the temperature, and the
    bonus is drawn from it; the paper's bonus is greedy. Of several deepest paths the likeliest is accepted, as in the
    released code.

    Args:
        epsilon: probability above which a token is always accepted.
        delta: factor of the entropy term.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta

    def __call__(
        self, draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Verdict:
        """The verdict on a tree; ``logits [B, N+1, V]`` of [root, nodes]."""
        every = torch.arange(len(logits), device=logits.device)
        best = torch.zeros_like(every)
        if draft.size:
            p = sampling.probabilities(logits)
            entropy = torch.special.entr(p).sum(-1)
            threshold = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
            before = draft.parents + 1
            token_p = p[every[:, None], before, draft.tokens]
            passes = token_p > threshold.gather(1, before)
            if draft.valid is not None:
                passes = passes & draft.valid
            path = see[:, 1:, 1:]  # [B, N, N] nodes on the path to each node, itself included
            accepted = (passes[:, None] | ~path).all(-1)
            depth = torch.where(accepted, path.sum(-1), 0)
            likelihood = (token_p.clamp_min(TINY).log()[:, None] * path).sum(-1)
            deepest = accepted & (depth == depth.amax(1, keepdim=True))
            node = likelihood.masked_fill(~deepest, -torch.inf).argmax(1)
            best = torch.where(accepted.any(1), node + 1, best)
        return collect(draft, see, best, sampling.pick(logits[every, best], generator))
