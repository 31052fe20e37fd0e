"""The LM heads that predictions go through: slicing by ``loss_vocab``, chunks of rows, the loss and the figures."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from drafters.model.ends import LMHead
from train.core import losses
from train.core.config import TrainConfig
from train.core.losses import Pairs, TextTokens, TopK, default_chunk_rows


class LMHeads:
    """The target's LM head and, if it has any, the drafter's own.

    Attributes:
        target: the target's frozen LM head.
        drafter_heads: the drafter's own LM heads, one for each of the S predictions or one for all; empty if all use
            the target's. One may have the rows of ``ids`` only.
        correction: the drafter's term of its logits, from ``Pairs.latents``; its rows are those of its LM head.
        rescored: replaces the drafter's logits ``[n, V]`` by its scores behind ``Pairs.previous`` in ``compare``.
        ids: int32 ``[N]``, tokens of the config's ``loss_vocab``, over which the loss is taken; None for all tokens.
        limit: rows of logits at a time; None to choose it by the device.
    """

    def __init__(self, config: TrainConfig, target: LMHead) -> None:
        self.config, self.target = config, target
        self.drafter_heads: Sequence[nn.Linear] = ()
        self.correction: nn.Linear | None = None
        self.rescored: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.ids: Tensor | None = None
        self.limit = config.loss_chunk_rows

    def rows_at_once(self, head: nn.Linear) -> int:
        """Rows of ``head``'s logits to hold at a time."""
        return self.limit or default_chunk_rows(head)

    # ------------------------------------------------------------------------------------------- the loss

    @cached_property
    def sliced(self) -> LMHead:
        """The target's LM head with the rows of ``ids`` only: a copy, on the device of its first use."""
        if self.ids is None:
            return self.target
        ids, bias = self.ids.to(self.target.weight.device), self.target.bias
        return LMHead(self.target.weight[ids], self.target.change, None if bias is None else bias[ids])

    def places(self, tokens: Tensor) -> Tensor:
        """Token ids (int64) -> their rows in ``sliced``; -1 for tokens outside it."""
        if self.ids is None:
            return tokens
        places = tokens.new_full((self.target.out_features,), -1)
        ids = self.ids.to(tokens)
        return places.scatter_(0, ids, ids.new_ones(len(ids)).cumsum(0) - 1)[tokens]

    def classification(self, pairs: Pairs) -> Tensor:
        """The config's ``classification_loss`` and Top-K loss, summed over tokens: ``[S]``.

        With ``loss_vocab`` both distributions are over its tokens only, as those of a drafter with such a
        ``draft_vocab`` are. The LM head is most of a small head's training, and its cost falls with its rows.
        """
        config = self.config
        top_k = TopK(config.top_k, config.top_k_weight) if config.top_k_weight else None
        return self.divergence(pairs, config.classification_loss, top_k)

    def divergence(self, pairs: Pairs, name: str, term: TopK | TextTokens | None = None) -> Tensor:
        """The divergence ``name`` of train/core/losses.py and a term, summed over tokens: ``[S]``."""
        return self._divergence(pairs, name, term, None)

    def divergence_and_overlap(
        self, pairs: Pairs, name: str, term: TopK | TextTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """``divergence`` and, of the same logits, sum_x min(p, q): ``[S]`` and float32 ``[S, n]``, without a gradient.

        With tokens as targets the latter is q(token).
        """
        overlap = torch.zeros(pairs.predictions.shape[:2], device=pairs.predictions.device)
        return self._divergence(pairs, name, term, overlap), overlap

    def _divergence(self, pairs: Pairs, name: str, term: TopK | TextTokens | None, overlap: Tensor | None) -> Tensor:
        function: Any = getattr(losses, name)
        if name == "lk_lambda":
            function = partial(function, eta=self.config.lk_eta)
        elif name == "jsd":
            function = partial(function, beta=self.config.beta)  # type: ignore[attr-defined]
        weights, size = [self._rows_of(head) for head in self.drafter_heads], self.rows_at_once(self.sliced)
        correction = None if pairs.latents is None or self.correction is None else self._rows_of(self.correction)
        return losses.divergence_sum(pairs, self.sliced, function, term, size, weights, correction, overlap)

    def _rows_of(self, head: nn.Linear) -> Tensor:
        """The weights of ``head`` for the tokens ``ids``."""
        if self.ids is None or self._is_reduced(head):
            return head.weight
        return head.weight[self.ids.to(head.weight.device)]

    # ------------------------------------------------------------------------------------------- figures

    @torch.no_grad()
    def compare(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """sum_x min(p, q), the acceptance rate of sampled drafting (temperature 1), and whether drafter and target rank
        the same token first; ``[S, n]`` each."""
        overlap, agree, size = [], [], self.rows_at_once(self.target)
        for number, predicted in enumerate(pairs.predictions):
            head = self.own_of(number) or self.target
            latents = None if pairs.latents is None else pairs.latents[number]
            for start in range(0, max(1, len(predicted)), size):
                rows = slice(start, start + size)
                ours, theirs = head(predicted[rows]), self.target(pairs.targets[rows])
                if latents is not None and self.correction is not None:
                    ours = ours + self.correction(latents[rows])
                if pairs.previous is not None and self.rescored is not None:
                    ours = self.rescored(ours, predicted[rows], pairs.previous[rows])
                p, q = theirs.float().softmax(-1), ours.float().softmax(-1)
                if self.ids is not None and self._is_reduced(head):
                    p = p[:, self.ids.to(p.device)]
                overlap.append(torch.minimum(p, q).sum(-1))
                agree.append(theirs.argmax(-1) == self._tokens(head, ours.argmax(-1)))
        shape = pairs.predictions.shape[:2]
        return torch.cat(overlap).view(shape), torch.cat(agree).view(shape)

    def own_of(self, number: int) -> nn.Linear | None:
        """The LM head of the drafter's own for a prediction, if it has any."""
        return self.drafter_heads[min(number, len(self.drafter_heads) - 1)] if self.drafter_heads else None

    def _is_reduced(self, head: nn.Linear) -> bool:
        """Whether ``head`` has the rows of ``ids`` only."""
        return self.ids is not None and head.out_features == len(self.ids) < self.target.out_features

    def _tokens(self, head: nn.Linear, places: Tensor) -> Tensor:
        """Tokens of places among the logits of ``head``."""
        return self.ids.to(places)[places] if self.ids is not None and self._is_reduced(head) else places

    @torch.no_grad()
    def drafted(self, predictions: Tensor) -> Tensor:
        """int64 ``[n]``: the token that the drafter ranks first for each of its first predictions ``[n, h]``."""
        head = self.own_of(0) or self.target
        parts = predictions.split(self.rows_at_once(head))
        return torch.cat([self._tokens(head, head(part).argmax(-1)) for part in parts])

    @torch.no_grad()
    def first_choice(self, features: Tensor) -> Tensor:
        """int64 ``[n]``: the target's most likely token after each of its features ``[n, H]``."""
        return torch.cat([self.target(part).argmax(-1) for part in features.split(self.rows_at_once(self.target))])

    @torch.no_grad()
    def likeliest(self, predictions: Tensor, count: int) -> Tensor:
        """int64 ``[n, count]``: the tokens that the target's LM head ranks first for ``predictions [n, H]``."""
        parts = predictions.split(self.rows_at_once(self.target))
        return torch.cat([self.target(part).topk(count, dim=-1).indices for part in parts])
