"""One step of the decoding loop: propose, target forward, verification, commit, observe."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.loop.acceptance import Rule, Verdict
from drafters.loop.processors import chosen_by, scores_after
from drafters.loop.state import DecodeState, last_of, padded
from drafters.loop.trace import Step
from drafters.loop.tree import DraftTree
from drafters.model.rows import CHAIN, Rows
from drafters.model.target import FeatureOutput

if TYPE_CHECKING:
    from drafters.base import Drafter


def step(state: DecodeState, drafter: "Drafter", rule: Rule, lap: Callable[[], object] = lambda: None) -> list[Step]:
    """Run one step and return what each unfinished batch row did. A cascade calls it with a draft model as target.

    Args:
        lap: called after the draft, after the verification, and at the end.
    """
    # Draft. Copy the roots to the device first: queued after the draft, the copy would wait for it.
    _ = state.roots
    draft = drafter.propose(state)
    lap()
    # Verify: one target forward over [root, nodes].
    see = draft.ancestors()  # [B, N + 1, N + 1]
    output, logits = _forward(state, drafter, draft, see)  # logits [B, N + 1, V]
    drafter.while_verifying(state, draft, output)
    proposed, see = draft.proposed(see)
    verdict = rule(proposed, logits, see, state.sampling, state.generator)
    lap()
    # Commit the accepted path, and let the drafter catch up.
    steps = _commit(state, draft, verdict)
    if not all(state.finished):
        drafter.observe(state, draft, output, verdict)
    lap()
    return steps


def start(state: DecodeState, drafter: "Drafter") -> None:
    """Prefill, and let the drafter begin."""
    output = prefill(state, drafter.taps)
    if not all(state.finished):
        drafter.begin(state, output)


def prefill(state: DecodeState, taps: tuple[int, ...]) -> FeatureOutput:
    """Run the prompts and sample each row's first token."""
    output = state.target.run(padded(state.tokens, state.target.device), state.cache, taps=taps)
    state.cache.commit_first(state.prompt_lengths)
    logits = state.target.lm_head(last_of(output.features, state.prompt_lengths))
    how = state.sampling
    if state.control is not None and state.control.alters:
        logits = torch.stack([scores_after(state, row, [], each) for row, each in enumerate(logits)])
        how = chosen_by(how)
    for row, token in enumerate(how.pick(logits, state.generator).tolist()):
        state.append(row, [token])
    return output


def _forward(state: DecodeState, drafter: "Drafter", draft: DraftTree, see: Tensor) -> tuple[FeatureOutput, Tensor]:
    """One target forward over [root, nodes]; a chain needs no explicit mask or positions."""
    rows = CHAIN if draft.is_chain else Rows(see, draft.depths(see))
    given = draft.extra.hidden
    if given is None:
        given = torch.cat([state.roots, draft.tokens], dim=1) if draft.size else state.roots
    output = state.target.run(given, state.cache, rows, start=draft.extra.resume_layer, taps=drafter.taps)
    features, verified = output.features, 1 + draft.size - draft.extra.scratch
    if draft.extra.scratch:  # keep [root, nodes] and the scratch rows whose logits are wanted
        features = torch.cat(
            [features[:, :verified], features[:, features.shape[1] - draft.extra.scratch_outputs :]], dim=1
        )
    logits = state.target.lm_head(features)
    output.logits, output.scratch = logits[:, :verified], logits[:, verified:] if draft.extra.scratch else None
    return output, output.logits


def _commit(state: DecodeState, draft: DraftTree, verdict: Verdict) -> list[Step]:
    """Append the accepted tokens to the rows, and commit the cache rows of the root and of all but the last of them."""
    steps = []
    for row in range(state.batch):
        if state.finished[row]:
            verdict.rows[row], verdict.tokens[row] = [], []
            continue
        accepted = len(verdict.rows[row]) - 1
        kept = state.append(row, verdict.tokens[row])
        # The last committed token is the next root, which has no cache row. If EOS or the limit cut the tokens, it is a
        # draft token, and its row is dropped.
        verdict.rows[row], verdict.tokens[row] = verdict.rows[row][:kept], verdict.tokens[row][:kept]
        nodes = draft.size - draft.extra.scratch
        steps.append(
            Step(row, nodes, verdict.depths[row], accepted, kept, 1 + draft.extra.target_forwards, draft.extra.source)
        )
    state.cache.commit(verdict.rows)
    return steps
