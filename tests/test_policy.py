"""Policy: the conformance suite with drafts of changing shape, and the choice by hand."""

import conformance
from rigged import Cycling, auto_eagle, by_length, perturbed

TestEagleAuto = conformance.suite(lambda t: auto_eagle(t, 0.4), accepts="some", longest_draft=8, remembers=True)
TestEagleCycling = conformance.suite(lambda t: auto_eagle(t, 0.4, Cycling()), families=("llama",), remembers=True)
TestSpeculativeAuto = conformance.suite(
    lambda t: by_length("speculative", t, draft_model=perturbed(t, 0.05)), accepts="some", longest_draft=12,
    remembers=True, families=("llama",),
)  # fmt: skip
