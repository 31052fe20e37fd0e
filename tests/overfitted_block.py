"""DFlash and DSpark heads that learnt the texts of ``overfitted`` by heart: seconds, and drafts are accepted."""

from functools import cache
from typing import Any

import torch
from overfitted import BEGUN, KEPT, TAPS, target, texts
from torch import nn

from drafters.methods.dflash import BlockOptions, DFlashDrafter
from drafters.methods.dspark import DSparkDrafter, DSparkOptions

MASK, BLOCK = 2, 4
COUNT = 8  # texts that they learnt
DEPTH = 3  # tokens of a chain, which both layouts predict
KINDS: dict[str, tuple[type[DFlashDrafter], type[BlockOptions]]] = {
    "dflash": (DFlashDrafter, BlockOptions),
    "dspark": (DSparkDrafter, DSparkOptions),
}


def options(method: str) -> dict[str, Any]:
    """Of a head with a draft vocabulary."""
    found = {"block_size": BLOCK, "mask_token_id": MASK, "taps": TAPS, "layers": 2, "draft_vocab_size": KEPT}
    if method == "dflash":
        return found | {"layout": "fill-in"}
    return found | {"layout": "anchor-first", "markov_rank": 16, "confidence_head": False}


@cache
def drafter(method: str) -> Any:
    """The drafter; shared, do not change it."""
    kind, schema = KINDS[method]
    given = schema(**options(method), tree="chain", depth=DEPTH)
    torch.manual_seed(0)
    head: Any = kind.build_module(target().config, options(method))
    counts = torch.bincount(texts()[:COUNT, BEGUN:].flatten(), minlength=target().vocab_size)
    ids = counts.topk(KEPT).indices.sort().values
    head.d2t.copy_(ids - torch.arange(KEPT))
    head.lm_head.weight.data.copy_(target().model.get_output_embeddings().weight[ids])
    train(head, given, ids)
    return kind(target(), head, given)


@torch.enable_grad()
def train(head: Any, given: BlockOptions, ids: torch.Tensor, steps: int = 200) -> None:
    """Cross-entropy of the texts' tokens in the blocks behind all anchors of all texts, which see the context before
    their anchor and themselves."""
    known = texts()[:COUNT]
    count, length = known.shape
    with torch.no_grad():
        found = target().features(known, taps=tuple(TAPS)).taps
    states = torch.cat([found[tap] for tap in TAPS], dim=-1).clone()
    kept = torch.full((target().vocab_size,), -100).index_put((ids,), torch.arange(KEPT))
    anchors, slots = torch.arange(BEGUN - 1, length - BLOCK), torch.arange(BLOCK)
    rows = anchors[:, None] + slots  # [A, B], positions
    block = torch.where(slots == 0, known[:, rows], MASK)
    embeddings = target().embed(block.flatten(1)).clone()  # [T, A * B, H]
    positions = torch.cat([torch.arange(length), rows.flatten()])[None]
    own = torch.eye(len(anchors)).bool().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    before = torch.arange(length) < anchors.repeat_interleave(BLOCK)[:, None]
    see = torch.cat([before, own], dim=1)[None, None]
    predicted = rows[:, given.first_slot :] + 1 - given.first_slot  # [A, K]
    right = kept[known[:, predicted]]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        hidden = head(states, embeddings, positions, see).view(count, len(anchors), BLOCK, -1)[:, :, given.first_slot :]
        logits = head.lm_head(hidden)
        if isinstance(given, DSparkOptions):
            logits = logits + head.markov_head.markov_w2(head.markov_head(known[:, predicted - 1], hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def misread(method: str, **changes: Any) -> Any:
    """The drafter as an import with other options would read its file."""
    right = drafter(method)
    return type(right)(right.target, right.module, right.given.model_copy(update=changes))
