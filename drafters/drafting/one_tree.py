"""A head's draft and a copy in one tree (hybrid ``one_tree``): the copied nodes are appended to the head's nodes.

Copied nodes are deterministic. Verification tries the sampled children of a node first; if none passes, it draws from
the remaining p, and the drawn token may be a copied node's (``loop/acceptance.py``). So copied nodes keep the output
distribution, even if they are chosen depending on the head's draws.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafters.drafting.retrieval import Copy, draft_of, part_of
from drafters.loop.tree import ROOT, DraftTree

Overlap = dict[int, int]  # node of a copy -> the node of the head's draft with the same path from the root


def overlaps(draft: DraftTree, copies: Sequence[Copy]) -> list[Overlap]:
    """Per sequence, the nodes of the copy that the draft has too. Empty on a GPU, where reading would synchronise."""
    if draft.tokens.device.type != "cpu" or not draft.size:
        return [{} for _ in copies]
    valid = [None] * len(copies) if draft.valid is None else draft.valid.tolist()
    rows = zip(copies, draft.tokens.tolist(), draft.parents.tolist(), valid, strict=True)
    return [_overlap(*row) for row in rows]


def _overlap(copy: Copy, tokens: list[int], parents: list[int], valid: list[bool] | None) -> Overlap:
    children: dict[tuple[int, int], int] = {}  # (parent, token) -> node of the draft
    for node, place in enumerate(zip(parents, tokens, strict=True)):
        if valid is None or valid[node]:
            children.setdefault(place, node)
    overlap: Overlap = {}
    for node, (parent, token) in enumerate(zip(copy.parents, copy.tokens, strict=True)):
        at = ROOT if parent == ROOT else overlap.get(parent)
        if at is not None and (at, token) in children:
            overlap[node] = children[at, token]
    return overlap


def with_copies(
    draft: DraftTree, copies: Sequence[Copy], overlap: Sequence[Overlap], chosen: Sequence[Sequence[int]]
) -> DraftTree:
    """Append the ``chosen`` nodes of each sequence's copy to the draft.

    Args:
        overlap: nodes of each sequence's copy that the draft has too.
        chosen: other nodes of each copy; the parent of each is chosen, too, or in ``overlap``.
    """
    width, device = max(map(len, chosen)), draft.tokens.device
    if not width:
        return draft
    if not draft.size:
        return draft_of([part_of(copy, sorted(nodes)) for copy, nodes in zip(copies, chosen, strict=True)], device)
    # Number the new nodes, and pad them to the same width in all sequences.
    new, deepest = [], 0
    for copy, shared, nodes in zip(copies, overlap, map(sorted, chosen), strict=True):
        number = {ROOT: ROOT} | shared | {node: draft.size + place for place, node in enumerate(nodes)}
        padding = width - len(nodes)
        tokens = [copy.tokens[node] for node in nodes]
        above = [number[copy.parents[node]] for node in nodes]
        new.append([tokens + [0] * padding, above + [ROOT] * padding])
        depths: list[int] = []
        for parent in copy.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        deepest = max([deepest, *(depths[node] for node in nodes)])
    tokens_new, parents_new = torch.tensor(new, device=device).unbind(1)  # [B, width] each
    # Append them to every field of the draft.
    counts = torch.tensor([len(nodes) for nodes in chosen], device=device)[:, None]
    real = torch.arange(width, device=device) < counts  # [B, width]
    old = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid
    parents = torch.cat([draft.parents, parents_new], dim=1)
    chain = torch.arange(ROOT, parents.shape[1] - 1, device=device).expand_as(parents)
    return replace(
        draft,
        tokens=torch.cat([draft.tokens, tokens_new], dim=1),
        parents=parents,
        q_row=None if draft.q_row is None else torch.cat([draft.q_row, torch.full_like(tokens_new, -1)], dim=1),
        valid=None if draft.valid is None and len(set(map(len, chosen))) == 1 else torch.cat([old, real], dim=1),
        see=None,
        draws=None if draft.draws is None else draft.draws + (0,) * (deepest - len(draft.draws)),
        is_chain=draft.is_chain and device.type == "cpu" and torch.equal(parents, chain),
    )
