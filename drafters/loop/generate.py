"""The one decoding loop: propose -> target forward -> verify -> commit -> observe.

Every method, plain decoding included, runs through it: the same cache, stop rules, token counts and clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.loop.acceptance import Rule, Verdict
from drafters.loop.call import check_call, check_seed, check_types, eos_ids, padding_id, prompts_of, whole
from drafters.loop.processors import ByText, Control, chosen_by, scores_after
from drafters.loop.sampling import Sampling
from drafters.loop.trace import Step, Trace
from drafters.loop.tree import DraftTree
from drafters.loop.waiting import weights
from drafters.model.cache import KVCache
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import Clock
from drafters.model.target import FeatureOutput, TargetModel

if TYPE_CHECKING:
    from drafters.base import Drafter


@dataclass
class DecodeState:
    """Where a generation stands.

    The last committed token of a row (the root of the next draft) has no cache row yet: the cache holds one row less
    than there are tokens.

    Attributes:
        tokens: per batch row, prompt and new token ids, on the host.
        prompt_lengths: per batch row, how many of them are the prompt.
        finished: per batch row, whether EOS, the limit or what ``control`` says was reached.
        control: what else decides on the tokens, if anything does.
        steps: of the loop so far. refilled: whether other prompts take the place of rows that have finished.
        resting: so many of the next steps have no draft unasked (``Drafter.may_rest``). rested: so many had, of which
            the drafter has not been told.
    """

    target: TargetModel
    cache: KVCache
    tokens: list[list[int]]
    prompt_lengths: list[int]
    sampling: Sampling
    generator: torch.Generator
    max_new_tokens: int
    eos: frozenset[int]
    finished: list[bool]
    control: Control | None = None
    steps: int = 0
    refilled: bool = False
    resting: int = 0
    rested: int = 0
    _roots: Tensor | None = None
    _nothing: DraftTree | None = None

    @classmethod
    def of(
        cls,
        target: TargetModel,
        prompts: list[list[int]],
        capacity: int,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        eos: frozenset[int],
    ) -> "DecodeState":
        """Where the generation of some prompts starts, over an empty cache of ``capacity`` rows each."""
        lengths, finished = [len(prompt) for prompt in prompts], [False] * len(prompts)
        cache = target.new_cache(len(prompts), capacity)
        return cls(target, cache, prompts, lengths, sampling, generator, max_new_tokens, eos, finished)

    @property
    def batch(self) -> int:
        """Number of rows B."""
        return len(self.tokens)

    @property
    def roots(self) -> Tensor:
        """``[B, 1]`` last committed token of each row, copied to the device once a step."""
        if self._roots is None:
            self._roots = torch.tensor([row[-1:] for row in self.tokens], device=self.target.device)
        return self._roots

    @property
    def nothing(self) -> DraftTree:
        """The empty draft, of which one is enough."""
        if self._nothing is None:
            self._nothing = DraftTree.empty(self.batch, self.target.device)
        return self._nothing

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.tokens))

    @property
    def longest(self) -> int:
        """Tokens that a row may come to."""
        return min(max(self.prompt_lengths) + self.max_new_tokens, self.cache.capacity)

    def room(self, row: int = 0) -> int:
        """Tokens a row may still commit; a draft longer than room - 1 is wasted."""
        return self.max_new_tokens - (len(self.tokens[row]) - self.prompt_lengths[row])

    @property
    def waits(self) -> bool:
        """Whether the last of several rows is waited for: no others take the place of rows that have finished."""
        return self.batch > 1 and not self.refilled

    def weights(self) -> list[float]:
        """What a token of each row is worth, 1 on average: all the same where others take the place of rows that have
        finished; else most where the batch waits for the row (``waiting.weights``), and nothing in finished ones."""
        if not self.waits:
            return [1.0] * self.batch
        going = [row for row in range(self.batch) if not self.finished[row]]
        if not going:
            return [0.0] * self.batch
        made = [len(self.tokens[row]) - self.prompt_lengths[row] - 1 for row in going]
        known = dict(zip(going, weights(made, [self.room(row) for row in going], self.steps), strict=True))
        return [known.get(row, 0.0) for row in range(self.batch)]

    def longest_draft(self, wanted: int) -> int:
        """``wanted``, or less where no unfinished row has room for so many draft tokens and a bonus token."""
        rooms = [self.room(row) for row in range(self.batch) if not self.finished[row]]
        return max(min(wanted, max(rooms, default=1) - 1), 0)

    def append(self, row: int, tokens: list[int]) -> int:
        """Commit tokens to a row, cut at the limit and where it ends; returns how many were kept."""
        room = self.room(row)
        kept = until(tokens[:room], self.eos)
        ended = bool(kept) and kept[-1] in self.eos
        if self.control is not None:
            before = self.tokens[row][self.prompt_lengths[row] :]
            for count in range(1, len(kept) + 1):
                if self.control.ends(row, [*before, *kept[:count]]):
                    kept, ended = kept[:count], True
                    break
        self.tokens[row].extend(kept)
        self._roots = None
        self.finished[row] = ended or len(kept) == room
        return len(kept)

    def ended_by(self, verdict: Verdict) -> bool:
        """Whether a row has ended with this step."""
        return any(tokens and done for tokens, done in zip(verdict.tokens, self.finished, strict=True))

    def give(self, row: int, other: "DecodeState", number: int) -> None:
        """Let ``row`` go on with what row ``number`` of another state has come to; its cache row has been copied."""
        self.tokens[row], self.prompt_lengths[row] = other.tokens[number], other.prompt_lengths[number]
        self.finished[row], self._roots = other.finished[number], None

    def replace(self, row: int, tokens: list[int]) -> None:
        """Put other tokens into a row; bringing the cache into line is the caller's task."""
        self.tokens[row] = list(tokens)
        self._roots = None


@dataclass
class GenerateResult:
    """What ``generate`` returns.

    Attributes:
        tokens: ``[B, n]`` new token ids on the CPU; rows that ended early are filled with ``fill`` (EOS, else 0).
        lengths: new tokens of each row.
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
        input_ids: ``[B, T]``, padded behind ``prompt_lengths`` or where ``attention_mask`` is 0; or a list of id lists.
        max_new_tokens: exactly this many at most, cut at the first EOS.
        temperature: 0 is greedy. top_k, top_p: 0 and 1 switch them off.
        eos_token_id: where rows end; None takes the target's generation config's, ``[]`` is none.
        seed: of the one generator that all random numbers come from.
        on_tokens: called with (row, new ids) as soon as they are committed, for streaming.
        control: logits processors and stopping criteria; where it alters scores, the options above are for drafting.
        trace: an empty one, filled before ``on_tokens`` is called; its times are read at the end. None: the result's.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a prompt too long for the target, too many rows for the
            drafter, or parameters out of range or of a wrong type.
    """
    check_types(target, drafter, on_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    prompts = prompts_of(input_ids, prompt_lengths, attention_mask, padding_id(target))
    max_new_tokens, seed = whole(max_new_tokens, "max_new_tokens"), check_seed(seed)
    check_call(target, drafter, prompts, max_new_tokens)
    # Set up: the one generator, and a cache with room for the prompt, the new tokens and one draft.
    generator = torch.Generator(device=target.device).manual_seed(seed)
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + drafter.max_draft + 1
    eos = eos_ids(target, eos_token_id)
    state = DecodeState.of(target, prompts, capacity, max_new_tokens, sampling, generator, eos)
    state.control = control
    trace = Trace() if trace is None else trace
    rule = ByText(state) if control is not None and control.alters else drafter.rule(sampling)
    clock = Clock(target.device)
    start(state, drafter)
    clock.lap()
    _notify(state, on_tokens, state.prompt_lengths)
    try:
        while not all(state.finished):
            before = [len(row) for row in state.tokens]
            trace.steps.extend(step(state, drafter, rule, clock.lap))
            _notify(state, on_tokens, before)
    finally:  # ``on_tokens`` may have had enough
        tell_rest(state, drafter)
    trace.read(clock)
    return _result(state, trace)


def step(state: DecodeState, drafter: "Drafter", rule: Rule, lap: Callable[[], object] = lambda: None) -> list[Step]:
    """One step of the loop; what each batch row did. A cascade runs these with a draft model as target, untimed.

    ``lap`` is called when the draft is there, when it is verified, and at the end.
    """
    _ = state.roots  # copied before drafting is queued: copied after, it would wait for all of it
    rests = state.resting > 0
    draft = state.nothing if rests else drafter.propose(state)
    lap()
    see = draft.ancestors()
    output, logits = _forward(state, drafter, draft, see)
    if not rests:
        drafter.while_verifying(state, draft, output)
    proposed, see = draft.proposed(see)
    verdict = rule(proposed, logits, see, state.sampling, state.generator)
    lap()
    steps = _commit(state, draft, verdict)
    state.steps += 1
    state.resting, state.rested = state.resting - rests, state.rested + rests
    if state.rested and (not state.resting or state.ended_by(verdict)):
        tell_rest(state, drafter)
    if not all(state.finished):
        _look_back(state, drafter, draft, output, verdict, rests)
    lap()
    return steps


def tell_rest(state: DecodeState, drafter: "Drafter") -> None:
    """Tell the drafter of the steps that it has rested, if there are any that it has not been told of."""
    if state.rested:
        drafter.rest(state.rested)
        state.rested = 0


def _look_back(
    state: DecodeState, drafter: "Drafter", draft: DraftTree, output: FeatureOutput, verdict: Verdict, rests: bool
) -> None:
    """Let the drafter learn what was committed; if it has drafted nothing, and will not soon, it rests."""
    if rests and not state.ended_by(verdict):  # by which the batch waits for others
        drafter.follow(state, output, verdict)
        return
    drafter.observe(state, draft, output, verdict)
    if not rests:
        state.resting = 0 if draft.size else drafter.may_rest()


def _forward(state: DecodeState, drafter: "Drafter", draft: DraftTree, see: Tensor) -> tuple[FeatureOutput, Tensor]:
    """One target forward over [root, nodes]; a chain needs no explicit mask or positions."""
    rows = CHAIN if draft.is_chain else Rows(see, draft.depths(see))
    given = draft.hidden
    if given is None:
        given = torch.cat([state.roots, draft.tokens], dim=1) if draft.size else state.roots
    output = state.target.run(given, state.cache, rows, start=draft.resume_layer, taps=drafter.taps)
    features, judged = output.features, 1 + draft.size - draft.scratch
    if draft.scratch:
        features = torch.cat([features[:, :judged], features[:, features.shape[1] - draft.scratch_outputs :]], dim=1)
    logits = state.target.lm_head(features)
    output.logits, output.scratch = logits[:, :judged], logits[:, judged:] if draft.scratch else None
    return output, output.logits


def _commit(state: DecodeState, draft: DraftTree, verdict: Verdict) -> list[Step]:
    """Append the accepted tokens and keep the cache rows of all but the last of them."""
    steps = []
    for row in range(state.batch):
        if state.finished[row]:
            verdict.rows[row], verdict.tokens[row] = [], []
            continue
        accepted = len(verdict.rows[row]) - 1
        kept = state.append(row, verdict.tokens[row])
        # The root and the kept draft tokens have rows; the last kept token is the next root. Cut short by EOS or the
        # limit, the last kept one is a draft token, whose row is dropped for the invariant's sake.
        verdict.rows[row], verdict.tokens[row] = verdict.rows[row][:kept], verdict.tokens[row][:kept]
        nodes = draft.size - draft.scratch
        steps.append(Step(row, nodes, verdict.depths[row], accepted, kept, 1 + draft.target_forwards, draft.source))
    state.cache.commit(verdict.rows)
    return steps


def start(state: DecodeState, drafter: "Drafter") -> None:
    """Run the prompts, sample each row's first token, and let the drafter begin."""
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


def until(tokens: Sequence[int], stop: frozenset[int]) -> Sequence[int]:
    """Tokens up to the first in ``stop`` (EOS), that one included."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """``[B, T]`` token ids of rows of unequal length, filled on the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def last_of(values: Tensor, counts: list[int]) -> Tensor:
    """``[B, H]``: of ``values [B, R, H]``, filled on the right, the last of each row's first ``counts[b]``."""
    if counts.count(values.shape[1]) == len(counts):
        return values[:, -1]
    last = torch.tensor(counts, device=values.device) - 1
    return values[torch.arange(len(counts), device=values.device), last]


def rows_of(features: Tensor, rows: list[list[int]]) -> Tensor:
    """Copy ``rows[b]`` of each ``features[b]``: ``[B, R, H]`` -> ``[B, most, H]``, padded on the right."""
    if len(rows) == 1 and rows[0] == [*range(len(rows[0]))]:  # a step without a draft: a third of the time
        return features[:, : len(rows[0])].clone()
    places = padded(rows, features.device)[..., None]
    return features.gather(1, places.expand(-1, -1, features.shape[2]))


def _notify(state: DecodeState, on_tokens: Callable[[int, list[int]], None] | None, before: list[int]) -> None:
    if on_tokens is None:
        return
    for row, start in enumerate(before):
        if len(state.tokens[row]) > start:
            on_tokens(row, state.tokens[row][start:])


def _result(state: DecodeState, trace: Trace) -> GenerateResult:
    new = [row[start:] for row, start in zip(state.tokens, state.prompt_lengths, strict=True)]
    fill = min(state.eos, default=0)
    width = max(len(row) for row in new)
    filled = torch.tensor([row + [fill] * (width - len(row)) for row in new])
    return GenerateResult(filled, [len(row) for row in new], trace)
