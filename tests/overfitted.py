"""A tiny target, its own greedy texts, and an EAGLE-3 head that learnt them by heart: seconds, and drafts are accepted.

Tests of what lowers acceptance need a trained head: drafts of random weights are never accepted.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import tiny
import torch
from by_keys import new_drafter, new_head
from torch import Tensor, nn

from drafters import TargetModel, generate, make_drafter
from drafters.heads.eagle3.module import Eagle3Head
from drafters.hub.checkpoint import make_config, save_checkpoint
from drafters.methods.eagle import Eagle3Drafter

TAPS, KEPT, DEPTH = [1, 2, 3], 80, 3  # states, draft tokens, tokens of a chain
TEXTS, BEGUN, NEW = 32, 8, 24
STEPS_AHEAD = 2  # of training-time test
# Not 10,000, which a config that forgets rope_theta means.
ROPE = {"rope_theta": 1e6, "rope_type": "default"}


@cache
def target() -> TargetModel:
    """The target; shared, do not change it."""
    return TargetModel(tiny.build("llama", rope_parameters=ROPE), name="tiny-llama")


@cache
def texts() -> Tensor:
    """``[TEXTS, BEGUN + NEW]`` random beginnings and the target's greedy continuations."""
    begun = torch.randint(3, tiny.VOCAB_SIZE, (TEXTS, BEGUN), generator=torch.Generator().manual_seed(0))
    plain = make_drafter("autoregressive", target())
    new = generate(target(), plain, begun, max_new_tokens=NEW, eos_token_id=[]).tokens
    return torch.cat([begun, new], dim=1)


def options(**more: Any) -> dict[str, Any]:
    """Those of an EAGLE-3.1 head."""
    return {"taps": TAPS, "draft_vocab_size": KEPT, "fc_norm": True, "norm_output": True, **more}


@cache
def eagle3() -> Eagle3Drafter:
    """The drafter; shared, do not change it."""
    torch.manual_seed(0)
    head: Any = new_head(Eagle3Drafter, target().config, **options())
    counts = torch.bincount(texts()[:, BEGUN:].flatten(), minlength=tiny.VOCAB_SIZE)
    ids = counts.topk(KEPT).indices.sort().values
    head.d2t.copy_(ids - torch.arange(KEPT))
    head.lm_head.weight.data.copy_(target().model.get_output_embeddings().weight[ids])
    train(head, ids)
    return new_drafter(Eagle3Drafter, target(), head, tree="chain", depth=DEPTH)


def save_eagle3(folder: Path) -> None:
    """Save the head as ``folder/head``, and the target as ``folder/target``."""
    target().model.save_pretrained(folder / "target")
    given = make_config("eagle3", options(), target())
    given["target"]["name"] = str(folder / "target")
    save_checkpoint(folder / "head", copy.deepcopy(eagle3().module), given)


@torch.enable_grad()
def train(head: Eagle3Head, ids: Tensor, steps: int = 200) -> None:
    """Training-time test (paper, section 3.2): step s reads the outputs of step s - 1, each behind true features.

    Step 0 attends causally, a later row to step 0 and to its own earlier steps.
    """
    with torch.no_grad():
        found = target().features(texts(), taps=tuple(TAPS)).taps
        truth = target().model(texts()).logits[..., ids].softmax(-1)
    states, truth = torch.cat([found[tap] for tap in TAPS], dim=-1).clone(), truth.clone()
    embeddings, count = target().embed(texts()).clone(), texts().shape[1] - STEPS_AHEAD - 1
    causal, own = torch.ones(count, count).tril().bool(), torch.eye(count).bool()
    nothing = torch.zeros_like(own)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        features, loss = [head.fused(states[:, :count])], torch.zeros(())
        for ahead in range(STEPS_AHEAD):
            every = range(ahead + 1)
            following = torch.cat([embeddings[:, 1 + step : 1 + step + count] for step in every], dim=1)
            positions = torch.cat([torch.arange(count) + step for step in every])[None]
            rows = [[causal if key == 0 else own if key <= row else nothing for key in every] for row in every]
            mask = torch.cat([torch.cat(blocks, dim=1) for blocks in rows])[None, None]
            predicted = head(torch.cat(features, dim=1), following, positions, mask)[:, -count:]
            features.append(predicted)
            logits = head.lm_head(head.scored(predicted))  # type: ignore[misc]
            right = truth[:, ahead + 1 : ahead + 1 + count]
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
