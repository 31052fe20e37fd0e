"""Lookahead under the suite: as it is, with a pool that knows the answer, and inside a cascade."""

import conformance
from rigged import perturbed

from drafters import Drafter, FeatureOutput, TargetModel, make_drafter
from drafters.loop.state import DecodeState
from drafters.methods.papers.cascade import CascadeDrafter
from drafters.methods.papers.lookahead import LookaheadDrafter


class Primed(LookaheadDrafter):
    """Its pool begins with the answer's n-grams, and with wrong ones of the same first tokens that count as newer."""

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        prompt = state.tokens[0][: state.prompt_lengths[0]]
        answer = prompt[-1:] + conformance.plain_greedy(self.target, prompt, 40)
        for at in range(len(answer) - 1):
            tail = answer[at + 1 : at + 1 + self.pool.tail]
            self.pool.add(answer[at], tail)
            self.pool.add(answer[at], [*tail[:1], *((token + 1) % 90 for token in tail[1:])])


def in_cascade(target: TargetModel) -> Drafter:
    draft_model = perturbed(target, 0.05)
    inner = Primed.from_options(draft_model, window=2, ngram=3, guesses=2, from_output=True)
    return CascadeDrafter.from_options(target, draft_model=draft_model, inner=inner, gamma=4)


TestLookahead = conformance.brief(
    lambda target: make_drafter("lookahead", target), families=("llama", "qwen3"), longest_draft=2
)
TestPrimed = conformance.suite(
    lambda target: Primed.from_options(target, window=3, ngram=4, guesses=2), accepts="some", longest_draft=3
)
TestInCascade = conformance.brief(in_cascade, accepts="some", families=("llama",), longest_draft=6)
