"""Speculative decoding under the suite: drafts wholly, partly and never accepted."""

import conformance
from rigged import perturbed
from tiny import build

from drafters import TargetModel
from drafters.methods.speculative import SpeculativeDrafter


def stranger(target: TargetModel) -> SpeculativeDrafter:
    """A draft model of other weights, shape and depth."""
    return SpeculativeDrafter.from_options(
        target, draft_model=TargetModel(build("qwen3", seed=7, num_hidden_layers=2)), gamma=3
    )


TestItself = conformance.suite(
    lambda target: SpeculativeDrafter.from_options(target, draft_model=target, gamma=5), accepts="all"
)
TestPerturbed = conformance.suite(
    lambda target: SpeculativeDrafter.from_options(target, draft_model=perturbed(target, 0.05), gamma=4),
    accepts="some",
    families=("llama", "mixtral"),
)
TestStranger = conformance.suite(stranger, families=("mistral",))
