"""Run a head on its own predictions, in training and on held-out text: chains from every index, in parallel.

In drafting, the head reads true features up to the last verified token, then its own predictions. HASS (Zhang et al.
2024, section 3.2, "harmonized context alignment") and EAGLE-3 ("training-time test") therefore also train on
predictions, for some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from train.core.attention import Chains, Dialogues, States
from train.core.losses import Pairs
from train.core.task import Task

if TYPE_CHECKING:
    from train.data.packing import Batch


class UnrolledTask(Task):
    """A head that is trained in ``predictions`` steps from every index, each on the predictions of the ones before.

    Step n is trained at the index i - n, so that all steps predict one token, whose target is computed once. The first
    ``predictions - 1`` positions of a dialogue are not trained: no chain from inside the dialogue reaches them.

    Class attributes:
        token_shift: row i reads token i + token_shift.
        detach: no gradient flows through what is fed back.

    Attributes:
        by_layer: each step has a layer of its own.
    """

    ahead: ClassVar[int] = 2
    token_shift: int = 1
    detach: ClassVar[bool] = True
    by_layer: bool = False

    def passes_of(self, seed: int | None) -> int:
        """Steps of a micro-batch; held-out text, whose ``seed`` is None, always has all."""
        return 1 if seed is not None and self.one_pass else self.predictions

    def features(self, batch: Batch) -> Tensor:
        """What step 0 reads: ``[R, L, H]``."""
        return batch.features

    def scored(self, outputs: Tensor, step: int = 0) -> Tensor:
        """The module's outputs ``[n, H]`` of a step as they enter the LM head."""
        return outputs

    def rows(self, batch: Batch, seed: int | None = None) -> Tensor:
        return self.reached(batch, super().rows(batch, seed), seed)

    def reached(self, batch: Batch, rows: Tensor, seed: int | None) -> Tensor:
        """Those of ``rows`` that chains of all steps reach."""
        return rows[batch.position_ids.flatten()[rows] >= self.passes_of(seed) - 1]

    def chains(self, module: Any, batch: Batch, seed: int | None) -> Tensor:
        """The predictions of all steps about the tokens of ``batch.rows``: ``[S, n, H]``."""
        features, count = self.features(batch), self.passes_of(seed)
        steps = unrolled(module, self.ends.embed, batch, count, self.token_shift, features, self.detach, self.by_layer)
        return torch.stack([self.scored(each.flatten(0, 1)[batch.rows - n], n) for n, each in enumerate(steps)])

    def judged(self, pairs: Pairs) -> Pairs:
        return Pairs(pairs.predictions[:1], pairs.targets)

    def guess(self, predicted: Tensor, step: int) -> Tensor:
        """The token that the head drafts after each of a step's outputs ``[R, L, H]``: int64 ``[R, L]``."""
        tokens = self.heads.drafted(self.scored(predicted, step).flatten(0, 1))
        return tokens.view(predicted.shape[:2])


def unrolled(
    head: Any,
    embed: Callable[[Tensor], Tensor],
    batch: Batch,
    steps: int,
    shift: int = 1,
    features: Tensor | None = None,
    detach: bool = True,
    by_layer: bool = False,
) -> Iterator[Tensor]:
    """The predictions ``[R, L, H]`` of steps 0 to ``steps - 1`` of the chains that begin at each index.

    Step 0 of the chain from i reads the true features up to feature_i and predicts feature_{i+1}. Step n reads these,
    its own n predictions instead of feature_{i+1} .. feature_{i+n}, and the text's tokens, and predicts
    feature_{i+n+1}. So the head sees the same as in decoding: true keys up to i, then those of its own steps. The
    predictions of a chain past the end of its dialogue are meaningless, and no other chain sees them.

    Args:
        head: head with ``train.core.attention.use_dialogue_attention``.
        shift: row i reads token i + shift.
        features: input of step 0 (default: the batch's features).
        detach: no gradient flows through the predictions that are fed back.
        by_layer: each step has a layer of its own, which attends to what itself read at the indices before.
    """
    lengths, states = batch.dialogue_lengths(), dict[int, list[States]]()
    features = batch.features if features is None else features
    for step in range(steps):
        following, positions = embed(batch.input_ids.roll(-(step + shift), dims=1)), batch.position_ids + step
        if by_layer:
            predicted = head(features, following, positions, Dialogues(lengths), None, step)
        else:
            chains = Chains(lengths, step, states)
            predicted = head(features, following, positions, chains, chains)
        yield predicted
        features = predicted.detach() if detach else predicted
