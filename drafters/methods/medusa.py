"""Medusa: further heads on the target's last feature, each of which predicts one token ahead of the one before (Cai et
al. 2024).

Of feature_i the target's own LM head predicts token_{i+1}, and head k, k = 1 .. K, token_{i+k+1}: all at once, each
without knowing what the others choose. So the candidates of a depth are the same below every node of the depth before,
and the heads run once a step, however large the tree.

Verification is lossless unless ``accept: typical`` says else.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import DraftSize, validate
from drafters.drafting.tree_plan import TreePlan, children_of, tree_plan
from drafters.learned import LearnedDrafter
from drafters.loop.acceptance import TINY, Rule, Verdict, collect
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState, last_of
from drafters.loop.tree import DraftTree
from drafters.model.draft_head import DraftHeadOptions, quantize_layers
from drafters.model.runner import model_time
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import Path, Probability, Rates, ShapePolicy, Table, Way, likeliest

GREEDY = Sampling()
# How often a head's candidate of each rank is right where those before it are wrong, until it is counted.
PRIOR = [[0.5, 0.25, 0.17, 0.13, 0.1, 0.08, 0.07, 0.06], [0.3, 0.16, 0.12, 0.09, 0.07, 0.06, 0.05, 0.05]]


class ResBlock(nn.Module):
    """``x + SiLU(W x + b)`` (section 2.1.1); W and b begin at zero, so that it begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Heads of ``layers`` residual blocks each, and, with ``own_lm_heads``, an LM head each.

    Parameter names are those of the released checkpoints, which have LM heads of their own (and, of several layers, one
    set of weights for all of a head's).
    """

    inputs = 1  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig, heads: int, layers: int, own_lm_heads: bool) -> None:
        super().__init__()
        width, vocab = target_config.hidden_size, target_config.vocab_size
        for _ in range(heads):
            parts: list[nn.Module] = [ResBlock(width) for _ in range(layers)]
            parts += [nn.Linear(width, vocab, bias=False)] if own_lm_heads else []
            self.append(nn.Sequential(*parts))

    def blocks(self) -> list[list[ResBlock]]:
        """Of each head."""
        return [[part for part in head.children() if isinstance(part, ResBlock)] for head in self]

    def lm_heads(self) -> list[nn.Linear]:
        """Each head's own, if they have any."""
        return [part for head in self for part in head.children() if isinstance(part, nn.Linear)]

    def forward(self, features: Tensor, position_ids: Any = None, mask: Any = None) -> Tensor:
        """Features ``[..., H]`` -> what each head gives to its LM head ``[..., K, H]``, each row by itself."""
        states = []
        for blocks in self.blocks():
            state = features
            for block in blocks:
                state = block(state)
            states.append(state)
        return torch.stack(states, dim=-2)


class MedusaOptions(DraftHeadOptions):
    """``heads``, ``layers`` (residual blocks a head), ``own_lm_heads``: what the module consists of. By default all
    heads share the target's LM head, frozen, and have K H^2 weights. With LM heads of their own, as published, they
    have K V H more, which for a small target is several times the target.

    ``tree``: chain is the first choice of each head; static has the ``nodes`` likeliest nodes by ``acceptance``
    (section 2.3.3), or ``paths``; auto is the chain or tree of most tokens per second on this machine, or nothing.
    ``depth``: heads that draft, by default all. ``top_k``: most candidates of a head. ``acceptance``: by "greedy" and
    "sampled", for every depth how often the candidate of each rank is right where those before it are wrong.

    ``accept``: lossless, or typical (section 2.3.1), which is lossy: at a temperature above 0 a candidate is accepted
    where p(x) > min(epsilon, delta exp(-H(p))). At temperature 0 they are the same.
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
    """Drafts a chain, a static tree, or what pays most, of the heads' candidates.

    Raises:
        ValueError: ``paths`` that are no tree, or deeper than there are heads; a ``depth`` that is.
    """

    name = "medusa"
    options = MedusaOptions
    card_title = "Medusa heads ([Medusa](https://arxiv.org/abs/2401.10774))"
    max_batch = None
    follows = True

    policy: ShapePolicy | None = None

    def __init__(self, target: TargetModel, module: MedusaHeads, options: MedusaOptions) -> None:
        super().__init__(target, module, options)
        self.given, self.heads = options, len(module)
        self.depth = options.depth or self.heads
        deepest = max(map(len, options.paths or []), default=0)
        if max(self.depth, deepest) > self.heads:
            what = f"depth is {self.depth}" if self.depth > self.heads else f"a tree path has {deepest} nodes"
            raise ValueError(f"{what}, and there are {self.heads} heads, one for each depth; set {self.heads} or less")
        self.lossless = options.accept == "lossless"
        own = module.lm_heads()
        self.lm_heads = [self.draft_head(options, head) for head in own] or [self.draft_head(options)]
        self._ranks = min(options.top_k, self.lm_heads[0].width)
        self._read(module, options)
        if options.tree == "auto":
            self.policy = ShapePolicy(options.nodes, self.depth, self._ranks, self._tables())
            self.remembers = True
        ways: tuple[Way, ...] = () if self.policy else ("greedy", "sampled")
        self.plans = {way: self._plan(way) for way in ways}
        self.max_draft = max((plan.size for plan in self.plans.values()), default=options.nodes)
        self._used: TreePlan
        self._feature: Tensor  # [B, 1, H] of the last row of the target that was accepted

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        options = validate(MedusaOptions, drafter_config, source=f"options of drafter {cls.name!r}")
        return MedusaHeads(target_config, options.heads, options.layers, options.own_lm_heads)

    def drafter_config(self) -> dict[str, Any]:
        # How candidates are accepted is the user's to say: nothing that is loaded should be lossy unasked.
        lossy = {"accept", "epsilon", "delta"}
        return self.given.model_dump(exclude=lossy, exclude_none=True, exclude_defaults=True) | {
            "heads": self.heads,
            "layers": self.given.layers,
            "own_lm_heads": self.given.own_lm_heads,
        }

    def rule(self, sampling: Sampling) -> Rule:
        if self.lossless or sampling.greedy:
            return super().rule(sampling)
        return Typical(self.given.epsilon, self.given.delta)

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if self.policy is not None:
            self.policy.prepare(self, state.batch, state.sampling, state.longest)
        self._feature = last_of(output.features, state.prompt_lengths)[:, None].clone()
        self._read_text(state)

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
        self._read_text(state)
        return self._draft(self._feature, plan, state.sampling, state.generator)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self.follow(state, output, verdict)
        if self.policy is not None:
            self.policy.learn(self._used, draft.size, state, verdict)

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        last = torch.tensor([path[-1] if path else 0 for path in verdict.rows], device=self.target.device)
        self._feature = output.features[torch.arange(state.batch, device=last.device), last][:, None]

    def _read_text(self, state: DecodeState) -> None:
        for head in self.lm_heads:
            head.read(state.tokens)

    def _draft(
        self, feature: Tensor, plan: TreePlan, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """Fill a plan with candidates: the top ones, or, for the lossless sampled rule, ones that are drawn.

        A depth is drawn once, without replacement, from its q, and all nodes above have these children: of the tree one
        path is walked, on which each depth is met once, with draws that no other depth has a part in.
        """
        depth, width = len(plan.levels), max(level.children for level in plan.levels)
        logits, head = self._logits(feature, depth), self.lm_heads[0]
        q: list[Tensor] = []
        candidates, real = children_of(logits, width, sampling if self.lossless else GREEDY, generator, q)
        above, rank = plan.choice
        tokens, valid = head.tokens(candidates[:, above, rank]), None if real is None else real[:, above, rank]
        spread = head.spread(q[0]) if q else None
        return DraftTree.from_parents(tokens, plan.parents, q=spread, q_row=plan.above, valid=valid)

    def _read(self, module: MedusaHeads, options: MedusaOptions) -> None:
        """Prepare the blocks; those that all read the feature are one product."""
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
        """What the heads ``[B, K, H]`` make of features ``[B, 1, H]``."""
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
        """Logits ``[B, depth, W]`` of the first ``depth`` heads, over the tokens that are drafted with."""
        states = self._states(feature)[:, :depth]
        if len(self.lm_heads) == 1:
            return self.lm_heads[0](states)
        pairs = zip(self.lm_heads, states.unbind(1), strict=False)
        return torch.stack([head(state) for head, state in pairs], dim=1)

    def _tables(self) -> dict[Way, Table]:
        both: dict[Way, Table] = {"greedy": PRIOR, "sampled": PRIOR}
        return both | (self.given.acceptance or {})

    def _plan(self, way: Way) -> TreePlan:
        """Of a chain or a static tree."""
        options = self.given
        paths = options.paths
        if options.tree == "chain":
            paths = [[0] * level for level in range(1, self.depth + 1)]
        if paths is not None:
            return tree_plan(tuple(map(tuple, paths)), self.target.device)
        table = Rates(self.depth, self._ranks, self._tables()[way]).table()
        return tree_plan(_likeliest(table, self.depth, options.nodes), self.target.device)


def _likeliest(table: Table, depth: int, nodes: int) -> tuple[Path, ...]:
    """The ``nodes`` likeliest nodes, or all that there are."""
    return tuple(path for (_, path), _ in zip(likeliest(table, depth), range(nodes), strict=False))


class Typical:
    """Typical acceptance (section 2.3.1): the deepest path whose every token is likely enough where the target's own
    distribution is sharp, and need not be where it is flat: p(x) > min(epsilon, delta exp(-H(p))).

    p is what tokens are drawn from, and the bonus token is drawn from it. (The paper takes that one greedily.) Of
    several such paths the likeliest is taken, as in the released code.

    Args:
        epsilon: a token of such a probability is always accepted. delta: by which the entropy's share is scaled.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta

    def __call__(
        self,
        draft: DraftTree,
        logits: Tensor,
        see: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None = None,
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
            path = see[:, 1:, 1:]  # of each node: which nodes lead to it, itself included
            accepted = (passes[:, None] | ~path).all(-1)
            depth = torch.where(accepted, path.sum(-1), 0)
            likelihood = (token_p.clamp_min(TINY).log()[:, None] * path).sum(-1)
            deepest = accepted & (depth == depth.amax(1, keepdim=True))
            node = likelihood.masked_fill(~deepest, -torch.inf).argmax(1)
            best = torch.where(accepted.any(1), node + 1, best)
        return collect(draft, see, best, sampling.pick(logits[every, best], generator))
