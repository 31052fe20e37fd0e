"""n-alpha on fixed text: how often a drafter that reads features stays right on its own predictions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.core.losses import Pairs, default_chunk_rows
from train.core.task import Ratio, mean
from train.core.unroll import UnrolledTask, unrolled
from train.data.packing import Batch


@torch.no_grad()
def chain_alpha(
    head: Any,
    ends: FrozenEnds,
    batch: Batch,
    depth: int,
    shift: int = 1,
    features: Tensor | None = None,
    guess: Callable[[Tensor, int], Tensor] | None = None,
    by_layer: bool = False,
) -> list[Ratio]:
    """n-alpha for n = 0 .. depth - 1 on fixed text (EAGLE paper, section 4, "Acceptance rate").

    From every index i a chain is drafted: step 0 reads the true features up to feature_i and guesses token_{i+2}; step
    n reads those and the head's own n predictions instead of feature_{i+1} .. feature_{i+n}, and guesses token_{i+n+2}.
    A guess (argmax) is accepted if it is the target's argmax there. The text is fixed, so a chain continues only while
    its guess was accepted AND is the text's token: only then are the stored features what the target would compute.
    n-alpha is the share accepted of the guesses at step n whose token belongs to an answer. It is conditional: chains
    that ended earlier do not count. On text that is not the target's own greedy output it is pessimistic for n = 0 and
    optimistic for larger n, because long chains went through easy text.

    All chains run in parallel; for that, ``shift``, ``features`` and ``by_layer`` see ``train.core.unroll.unrolled``.
    ``guess``: the tokens ``[R, L]`` of a step's predictions ``[R, L, H]``, by default those that the target's LM head
    ranks first.
    """
    argmax = _argmax(ends, batch.features)
    alive = batch.segments >= 0
    ratios = []
    steps = unrolled(head, ends.embed, batch, depth, shift, features, by_layer=by_layer)
    for n, predicted in enumerate(steps):
        drafted = _argmax(ends, predicted) if guess is None else guess(predicted, n)
        counted = alive & batch.shifted(batch.loss_mask, n + 2)
        accepted = counted & (drafted == batch.shifted(argmax, n + 1))
        ratios.append(Ratio(accepted.sum(), counted.sum()))
        alive = accepted & (drafted == torch.roll(batch.input_ids, -(n + 2), dims=1))
    return ratios


def chain_figures(task: UnrolledTask, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
    """``step_n_top1`` and ``step_n_expected_acceptance`` of each step on the text's tokens, and ``n-alpha``: the first
    of these for chains whose steps before n were all accepted."""
    figures: dict[str, Ratio] = {}
    for n, (overlap, agree) in enumerate(zip(*task.heads.compare(pairs), strict=True)):
        figures |= {f"step_{n}_top1": mean(agree), f"step_{n}_expected_acceptance": mean(overlap)}
    features, by_layer = task.features(batch), task.by_layer
    ratios = chain_alpha(
        module, task.ends, batch, task.predictions, features=features, guess=task.guess, by_layer=by_layer
    )
    return figures | {f"{n}-alpha": ratio for n, ratio in enumerate(ratios)}


def _argmax(ends: FrozenEnds, features: Tensor) -> Tensor:
    """The most likely token ``[R, L]`` after each feature ``[R, L, H]``, some rows of logits at a time."""
    parts = features.flatten(0, 1).split(default_chunk_rows(ends.lm_head))
    return torch.cat([ends.lm_head(part).argmax(-1) for part in parts]).view(features.shape[:2])
