"""Record a drafter while it decodes: what was known before each token was drawn."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters import Drafter, Sampling
from drafters.drafting.merged_tree import MergedTree
from drafters.loop.acceptance import Rule, Verdict
from drafters.loop.tree import ROOT, DraftTree

PREFILL = -1  # for the token of the prefill, which has no step


class Known(NamedTuple):
    """What was known before a token was drawn.

    Attributes:
        accepted: draft tokens accepted before it in its step; ``PREFILL`` for the prefill's token.
        before: draft tokens accepted in the previous step; None in the first.
        q: ``[V]`` distribution of its draft token, ones at tokens drafted without sampling, or None without a draft.
    """

    accepted: int
    before: int | None
    q: Tensor | None


@dataclass
class Watched:
    """Wraps a drafter and keeps the verdicts of its rule; other attributes are the drafter's.

    Keeps distributions only along the accepted path, to save memory.
    """

    drafter: Drafter
    seen: list[tuple[Verdict, list[list[Tensor | None]]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def rule(self, sampling: Sampling) -> Rule:
        """Return the drafter's rule, with every draft and verdict recorded."""
        rule = self.drafter.rule(sampling)

        def watching(
            draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
        ) -> Verdict:
            distributions = Distributions(draft, logits.shape[-1])
            verdict = rule(draft, logits, see, sampling, generator)
            after = [[distributions.after(row, node - 1) for node in path] for row, path in enumerate(verdict.rows)]
            self.seen.append((verdict, after))
            return verdict

        return watching

    def known(self, row: int) -> list[Known]:
        """Return ``Known`` for every new token of a sequence; call it after the sequence has ended."""
        tokens, before = [Known(PREFILL, None, None)], None
        for verdict, after in self.seen:
            path = verdict.rows[row]  # the part that the loop kept
            tokens += [
                Known(accepted, before, q) for accepted, (_, q) in enumerate(zip(path, after[row], strict=False))
            ]
            before = len(path) - 1
        return tokens


class Distributions:
    """The distributions that drew the nodes of a draft."""

    def __init__(self, draft: DraftTree, vocabulary: int) -> None:
        self.draft, self.vocabulary = draft, vocabulary
        self.tokens, self.parents = draft.tokens.tolist(), draft.parents.tolist()
        self.q_row = draft.q_row.tolist() if draft.q is not None and draft.q_row is not None else None
        self.valid = draft.valid.tolist() if draft.valid is not None else None

    def after(self, row: int, node: int) -> Tensor | None:
        """Return the distribution that drew the children of ``node`` (or of ``ROOT``), see ``Known.q``."""
        parents = self.parents[row]
        children = [n for n, parent in enumerate(parents) if parent == node and (not self.valid or self.valid[row][n])]
        if not children:
            return None
        rows = self._rows(row, node, children)
        if rows:
            assert self.draft.q is not None
            return self.draft.q[row, rows].mean(0)
        tokens = torch.tensor([self.tokens[row][n] for n in children], device=self.draft.tokens.device)
        return torch.zeros(self.vocabulary, device=tokens.device).index_fill_(0, tokens, 1.0)

    def _rows(self, row: int, node: int, children: list[int]) -> list[int]:
        """Return the rows of q of these children; none if they were not sampled."""
        if isinstance(self.draft, MergedTree):
            place = {number: index for index, number in enumerate(self.draft.inner)}.get(node - ROOT)
            if place is None:
                return []
            trials = zip(self.draft.children[place].tolist(), self.draft.q_rows[place].tolist(), strict=True)
            return sorted({q_row for child, q_row in trials if child >= 0})
        return sorted({self.q_row[row][n] for n in children if self.q_row[row][n] >= 0}) if self.q_row else []
