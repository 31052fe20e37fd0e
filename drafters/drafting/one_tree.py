"""A head's draft and a copy in one tree: the copy's nodes behind the head's, whose rows keep their numbers.

A copied node is deterministic. Of a node's children those that were sampled are tried first, as their q asks; where
none passes, the token is drawn from what is left of p, and may be a copied one's (``loop/acceptance.py``). So what
is copied changes where a token is found, never which, and may hang on what the head drew.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafters.drafting.retrieval import Copy, draft_of, part_of
from drafters.loop.tree import ROOT, DraftTree

Overlap = dict[int, int]  # of a copy's nodes those that the head drafted, too: which node of its draft each is


def overlaps(draft: DraftTree, found: Sequence[Copy]) -> list[Overlap]:
    """What of each row's copy the draft holds already, from the root on.

    Off the CPU nothing: reading the draft would wait for the device.
    """
    if draft.tokens.device.type != "cpu" or not draft.size:
        return [{} for _ in found]
    valid = [None] * len(found) if draft.valid is None else draft.valid.tolist()
    rows = zip(found, draft.tokens.tolist(), draft.parents.tolist(), valid, strict=True)
    return [_held(*row) for row in rows]


def _held(found: Copy, tokens: list[int], parents: list[int], valid: list[bool] | None) -> Overlap:
    there: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(parents, tokens, strict=True)):
        if valid is None or valid[node]:
            there.setdefault(place, node)
    held: Overlap = {}
    for node, (parent, token) in enumerate(zip(found.parents, found.tokens, strict=True)):
        at = ROOT if parent == ROOT else held.get(parent)
        if at is not None and (at, token) in there:
            held[node] = there[at, token]
    return held


def with_copies(
    draft: DraftTree, found: Sequence[Copy], held: Sequence[Overlap], kept: Sequence[Sequence[int]]
) -> DraftTree:
    """The draft with the nodes ``kept`` of each row's copy behind its own.

    Args:
        kept: nodes that the draft does not hold, each with its parent among them or held.
    """
    width, device = max(map(len, kept)), draft.tokens.device
    if not width:
        return draft
    if not draft.size:
        return draft_of([part_of(one, sorted(nodes)) for one, nodes in zip(found, kept, strict=True)], device)
    new, deepest = [], 0
    for one, has, nodes in zip(found, held, kept, strict=True):
        places = {ROOT: ROOT} | has | {node: draft.size + number for number, node in enumerate(sorted(nodes))}
        padding = [0] * (width - len(nodes))
        tokens = [one.tokens[node] for node in sorted(nodes)]
        above = [places[one.parents[node]] for node in sorted(nodes)]
        new.append([tokens + padding, above + [ROOT] * len(padding)])
        deepest = max([deepest, *(_depth(one, node) for node in nodes)])
    tokens_new, parents_new = torch.tensor(new, device=device).unbind(1)
    counts = torch.tensor([len(nodes) for nodes in kept], device=device)[:, None]
    real = torch.arange(width, device=device) < counts
    old = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid
    parents = torch.cat([draft.parents, parents_new], dim=1)
    whole = replace(
        draft,
        tokens=torch.cat([draft.tokens, tokens_new], dim=1),
        parents=parents,
        q_row=None if draft.q_row is None else torch.cat([draft.q_row, torch.full_like(tokens_new, ROOT)], dim=1),
        valid=None if draft.valid is None and len(set(map(len, kept))) == 1 else torch.cat([old, real], dim=1),
        see=None,
        draws=None if draft.draws is None else draft.draws + (0,) * (deepest - len(draft.draws)),
        is_chain=False,
    )
    if draft.is_chain and device.type == "cpu":
        whole.is_chain = torch.equal(parents, torch.arange(ROOT, whole.size - 1).expand_as(parents))
    return whole


def _depth(found: Copy, node: int) -> int:
    depth = 0
    while node != ROOT:
        depth, node = depth + 1, found.parents[node]
    return depth
