"""Block heads that learnt the texts of ``overfitted`` by heart: seconds, and drafts are accepted."""

from functools import cache
from typing import Any

import torch
from by_keys import new_drafter, new_head
from overfitted import BEGUN, KEPT, TAPS, target, texts
from torch import Tensor, nn

from drafters import TargetModel, drafter_class
from drafters.heads.block.shape import BlockShape, DSparkShape
from drafters.heads.dflash2.shape import DFlash2Shape
from eval.measure.mistakes import remade

MASK, BLOCK = 2, 4
COUNT = 8  # texts that they learnt
DEPTH = 3  # tokens of a chain, which both layouts predict


def options(method: str) -> dict[str, Any]:
    """Of a head with a draft vocabulary; DFlash2 has none."""
    found = {"block_size": BLOCK, "mask_token_id": MASK, "taps": TAPS, "layers": 2}
    if method == "dflash2":
        return found | {"layout": "fill-in", "conv_group_size": 4, "selector_rank": 16, "selector_top_k": 6}
    found |= {"draft_vocab_size": KEPT}
    if method == "dflash":
        return found | {"layout": "fill-in"}
    return found | {"layout": "anchor-first", "markov_rank": 16, "confidence_head": False}


@cache
def drafter(method: str) -> Any:
    """The drafter; shared, do not change it."""
    given = drafter_class(method).shape(**options(method))  # type: ignore[attr-defined]
    counts = torch.bincount(texts()[:COUNT, BEGUN:].flatten(), minlength=target().vocab_size)
    head = trained(target(), given, texts()[:COUNT], BEGUN, counts.topk(KEPT).indices.sort().values)
    return new_drafter(method, target(), head, tree="chain", depth=DEPTH)


@torch.enable_grad()
def trained(
    target: TargetModel, given: BlockShape, known: Tensor, begun: int, ids: Tensor, steps: int = 200
) -> nn.Module:
    """A head that learnt the texts ``known`` ``[N, L]`` from their token ``begun`` on, with the draft tokens ``ids``.

    Cross-entropy of the texts' tokens in the blocks behind all anchors of all texts, which see the context before
    their anchor and themselves.
    """
    torch.manual_seed(0)
    markov, selects = isinstance(given, DSparkShape), isinstance(given, DFlash2Shape)
    method = "dspark" if markov else "dflash2" if selects else "dflash"
    head: Any = new_head(method, target.config, **given.model_dump())
    outputs = target.model.get_output_embeddings().weight.detach().clone()
    ids = torch.arange(len(outputs)) if selects else ids
    if not selects:
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.lm_head.weight.data.copy_(outputs[ids])
    (count, length), size = known.shape, given.block_size
    with torch.no_grad():
        found = target.features(known, taps=tuple(given.reads)).taps
    states = torch.cat([found[tap] for tap in given.reads], dim=-1).clone()
    kept = torch.full((target.vocab_size,), -100).index_put((ids,), torch.arange(len(ids)))
    anchors, slots = torch.arange(begun - 1, length - size), torch.arange(size)
    rows = anchors[:, None] + slots  # [A, B], positions
    block = torch.where(slots == 0, known[:, rows], given.mask_token_id)
    embeddings = target.embed(block.flatten(1)).clone()  # [T, A * B, H]
    positions = torch.cat([torch.arange(length), rows.flatten()])[None]
    own = torch.eye(len(anchors)).bool().repeat_interleave(size, 0).repeat_interleave(size, 1)
    before = torch.arange(length) < anchors.repeat_interleave(size)[:, None]
    see = torch.cat([before, own], dim=1)[None, None]
    predicted = rows[:, given.first_slot :] + 1 - given.first_slot  # [A, K]
    right = kept[known[:, predicted]]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        hidden = head(states, embeddings, positions, see).view(count, len(anchors), size, -1)[:, :, given.first_slot :]
        logits = hidden @ outputs.T if selects else head.lm_head(hidden)
        if markov:
            logits = logits + head.markov_head.markov_w2(head.markov_head(known[:, predicted - 1], hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), right.flatten())
        if selects:  # of all tokens as candidates
            scores = head.candidate_selector(logits, ids, hidden, known[:, predicted - 1])
            loss = loss + nn.functional.cross_entropy(scores.flatten(0, 2), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head  # type: ignore[no-any-return]


def misread(method: str, **changes: Any) -> Any:
    """The drafter as an import with other options would read its file."""
    right = drafter(method)
    return remade(right, **changes)
