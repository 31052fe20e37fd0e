"""n-alpha on fixed text: how often a drafter that reads features goes on being right on its own predictions."""

from typing import Any

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.data.packing import Batch
from train.task import Ratio


@torch.no_grad()
def chain_alpha(head: Any, ends: FrozenEnds, batch: Batch, depth: int) -> list[Ratio]:
    """n-alpha for n = 0 .. depth - 1 on fixed text (EAGLE paper, section 4, "Acceptance rate").

    From every index i a chain is drafted: step 0 reads the true features up to feature_i and guesses token_{i+2}; step
    n reads those and the head's own n predictions in the place of feature_{i+1} .. feature_{i+n}, and guesses
    token_{i+n+2}. A guess (argmax) is accepted if it is the target's argmax there. The text is fixed, so a chain goes
    on only while its guess was accepted AND is the token that the text has: only then are the stored features those
    that the target would compute. n-alpha is the share accepted of the guesses made at step n whose token belongs to an
    answer. It is conditional: chains that ended earlier do not count. On text that is not the target's own greedy
    output it is pessimistic for n = 0 and optimistic for the rest: chains that get so far went through easy text.

    All chains run side by side: block n of a sequence of (n + 1) L inputs holds step n of the chains from
    i = 0 .. L - 1, which sees the true inputs up to i and its own earlier steps.
    """
    rows, length = batch.segments.shape
    argmax = _argmax(ends, batch.features)
    features, tokens = [batch.features], [torch.roll(batch.input_ids, -1, dims=1)]
    true_block = batch.attention_mask()
    if true_block is None:
        true_block = torch.ones(1, 1, length, length, dtype=torch.bool, device=argmax.device).tril()
    true_block = true_block.expand(rows, 1, length, length)
    own = torch.eye(length, dtype=torch.bool, device=argmax.device).expand(rows, 1, length, length)
    alive = batch.segments >= 0
    ratios = []
    for n in range(depth):
        mask = _chain_mask(true_block, own, n)
        positions = torch.cat([batch.position_ids + step for step in range(n + 1)], 1)
        predicted = head(torch.cat(features, 1), ends.embed(torch.cat(tokens, 1)), positions, mask)[:, -length:]
        guess = _argmax(ends, predicted)
        counted = alive & batch.shifted(batch.loss_mask, n + 2)
        accepted = counted & (guess == batch.shifted(argmax, n + 1))
        ratios.append(Ratio(accepted.sum(), counted.sum()))
        text = torch.roll(batch.input_ids, -(n + 2), dims=1)
        alive = accepted & (guess == text)
        features.append(predicted)
        tokens.append(text)
    return ratios


def _chain_mask(true_block: Tensor, own: Tensor, steps: int) -> Tensor:
    """bool ``[R, 1, (steps + 1) L, (steps + 1) L]`` of ``chain_alpha``'s blocks."""
    none = torch.zeros_like(own)
    lines = []
    for step in range(steps + 1):
        seen = [true_block] + [own if 0 < other <= step else none for other in range(1, steps + 1)]
        lines.append(torch.cat(seen, dim=3))
    return torch.cat(lines, dim=2)


def _argmax(ends: FrozenEnds, features: Tensor) -> Tensor:
    """The most likely token ``[R, L]`` after each feature ``[R, L, H]``, a row of logits at a time."""
    return torch.stack([ends.lm_head(row).argmax(-1) for row in features])
