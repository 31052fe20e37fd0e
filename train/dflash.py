"""Train a DFlash head: blocks at random anchors of the target's answers, drafted from its states before each anchor.

    deepspeed train/dflash.py --config configs/dflash/stdlib.yaml [--resume] [key=value ...]
    python train/dflash.py --config configs/dflash/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/dflash.py --config configs/dflash/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train.configs import DFlashConfig
from train.preflight.command import program

if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(DFlashConfig, __doc__)

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.core.attention import Blocks
from train.core.losses import Pairs, TextTokens
from train.core.task import Ratio, Task, mean, target_states, text_tokens
from train.data.packing import Batch, Source
from train.watch.heldout import answer_positions

DESCRIBED = 1000  # dialogues that ``describe`` reads


class DFlashTask(Task):
    """Sections 3.1 and 3.2 of the paper (Chen et al. 2026, arXiv 2602.06036), K tokens t of a block with anchor a, g
    the target's states, m mask tokens:

    q_1 .. q_K = softmax(LM_head(head(g_{<a}; t_a, m, .., m)))
    L          = sum_k w_k CrossEntropy(t_{a+k}, q_k),  w_k = exp(-(k - 1) / gamma)

    or as the config's weights say. Each dialogue has its own anchors, drawn in each epoch among the positions whose
    next token belongs to an answer. A block is trained up to the end of the answer, so that first slots learn the last
    tokens of answers, too; its later slots have no loss.
    """

    schema: ClassVar[type[DFlashConfig]] = DFlashConfig
    config: DFlashConfig
    ahead = 1
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"tree": "chain"}, "tree": {"tree": "tree"}}

    def __init__(self, config: DFlashConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        head: Any = self.module
        self.layers_config, self.block_rows, self.slots = head.config, head.shape.rows, head.shape.slots
        self.reach, self.against_logits = head.shape.reach, config.target_weight > 0
        if head.mask_embedding is not None:
            head.mask_embedding.data.copy_(ends.embed.weight[head.shape.mask_token_id])
        if head.lm_head is not None:
            self.heads.drafter_heads, self.lm_heads = [head.lm_head], ("lm_head.weight",)

    def check_attention(self) -> None:
        """Blocks are attended to by code of this package only."""

    # ------------------------------------------------------------------------------------------- anchors

    def choose(self, batch: Batch, seed: int | None = None) -> Batch:
        """Anchors of each dialogue, drawn by ``seed`` and its number in the store, and the trained slots behind them;
        on held-out text they are spread evenly."""
        slots, follows = self.slots, batch.shifted(batch.loss_mask, self.ahead)
        anchors, rows, places = [], [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        blocks = 0
        for span in batch.spans:
            trained = span.of(follows)
            drawn = self.drawn(trained, seed, span.dialogue)
            inside = torch.arange(slots) < runs(trained)[drawn, None]  # [m, K]
            rows.append(span.start + rows_of(drawn, slots)[inside])
            places.append(blocks * slots + inside.flatten().nonzero().squeeze(1))
            anchors.append(drawn.tolist())
            blocks += len(drawn)
        if not blocks:  # nothing to train on here; the head must run, because other ranks do
            anchors = [[0]]
        return replace(batch, rows=torch.cat(rows), places=torch.cat(places), anchors=anchors)

    def most_rows(self, lengths: list[int]) -> tuple[int, int]:
        blocks = sum(self.most_blocks(length) for length in lengths)
        return blocks * self.config.head.rows, blocks * self.slots

    def most_blocks(self, positions: float) -> int:
        """Blocks of a dialogue with this number of positions that can be anchors."""
        return min(self.config.anchors, math.ceil(self.config.anchor_share * positions))

    def drawn(self, trained: Tensor, seed: int | None, dialogue: int) -> Tensor:
        """Positions of anchors, int64 ``[m]``, ascending, among those ``trained`` (bool ``[T]``)."""
        possible = trained.nonzero().squeeze(1)
        count = self.most_blocks(len(possible))
        if seed is None:
            return possible[torch.arange(count) * len(possible) // max(count, 1)]
        generator = torch.Generator().manual_seed((seed * 2_654_435_761 + dialogue) % 2**63)
        return possible[torch.randperm(len(possible), generator=generator)[:count]].sort().values

    def describe(self, train: Source) -> str:
        """The anchors of an epoch, those with a whole block, and the share of answers' tokens that the blocks cover.

        They are counted in the first ``DESCRIBED`` dialogues.

        Raises:
            ValueError: no answer of any dialogue is as long as a block.
        """
        slots, count = self.slots, min(len(train), DESCRIBED)
        possible = whole = blocks = covered = 0
        shortest = math.inf
        for index in range(count):
            trained = predicted(train[index].loss_mask)
            left, drawn = runs(trained), self.drawn(trained, self.config.seed * 1_000_003, index)
            inside = torch.arange(slots) < left[drawn, None]  # [m, K], as in ``choose``
            possible, covered = possible + int(trained.sum()), covered + len(rows_of(drawn, slots)[inside].unique())
            blocks, whole = blocks + len(drawn), whole + int((left[drawn] >= slots).sum())
            begins = left[trained & ~torch.cat([trained.new_zeros(1), trained[:-1]])]
            shortest = min([shortest, *begins.tolist()])
        if not whole and (longest := longest_answer(train)) < slots:
            raise ValueError(
                f"block_size is {self.block_rows}, whose blocks predict {slots} tokens, and the longest answer "
                f"has {longest} tokens, so that no anchor has a whole block; set a smaller block_size"
            )
        of = f" of the first {count:,} dialogues" if count < len(train) else ""
        short = f"; the shortest answer has {shortest} tokens, a block {slots}" if shortest < slots else ""
        window = self.config.head.sliding_window
        short += f"; windows of {window:,} tokens" if window is not None else ""
        return (
            f"anchors{of}: {blocks:,} of {possible:,} positions an epoch, {whole:,} of them with a whole block; they "
            f"cover {covered / max(possible, 1):.1%} of the answers' tokens{short}"
        )

    # ------------------------------------------------------------------------------------------- one micro-batch

    def pairs(self, module: Any, batch: Batch, seed: int | None = None) -> Pairs:
        states = self.states(module, batch)
        predictions = states.flatten(0, 1)[batch.places][None]
        tokens = self.heads.places(text_tokens(batch, self.ahead).flatten()[batch.rows])
        targets = target_states(batch, self.ahead).flatten(0, 1)[batch.rows]
        if seed is not None and not self.against_logits:
            targets = tokens
        pairs = Pairs(predictions, targets, tokens=tokens, **self.conditional(states, batch))
        return replace(pairs, weights=self.weights(pairs, batch))

    def states(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """``[m, K, H]``, as they enter the LM head: of the slots that predict, of all blocks."""
        shape, device = self.config.head, batch.input_ids.device
        anchors = torch.tensor([*itertools.chain(*batch.anchors)], dtype=torch.int64, device=device)
        masks = anchors.new_full((len(anchors), shape.rows - 1), shape.mask_token_id)
        ids = torch.cat([batch.input_ids[0, anchor_rows(batch)][:, None], masks], dim=1)
        places = anchors[:, None] + torch.arange(shape.rows, device=device)
        features = torch.cat([batch.taps[tap] for tap in shape.reads], dim=-1)
        positions = torch.cat([batch.position_ids, places.view(1, -1)], dim=1)
        blocks = Blocks(batch.dialogue_lengths(), batch.anchors, shape.rows, shape.causal is True)
        states = module(features, self.ends.embed(ids.view(1, -1)), positions, blocks)
        return states.view(len(anchors), shape.rows, states.shape[-1])[:, shape.first_slot :]

    def conditional(self, states: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Further parts of the pairs, from the slots' states ``[m, K, H]``, if slots depend on the tokens before."""
        return {}

    def tokens_before_slots(self, batch: Batch) -> Tensor:
        """int64 ``[m, K]``: the text's token before that of each slot, the row's last token where the text ends."""
        slots = torch.arange(self.slots, device=batch.input_ids.device)
        at = anchor_rows(batch)[:, None] + slots
        return batch.input_ids[0, at.clamp_max(batch.input_ids.shape[1] - 1)]

    def weights(self, pairs: Pairs, batch: Batch) -> Tensor | None:
        """``[1, n]``: what each trained slot counts, by the config's ``position_weights``."""
        config, device = self.config, pairs.predictions.device
        if config.position_weights == "uniform":
            return None
        if config.position_weights == "exponential":
            each = torch.exp(-torch.arange(self.slots, device=device) / config.decay)
            return (each / each.mean())[batch.places % self.slots][None]
        accepted = torch.zeros(sum(map(len, batch.anchors)) * self.slots, device=device)
        accepted[batch.places] = (1 + self.acceptance(pairs)) / 2
        survival = accepted.view(-1, self.slots).cumprod(1)  # 0 behind the last trained slot
        return survival.flip(1).cumsum(1).flip(1).flatten()[batch.places][None]

    @torch.no_grad()
    def acceptance(self, pairs: Pairs) -> Tensor:
        """a_i of D-PACE, ``[n]``."""
        compared = pairs if self.against_logits else of_text(pairs)
        _, (overlap,) = self.heads.divergence_and_overlap(compared, "cross_entropy")
        return overlap

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        config = self.config
        if not self.against_logits:
            return {"loss": config.token_weight * self.heads.divergence(of_text(pairs), "cross_entropy").sum()}
        each = self.heads.divergence(pairs, config.classification_loss, self.text_term(pairs))
        return {"loss": config.target_weight * each.sum()}

    def text_term(self, pairs: Pairs) -> TextTokens | None:
        """The cross-entropy of the text's tokens as a term of the loss against logits, before ``target_weight``."""
        config = self.config
        if not config.token_weight:
            return None
        return TextTokens(config.token_weight / config.target_weight)

    def answers(self, module: Any, batch: Batch, tokens: Tensor) -> Pairs:
        """Neighbouring ``tokens`` are drafted from neighbouring slots, so that all slots draft some. An anchor is at
        the last token before an answer, or in it: no others are trained or decoded."""
        slots, wanted = self.slots, tokens.cpu()
        before = answer_positions(batch.loss_mask, batch.segments)[0, tokens].cpu()
        slot = torch.minimum(torch.arange(len(wanted)) % slots, before.clamp_min(0))
        slot = torch.minimum(slot, wanted - 1)  # no anchor before the dialogue
        anchors, block = (wanted - 1 - slot).unique(return_inverse=True)
        places = (block * slots + slot).to(tokens.device)
        chosen = replace(batch, rows=tokens - 1, places=places, anchors=[anchors.tolist()])
        return replace(self.pairs(module, chosen), targets=batch.features[0, tokens - 1])

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        """Also by slot, from 1 on: ``slot_k_top1`` and ``slot_k_expected_acceptance``, behind the text's own tokens."""
        (overlap,), (agree,) = self.heads.compare(pairs)
        return self.figures(batch, pairs, overlap, agree)

    def figures(self, batch: Batch, pairs: Pairs, overlap: Tensor, agree: Tensor) -> dict[str, Ratio]:
        """``heldout`` of pairs whose expected acceptance and agreement are known, ``[n]`` each."""
        ratios = {"expected_acceptance": mean(overlap), "top1_agreement": mean(agree)}
        slot = batch.places % self.slots
        for k in range(self.slots):
            ratios[f"slot_{k + 1}_top1"] = mean(agree[slot == k])
            ratios[f"slot_{k + 1}_expected_acceptance"] = mean(overlap[slot == k])
        return ratios


def rows_of(anchors: Tensor, slots: int) -> Tensor:
    """int64 ``[m, K]``: the positions of a dialogue whose next tokens the blocks behind ``anchors [m]`` predict."""
    return anchors[:, None] + torch.arange(slots)


def anchor_rows(batch: Batch) -> Tensor:
    """int64 ``[m]``: the anchors' places in the batch's only row."""
    starts = itertools.accumulate(batch.dialogue_lengths(), initial=0)
    flat = [start + place for start, anchors in zip(starts, batch.anchors, strict=False) for place in anchors]
    return torch.tensor(flat, dtype=torch.int64, device=batch.input_ids.device)


def of_text(pairs: Pairs) -> Pairs:
    """The pairs with the text's tokens as targets."""
    assert pairs.tokens is not None
    return replace(pairs, targets=pairs.tokens)


def predicted(loss_mask: Tensor) -> Tensor:
    """bool ``[T]``: the positions of a dialogue whose next token belongs to an answer; ``loss_mask``: bool ``[T]``."""
    return torch.cat([loss_mask[1:], loss_mask.new_zeros(1)])


def longest_answer(train: Source) -> int:
    """Tokens of the longest answer in all dialogues that are predicted."""
    return max(int(runs(predicted(train[index].loss_mask)).max()) for index in range(len(train)))


def runs(trained: Tensor) -> Tensor:
    """int64 ``[T]``: how many positions in a row, from each on, are ``trained`` (bool ``[T]``)."""
    index = torch.arange(len(trained))
    ends = torch.where(trained, len(trained), index).flip(0).cummin(0).values.flip(0)
    return ends - index


TASK = DFlashTask
