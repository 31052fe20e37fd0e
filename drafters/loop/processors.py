"""Decoding with the caller's logits processors and stopping criteria (``generate(control=...)``).

A logits processor (a repetition penalty, a grammar) changes the scores of the next token depending on the text before
it. Verification walks the draft from the root and calls the processors only after accepted tokens. So a processor is
called once per output token and in order, as in plain decoding; processors with a state from call to call work too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from drafters.loop.acceptance import Verdict, collect, walk_by_row
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from drafters.loop.state import DecodeState


class Control(Protocol):
    """Logits processors and stopping criteria of one ``generate`` call.

    Attributes:
        alters: True if ``scores`` changes anything. Otherwise the drafter's rule and ``Sampling`` apply.
    """

    alters: bool

    def scores(self, row: int, new: list[int], logits: Tensor) -> Tensor:
        """Scores ``[V]`` of the token after the new tokens ``new``, from the target's logits ``[V]``, float32.

        They include temperature, top-k and top-p: the token is their argmax, or is drawn from their softmax.
        """
        ...

    def ends(self, row: int, new: list[int]) -> bool:
        """True if the row ends after the new tokens ``new``; called after each token."""
        ...


def scores_after(state: "DecodeState", row: int, drafted: list[int], logits: Tensor) -> Tensor:
    """Scores ``[V]`` by the state's control, from the target's ``logits [V]`` after a row's tokens and ``drafted``."""
    assert state.control is not None
    new = state.tokens[row][state.prompt_lengths[row] :] + drafted
    return state.control.scores(row, new, logits.float())


def chosen_by(sampling: Sampling) -> Sampling:
    """Sampling for scores that already include temperature, top-k and top-p."""
    return Sampling(0.0 if sampling.greedy else 1.0)


@dataclass
class ByText:
    """Acceptance rule over a control's scores, greedy or sampled: lossless for every draft.

    Drafters draft without the control, so acceptance falls where it changes the scores much. The merged trees of
    SpecInfer and SpecTr are verified as deterministic trees here, and fewer of their tokens are accepted.
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

        def after(row: int, at: int) -> Tensor:
            drafted = _path(tokens[row], parents[row], at - 1)
            return chosen.probabilities(scores_after(state, row, drafted, logits[row, at]))

        uniform = torch.rand(draft.tokens.shape, device=logits.device, generator=generator)
        unfinished = [not finished for finished in state.finished]
        return collect(draft, see, *walk_by_row(draft, after, unfinished, uniform, generator))


def _path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Return the tokens from below the root to ``node``."""
    path = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
