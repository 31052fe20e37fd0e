"""Targets with a running state under the suite: gated DeltaNet beside full attention, and Mamba 2 in hybrid layers."""

from functools import partial

import conformance
from families import DECODED, build
from rigged import eagle, perturbed
from transformers import PreTrainedModel

from drafters import make_drafter
from drafters.methods.speculative import SpeculativeDrafter


def running(model: str, family: str) -> PreTrainedModel:
    """The model, whatever the family that a test asks for."""
    return build(model, DECODED[model] | {"initializer_range": 0.3})


DELTA, HYBRID = partial(running, "qwen3_5_text"), partial(running, "falcon_h1")
LLAMA = ("llama",)

TestPlain = conformance.brief(lambda t: make_drafter("autoregressive", t), build=DELTA, families=LLAMA)
TestPlainHybrid = conformance.brief(lambda t: make_drafter("autoregressive", t), build=HYBRID, families=LLAMA)
TestLookup = conformance.brief(
    lambda t: make_drafter("prompt_lookup", t), build=DELTA, families=LLAMA, longest_draft=10
)
TestDraftModel = conformance.suite(
    lambda t: SpeculativeDrafter.from_options(t, draft_model=perturbed(t, 0.02), gamma=4),
    build=DELTA,
    families=LLAMA,
    accepts="some",
)
TestDraftModelHybrid = conformance.brief(
    lambda t: SpeculativeDrafter.from_options(t, draft_model=perturbed(t, 0.02), gamma=4),
    build=HYBRID,
    families=LLAMA,
    accepts="some",
)
TestChain = conformance.brief(lambda t: eagle(t, 0.2, "chain", depth=4), build=DELTA, families=LLAMA, accepts="some")
TestChainHybrid = conformance.brief(
    lambda t: eagle(t, 0.0, "chain", depth=4), build=HYBRID, families=LLAMA, accepts="all"
)
TestLookupHybrid = conformance.brief(
    lambda t: make_drafter("prompt_lookup", t), build=HYBRID, families=LLAMA, longest_draft=10
)
