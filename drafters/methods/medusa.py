"""Medusa: K heads on the target's last feature predict the next K tokens in parallel (Cai et al. 2024).

From feature_i, the target's LM head predicts token_{i+1} and head k = 1 .. K predicts token_{i+k+1}, independently of
each other. So all nodes of a depth have the same candidates as children, and the heads run once per step for any tree.
Verification is lossless unless ``accept: typical`` is set.
"""

from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import DraftSize, validate
from drafters.drafting.tree_plan import TreePlan, chain_plan, check_children, children_of, tree_plan
from drafters.learned import LearnedDrafter
from drafters.loop.acceptance import TINY, Rule, Verdict, collect
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState, last_of
from drafters.loop.tree import DraftTree
from drafters.model.draft_head import DraftHeadOptions, quantize_layers
from drafters.model.runner import model_time
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import Hazards, Probability, Rates, ShapePolicy, Way, likeliest

GREEDY = Sampling()
# Prior acceptance of the candidates of each rank, given that those of lower ranks are wrong: first head, later heads.
PRIOR = [[0.5, 0.25, 0.17, 0.13, 0.1, 0.08, 0.07, 0.06], [0.3, 0.16, 0.12, 0.09, 0.07, 0.06, 0.05, 0.05]]


class ResBlock(nn.Module):
    """``x + SiLU(W x + b)`` (section 2.1.1); W and b are initialised to zero: the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """``heads`` stacks of ``layers`` residual blocks, each with an LM head if ``own_lm_heads``.

    Parameter names are those of the released checkpoints. These have own LM heads, and the layers of a head share their
    weights.
    """

    inputs = 1  # number of hidden states that ``forward`` takes

    def __init__(self, target_config: PretrainedConfig, heads: int, layers: int, own_lm_heads: bool) -> None:
        super().__init__()
        width, vocab = target_config.hidden_size, target_config.vocab_size
        for _ in range(heads):
            parts: list[nn.Module] = [ResBlock(width) for _ in range(layers)]
            parts += [nn.Linear(width, vocab, bias=False)] if own_lm_heads else []
            self.append(nn.Sequential(*parts))

    def blocks(self) -> list[list[ResBlock]]:
        """The residual blocks of each head."""
        return [[part for part in head.children() if isinstance(part, ResBlock)] for head in self]

    def lm_heads(self) -> list[nn.Linear]:
        """The LM head of each head; empty without own LM heads."""
        return [part for head in self for part in head.children() if isinstance(part, nn.Linear)]

    def forward(self, features: Tensor, position_ids: Any = None, mask: Any = None) -> Tensor:
        """Features ``[..., H]`` -> states for the LM heads ``[..., K, H]``."""
        states = []
        for blocks in self.blocks():
            state = features
            for block in blocks:
                state = block(state)
            states.append(state)
        return torch.stack(states, dim=-2)


class MedusaOptions(DraftHeadOptions):
    """Options.

    ``heads``: K, number of heads.
    ``layers``: residual blocks per head.
    ``own_lm_heads``: an LM head per head (K V H weights, as published) instead of the target's frozen one.
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

    heads: int = Field(default=4, ge=1, le=64)
    layers: int = Field(default=1, ge=1, le=64)
    own_lm_heads: bool = False
    tree: Literal["auto", "chain", "static"] = "auto"
    depth: DraftSize | None = Field(default=None, ge=1)
    top_k: DraftSize = Field(default=10, ge=1)
    nodes: DraftSize = Field(default=63, ge=1)
    paths: list[list[DraftSize]] | None = None
    acceptance: dict[Way, list[list[Probability]]] | None = None
    accept: Literal["lossless", "typical"] = "lossless"
    epsilon: float = Field(default=0.09, gt=0.0, le=1.0)
    delta: float = Field(default=0.3, gt=0.0)


class MedusaDrafter(LearnedDrafter):
    """Drafts a chain or a tree of the heads' candidates.

    Raises:
        ValueError: ``paths`` that are no tree; ``paths`` or ``depth`` deeper than the number of heads, or ``paths``
            with more children of a node than draft tokens.
    """

    name = "medusa"
    options = MedusaOptions
    card_title = "Medusa heads ([Medusa](https://arxiv.org/abs/2401.10774))"
    max_batch = None
    follows = True

    unread = {"auto": ("paths",), "chain": ("paths",)}
    policy: ShapePolicy | None = None

    def __init__(self, target: TargetModel, module: MedusaHeads, options: MedusaOptions) -> None:
        super().__init__(target, module, options)
        self.given, self.heads = options, len(module)
        self.depth = options.depth or self.heads
        deepest = max(map(len, options.paths or []), default=0)
        if max(self.depth, deepest) > self.heads:
            what = f"depth is {self.depth}" if self.depth > self.heads else f"a tree path has {deepest} nodes"
            raise ValueError(f"{what}, but the drafter has {self.heads} heads, one per depth; use {self.heads} or less")
        self.lossless = options.accept == "lossless"
        own = module.lm_heads()
        self.lm_heads = [self.draft_head(options, head) for head in own] or [self.draft_head(options)]
        self._ranks = min(options.top_k, self.lm_heads[0].width)
        self._prepare_blocks(module, options)
        priors: dict[Way, Hazards] = {"greedy": PRIOR, "sampled": PRIOR}
        priors |= options.acceptance or {}
        if options.tree == "auto":
            self.policy = ShapePolicy(options.nodes, self.depth, self._ranks, priors)
        self.plans = {} if self.policy else {way: self._plan(prior) for way, prior in priors.items()}
        self.max_draft = max((plan.size for plan in self.plans.values()), default=options.nodes)
        self._used: TreePlan  # of the latest draft
        self._feature: Tensor  # [B, 1, H] of the target, after the last accepted row

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        options = validate(MedusaOptions, drafter_config, source=f"options of drafter {cls.name!r}")
        return MedusaHeads(target_config, options.heads, options.layers, options.own_lm_heads)

    def drafter_config(self) -> dict[str, Any]:
        # Not saved: a loaded drafter is lossless unless the user sets these.
        lossy = {"accept", "epsilon", "delta"}
        parts = {"heads": self.heads, "layers": self.given.layers, "own_lm_heads": self.given.own_lm_heads}
        return self.given.model_dump(exclude=lossy, exclude_none=True, exclude_defaults=True) | parts

    def rule(self, sampling: Sampling) -> Rule:
        if self.lossless or sampling.greedy:
            return super().rule(sampling)
        return Typical(self.given.epsilon, self.given.delta)

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._feature = last_of(output.features, state.prompt_lengths)[:, None].clone()

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self._feature[rows] = last_of(output.features, part.prompt_lengths)[:, None]

    def propose(self, state: DecodeState) -> DraftTree:
        if self.policy is not None:
            plan = tree_plan(self.policy.paths(state), self.target.device)
        else:
            plan = self.plans["greedy" if state.sampling.greedy else "sampled"]
        self._used = plan
        if not plan.size or state.longest_draft(self.depth) < 1:
            return state.nothing
        for each in self.lm_heads:
            each.read(state.tokens)
        # Choose candidates: the likeliest ones or, for the lossless sampled rule, draws without replacement. A depth is
        # drawn once, and its draws are the children of all nodes above. This is lossless: verification walks one path,
        # which meets each depth once, and the draws of depths are independent.
        depth, width = len(plan.levels), max(level.children for level in plan.levels)
        logits, head = self._logits(self._feature, depth), self.lm_heads[0]  # [B, depth, W]
        q: list[Tensor] = []
        sampling = state.sampling if self.lossless else GREEDY
        candidates, real = children_of(logits, width, sampling, state.generator, q)  # [B, depth, width]
        # Fill the plan with them.
        above, rank = plan.choice
        tokens, valid = head.tokens(candidates[:, above, rank]), None if real is None else real[:, above, rank]
        spread = head.spread(q[0]) if q else None
        return DraftTree.from_parents(tokens, plan.parents, q=spread, q_row=plan.above, valid=valid)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self.follow(state, output, verdict)
        if self.policy is not None:
            self.policy.learn(self._used, draft.size, state, verdict)

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        last = torch.tensor([path[-1] if path else 0 for path in verdict.rows], device=self.target.device)
        self._feature = output.features[torch.arange(state.batch, device=last.device), last][:, None]

    def _prepare_blocks(self, module: MedusaHeads, options: MedusaOptions) -> None:
        """Prepare the blocks; the first blocks of all heads read the same feature and are one product."""
        linear, blocks = self.target.runner.linear, module.blocks()
        first = nn.Linear(self.target.hidden_size, self.heads * self.target.hidden_size, device="meta")
        for part in ("weight", "bias"):
            whole = torch.cat([getattr(head[0].linear, part) for head in blocks])
            setattr(first, part, nn.Parameter(whole, requires_grad=False))
        self._first = linear(first)
        self._later = [[linear(block.linear) for block in head[1:]] for head in blocks]
        if options.draft_dtype is not None:
            quantize_layers(None, options.draft_dtype, self._first, *(part for head in self._later for part in head))

    def _states(self, feature: Tensor) -> Tensor:
        """Features ``[B, 1, H]`` -> states of the heads ``[B, K, H]``; as ``MedusaHeads.forward``."""
        with model_time():
            states = feature + F.silu(self._first(feature).unflatten(-1, (self.heads, -1))[:, 0])
            if not self._later[0]:
                return states
            each = []
            for state, layers in zip(states.unbind(1), self._later, strict=True):
                for layer in layers:
                    state = state + F.silu(layer(state))
                each.append(state)
            return torch.stack(each, dim=1)

    def _logits(self, feature: Tensor, depth: int) -> Tensor:
        """Logits ``[B, depth, W]`` of the first ``depth`` heads, over the draft vocabulary."""
        states = self._states(feature)[:, :depth]
        if len(self.lm_heads) == 1:
            return self.lm_heads[0](states)
        pairs = zip(self.lm_heads, states.unbind(1), strict=False)
        return torch.stack([head(state) for head, state in pairs], dim=1)

    def _plan(self, prior: Hazards) -> TreePlan:
        """The plan of a chain, or of a static tree: the given paths, or the likeliest ones by the ``prior``."""
        if self.given.tree == "chain":
            return chain_plan(self.depth, self.target.device)
        if self.given.paths is not None:
            plan = tree_plan(tuple(map(tuple, self.given.paths)), self.target.device)
            return check_children(plan, self.lm_heads[0].width)
        acceptance = Rates(self.depth, self._ranks, prior).acceptance()
        best = islice(likeliest(acceptance, self.depth), self.given.nodes)
        return tree_plan(tuple(path for _, path in best), self.target.device)


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
