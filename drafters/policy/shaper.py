"""Shaper: which nodes the next draft has, by the option ``tree`` or by a policy that measures (``auto``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafters.drafting.grow import Slots, fill, likeliest
from drafters.drafting.tree_plan import TreePlan, chain_plan, tree_plan
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.policy.shape import Hazards, ShapePolicy, Way
from drafters.policy.truncation import Truncation

if TYPE_CHECKING:
    from drafters.loop.state import DecodeState

GREEDY = Sampling()


@dataclass
class Shaper:
    """Chooses the nodes of a draft, and grows it over slots.

    Attributes:
        depth: most levels. nodes: most nodes of a draft. top_k: most candidates of a node.
        fixed: by way of sampling, the plan of every draft; empty for a chain that ends with the answer.
        grows: True for the likeliest nodes, which have no plan.
        policy: chooses the plan (``auto``), or the length of a chain (``truncate``).
        greedily: candidates are the likeliest tokens also where the target is sampled.
    """

    depth: int
    nodes: int
    top_k: int = 1
    fixed: Mapping[Way, TreePlan] = field(default_factory=dict)
    grows: bool = False
    policy: ShapePolicy | Truncation | None = None
    greedily: bool = False

    @property
    def branches(self) -> bool:
        """True if drafts grow as trees, or a fixed plan is a tree."""
        return self.grows or not all(plan.is_chain for plan in self.fixed.values())

    def plan(self, state: "DecodeState", depth: int) -> TreePlan | None:
        """The nodes of the next draft, of at most ``depth`` levels where the answer ends; None: the likeliest."""
        if self.grows:
            return None
        if isinstance(self.policy, ShapePolicy):
            return tree_plan(self.policy.paths(state), state.target.device)
        if self.fixed:
            return self.fixed["greedy" if state.sampling.greedy else "sampled"]
        return chain_plan(depth, state.target.device)

    def grow(self, slots: Slots, plan: TreePlan | None, depth: int, state: "DecodeState") -> DraftTree:
        """Grow a draft; its tokens are places among the drafter's."""
        if plan is None:
            return likeliest(slots, depth, self.top_k, self.nodes)
        draft = fill(slots, plan, GREEDY if self.greedily else state.sampling, state.generator)
        if not isinstance(self.policy, Truncation):
            return draft
        if not (count := self.policy.length(slots.certainty(), state)):
            return state.nothing
        return DraftTree.chain(draft.tokens[:, :count], None if draft.q is None else draft.q[:, :count])


def planned(plan: TreePlan) -> Shaper:
    """Shape every draft alike."""
    return Shaper(len(plan.levels), plan.size, fixed={"greedy": plan, "sampled": plan})


def by_costs(nodes: int, depth: int, ranks: int, priors: dict[Way, Hazards] | None = None) -> Shaper:
    """Draft the tree or chain of most expected tokens per second on this machine, or nothing (``tree: auto``)."""
    return Shaper(depth, nodes, ranks, policy=ShapePolicy(nodes, depth, ranks, priors))
