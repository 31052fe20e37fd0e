"""Test whether a store's answers are the target's own, for data_prep.inspect --own.

If the target drew the tokens of an answer from its distributions p_t, the surprise sum_t (-log p_t(x_t) - H(p_t)) has
mean 0 and variance sum_t Var(log p_t). At a lower temperature, or greedy, it is negative. The answers of another model,
or of another question, have tokens that the target finds far less likely. The share of greedy agreement alone cannot
tell these from sampled answers.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from data_prep.store.reader import FeatureStore, StoredDialogue
from drafters.model.ends import LMHead, load_frozen_ends
from drafters.model.files import resolve_device

SURPRISING = 4.0  # standard deviations
MOST_SURPRISING = 0.05  # share of answers; own sampled answers of the bundled target have 0.024, another model's 0.11
ANSWERS, TOKENS = 400, 20_000  # most that are tested
ROWS = 256  # logits computed at once
ALPHA = 0.05  # largest chance to refuse answers whose true share is MOST_SURPRISING
LEAST_VARIANCE = 1e-6  # of an answer whose every token is certain


@dataclass
class Ownership:
    """Answers and tokens tested, how many tokens are the target's first choice, and how many answers surprise it."""

    answers: int = 0
    tokens: int = 0
    agreeing: int = 0
    surprising: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the answers may be the target's own: a share up to MOST_SURPRISING is not refuted by these counts."""
        n, p = self.answers, MOST_SURPRISING
        logs = (math.log(math.comb(n, k)) + k * math.log(p) + (n - k) * math.log(1 - p) for k in range(self.surprising))
        return 1 - sum(map(math.exp, logs)) >= ALPHA  # P(X >= surprising) of a binomial X

    def describe(self) -> str:
        """One line."""
        return (
            f"answers: {self.agreeing / max(self.tokens, 1):.1%} of {self.tokens:,} tokens are the target's first "
            f"choice; {self.surprising} of {self.answers} answers ({self.surprising / max(self.answers, 1):.1%}) are "
            f"less likely than its own would be (significantly more than {MOST_SURPRISING:.0%} are refused)"
        )


def check_own(folder: Path) -> None:
    """Print the result for the store in ``folder``; raise ValueError if the answers are not the target's own."""
    counts = ownership(FeatureStore.open(folder))
    print(counts.describe(), flush=True)
    if not counts.answers:
        raise ValueError(f"{folder}: no answer has two tokens or more, so that none can be tested; give longer answers")
    if not counts.is_own:
        raise ValueError(
            f"{folder}: the answers are not this target's own: another model wrote them, another template was used, "
            "they were sampled at a temperature above 1, or they belong to other questions. A drafter learns the "
            "target's continuations: give the log of this target, or let it answer the questions "
            "(python -m data_prep.regenerate)"
        )


@torch.inference_mode()
def ownership(store: FeatureStore) -> Ownership:
    """Test answers of dialogues spread over the store, each without its last token, which a limit may have cut."""
    manifest, device, counts = store.manifest, resolve_device(), Ownership()
    head = load_frozen_ends(manifest.target_name, "float32", device, manifest.target_revision).lm_head
    for index in torch.randperm(len(store), generator=torch.Generator().manual_seed(0)).tolist():
        if counts.answers >= ANSWERS or counts.tokens >= TOKENS:
            break
        dialogue = store[index]
        for start, end in spans(dialogue.loss_mask):
            if start > 0 and end - 1 > start:
                add(counts, head, dialogue, start, end - 1, device)
    return counts


def spans(mask: Tensor) -> list[tuple[int, int]]:
    """``[start, end)`` of each run of True in ``[T]``."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    return list(pairwise(edges.nonzero().flatten().tolist()))[::2]


def add(counts: Ownership, head: LMHead, dialogue: StoredDialogue, start: int, end: int, device: torch.device) -> None:
    """Count the answer in ``[start, end)``."""
    surprise = variance = 0.0
    for first in range(start, end, ROWS):
        last = min(first + ROWS, end)
        tokens = dialogue.input_ids[first:last, None].to(device)
        logs = head(dialogue.features[first - 1 : last - 1].to(device, torch.float32)).log_softmax(-1)
        chances = logs.exp()
        entropy = -(chances * logs).sum(-1)
        surprise += float((-logs.gather(1, tokens)[:, 0] - entropy).sum())
        variance += float(((chances * logs * logs).sum(-1) - entropy**2).clamp_min(0).sum())
        counts.agreeing += int((logs.argmax(-1, keepdim=True) == tokens).sum())
    counts.answers, counts.tokens = counts.answers + 1, counts.tokens + end - start
    counts.surprising += surprise / max(variance, LEAST_VARIANCE) ** 0.5 > SURPRISING
