"""The decoding loop: ``generate`` continues prompts with a target and a drafter, ``step`` by ``step``.

All methods, plain decoding included, share this loop and so its cache, stop rules, token counts and clock.

tau, the average acceptance length, is the number of tokens committed per target forward, bonus included: 1.0 in plain
decoding. The prefill and its token are timed separately and not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.loop.acceptance import ByText, Control, Rule, Verdict, chosen_by, scores_after
from drafters.loop.call import check_call, check_loaded, check_seed, eos_ids, padding_id, prompts_of, whole
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState, last_of, padded
from drafters.loop.tree import DraftTree
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import Clock
from drafters.model.target import FeatureOutput, TargetModel

if TYPE_CHECKING:
    from drafters.base import Drafter


@dataclass
class Step:
    """One step of one sequence.

    Attributes:
        row: index of the sequence.
        drafted: nodes of the draft.
        depth: nodes of its longest path.
        accepted: draft tokens accepted by the rule.
        committed: tokens appended, bonus included, after the cut at EOS and limits.
        forwards: target forwards: the loop's one, and those that the drafter spent on its draft (MJGD).
        source: name of the inner drafter that made the draft (hybrids).
    """

    row: int
    drafted: int
    depth: int
    accepted: int
    committed: int
    forwards: int = 1
    source: str = ""


@dataclass
class Trace:
    """Steps of one ``generate`` call, and their times in seconds.

    A step's time is the sum of its draft, verify and other seconds. ``model_seconds`` is the part spent in forward
    passes of the target, draft models and trained heads. The remainder is overhead: pools, trees, masks, rules.
    """

    steps: list[Step] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    model_seconds: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0

    def read(self, clock: Clock) -> None:
        """Read the times of a finished clock: one lap for the prefill, then three laps per step."""
        laps, models = clock.laps()
        self.prefill_seconds = laps[0]
        self.draft_seconds, self.verify_seconds, self.other_seconds = laps[1::3], laps[2::3], laps[3::3]
        self.model_seconds = [sum(models[i : i + 3]) for i in range(1, len(models), 3)]

    @property
    def forwards(self) -> int:
        """Target forwards after the prefill (of a batch, those of the sequence with most)."""
        by_row: dict[int, int] = {}
        for step in self.steps:
            by_row[step.row] = by_row.get(step.row, 0) + step.forwards
        return max(by_row.values(), default=0)

    @property
    def overhead(self) -> float | None:
        """Share of the time after the prefill outside of forward passes; None if there was no step."""
        total = self.decode_seconds
        return 1.0 - sum(self.model_seconds) / total if self.model_seconds and total > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prefill."""
        return sum(self.draft_seconds) + sum(self.verify_seconds) + sum(self.other_seconds)

    @property
    def decoded_tokens(self) -> int:
        """Tokens committed after the token of the prefill."""
        return sum(step.committed for step in self.steps)

    @property
    def tau(self) -> float:
        """Average acceptance length; 1.0 if there was no step."""
        return self.decoded_tokens / sum(step.forwards for step in self.steps) if self.steps else 1.0

    def ctar(self, w: int) -> float:
        """CTAR(w): share of steps that commit more than w tokens, bonus included (Kangaroo)."""
        return sum(step.committed > w for step in self.steps) / max(len(self.steps), 1)

    def n_alpha(self, n: int) -> float | None:
        """Share of steps that accept depth n + 1 among those that accept depth n and drafted deeper; None without any.

        For a chain this is n-alpha of the EAGLE paper; for a tree it is the acceptance rate per level.
        """
        reached = [step for step in self.steps if step.accepted >= n and step.depth > n]
        return sum(step.accepted > n for step in reached) / len(reached) if reached else None

    def joint_alpha(self, n: int) -> float | None:
        """Share of all drafts that are accepted to depth n + 1 or deeper; None if no draft is deeper than n.

        It is counted, not multiplied: the product of the n-alphas leaves out drafts that are shorter.
        """
        drafts = [step for step in self.steps if step.depth]
        reached = any(step.depth > n for step in drafts)
        return sum(step.accepted > n for step in drafts) / len(drafts) if reached else None


@dataclass
class GenerateResult:
    """Result of ``generate``.

    Attributes:
        tokens: ``[B, n]`` new token ids on the CPU; sequences that ended early are padded with EOS, or with 0 without
            EOS.
        lengths: number of new tokens of each sequence.
        trace: steps and times.
    """

    tokens: Tensor
    lengths: list[int]
    trace: Trace = field(default_factory=Trace)


@torch.inference_mode()
def generate(
    target: TargetModel,
    drafter: "Drafter",
    input_ids: Tensor | list[list[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    prompt_lengths: list[int] | None = None,
    attention_mask: Tensor | list[list[int]] | None = None,
    seed: int = 0,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    control: Control | None = None,
    trace: Trace | None = None,
) -> GenerateResult:
    """Continue prompts with a target accelerated by a drafter.

    Args:
        input_ids: ``[B, T]`` token ids, or a list of id lists.
        max_new_tokens: most new tokens of a sequence; it ends earlier at its first EOS.
        temperature, top_k, top_p: 0 is greedy; 0 and 1 switch top_k and top_p off.
        eos_token_id: tokens that end a sequence; None takes those of the target's generation config, ``[]`` is none.
        prompt_lengths, attention_mask: tokens of each prompt before its padding; ``[B, T]``, 0 at padding.
        seed: seed of the generator of all random numbers.
        on_tokens: called with (index of the sequence, new ids) after each commit, for streaming.
        control: logits processors and stopping criteria. If it alters scores, temperature, top_k and top_p only shape
            the drafts.
        trace: an empty trace to fill, so that ``on_tokens`` can read the steps; times are set at the end.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a prompt too long for the target, too many prompts for
            the drafter, or parameters out of range or of a wrong type.
    """
    check_loaded(target)
    sampling = Sampling(temperature, top_k, top_p)
    prompts = prompts_of(input_ids, prompt_lengths, attention_mask, padding_id(target))
    max_new_tokens, eos = whole(max_new_tokens, "max_new_tokens"), eos_ids(target, eos_token_id)
    check_call(target, drafter, prompts, max_new_tokens)
    # Set up the generator of random numbers, and a cache for prompt, new tokens and one draft.
    generator = torch.Generator(device=target.device).manual_seed(check_seed(seed))
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + drafter.max_draft + 1
    state = DecodeState(target, prompts, capacity, max_new_tokens, sampling, generator, eos)
    state.control = control
    trace = Trace() if trace is None else trace
    rule = ByText(state) if control is not None and control.alters else drafter.rule(sampling)
    clock = Clock(target.device)
    # Decode: the prefill, then steps until all sequences have ended.
    start(state, drafter)
    clock.lap()
    _notify(state, on_tokens, state.prompt_lengths)
    while not all(state.finished):
        before = [len(row) for row in state.tokens]
        trace.steps.extend(step(state, drafter, rule, clock.lap))
        _notify(state, on_tokens, before)
    trace.read(clock)
    new = [row[begin:] for row, begin in zip(state.tokens, state.prompt_lengths, strict=True)]
    return GenerateResult(padded(new, torch.device("cpu"), min(state.eos, default=0)), list(map(len, new)), trace)


def _notify(state: DecodeState, on_tokens: Callable[[int, list[int]], None] | None, before: list[int]) -> None:
    if on_tokens is None:
        return
    for row, length in enumerate(before):
        if len(state.tokens[row]) > length:
            on_tokens(row, state.tokens[row][length:])


def step(state: DecodeState, drafter: "Drafter", rule: Rule, lap: Callable[[], object] = lambda: None) -> list[Step]:
    """Run one step and return what each unfinished sequence did. A cascade calls it with a draft model as target.

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
    """Run the prompts and sample each sequence's first token."""
    state.cache.expect(state.prompt_lengths)
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
    inputs = draft.extra.hidden
    if inputs is None:
        inputs = torch.cat([state.roots, draft.tokens], dim=1) if draft.size else state.roots
    output = state.target.run(inputs, state.cache, rows, start=draft.extra.resume_layer, taps=drafter.taps)
    features, verified = output.features, 1 + draft.size - draft.extra.scratch
    if draft.extra.scratch:  # keep [root, nodes] and the scratch rows whose logits are wanted
        features = torch.cat(
            [features[:, :verified], features[:, features.shape[1] - draft.extra.scratch_outputs :]], dim=1
        )
    logits = state.target.lm_head(features)
    output.logits, output.scratch = logits[:, :verified], logits[:, verified:] if draft.extra.scratch else None
    return output, output.logits


def _commit(state: DecodeState, draft: DraftTree, verdict: Verdict) -> list[Step]:
    """Append the accepted tokens, and commit the cache slots of the root and of all but the last of them."""
    steps = []
    for row in range(state.batch):
        if state.finished[row]:
            verdict.rows[row], verdict.tokens[row] = [], []
            continue
        accepted = len(verdict.rows[row]) - 1
        count = state.append(row, verdict.tokens[row])
        # The last committed token is the next root, which has no cache slot. If EOS or the limit cut the tokens, it is
        # a draft token, and its slot is dropped.
        verdict.rows[row], verdict.tokens[row] = verdict.rows[row][:count], verdict.tokens[row][:count]
        nodes = draft.size - draft.extra.scratch
        steps.append(
            Step(row, nodes, verdict.depths[row], accepted, count, 1 + draft.extra.target_forwards, draft.extra.source)
        )
    state.cache.commit(verdict.rows)
    return steps
