"""Where more than the target's logits says what comes next: the whole text before it, by rules that are not ours.

A logits processor (a repetition penalty, a grammar) changes the scores of the next token by the text up to there. In a
draft each node has a text of its own, and only those on the accepted path are ever a row's text: so they are asked for
one after another, down from the root. A processor is called for each token of the output once, in order, as it would be
by plain decoding, and one that keeps a state from call to call comes out right, too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from drafters.loop.acceptance import Verdict, collect, walk_by_level
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from drafters.loop.state import DecodeState


class Control(Protocol):
    """Rules over a batch row and its new tokens, beside temperature, top-k, top-p, EOS and the limit.

    Attributes:
        alters: whether ``scores`` does anything. Else the rule of the drafter stands, and ``Sampling``.
    """

    alters: bool

    def scores(self, row: int, new: list[int], logits: Tensor) -> Tensor:
        """Scores ``[V]`` of the token after ``new``, all warping included, from the target's logits ``[V]``, float32.
        The token is their argmax, or drawn from their softmax.
        """
        ...

    def ends(self, row: int, new: list[int]) -> bool:
        """Whether the row ends with ``new``; asked after each token."""
        ...


def scores_after(state: "DecodeState", row: int, drafted: list[int], logits: Tensor) -> Tensor:
    """``logits [V]`` of a batch row after its tokens and some ``drafted`` ones, as the state's control has them."""
    assert state.control is not None
    new = state.tokens[row][state.prompt_lengths[row] :] + drafted
    return state.control.scores(row, new, logits.float())


def chosen_by(sampling: Sampling) -> Sampling:
    """How the next token comes from scores that are warped already."""
    return Sampling(0.0 if sampling.greedy else 1.0)


@dataclass
class ByText:
    """The acceptance rule over a control's scores, greedy or sampled: lossless for every draft.

    Drafts know nothing of the control. That costs acceptance where it changes much, and no more: what a node was drawn
    from is its q, whatever it was made of. The merged trees of SpecInfer and SpecTr, whose rules see all nodes at once,
    are verified as if they were deterministic, by which fewer of their tokens are accepted.
    """

    state: "DecodeState"

    def __call__(
        self,
        draft: DraftTree,
        logits: Tensor,
        see: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        state, chosen = self.state, chosen_by(sampling)
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()

        def after(at: Tensor, going: Tensor) -> Tensor:
            p = torch.zeros(len(logits), logits.shape[-1], device=logits.device)
            for row, (end, wanted) in enumerate(zip(at.tolist(), going.tolist(), strict=True)):
                if wanted:
                    drafted = _path(tokens[row], parents[row], end - 1)
                    p[row] = chosen.probabilities(scores_after(state, row, drafted, logits[row, end]))
            return p

        uniform = torch.rand(draft.tokens.shape, device=logits.device, generator=generator)
        going = ~torch.tensor(state.finished, device=logits.device)
        return collect(draft, see, *walk_by_level(draft, after, going, uniform, generator))


def _path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens from the root, which is none of them, to ``node``."""
    path = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
