"""SpecTr under the suite: one chain where greedy, several where drafts have a temperature of their own."""

import conformance
from rigged import perturbed
from tiny import build

from drafters import TargetModel
from drafters.methods.papers.spectr import SpecTrDrafter


def stranger(target: TargetModel) -> SpecTrDrafter:
    """A draft model of other weights, shape and depth, and a sliding window."""
    draft_model = TargetModel(build("mistral-sliding", seed=7, num_hidden_layers=2))
    return SpecTrDrafter.from_options(target, draft_model=draft_model, gamma=3, drafts=4, draft_temperature=1.0)


TestItself = conformance.brief(
    lambda target: SpecTrDrafter.from_options(target, draft_model=target, gamma=5, drafts=3), accepts="all"
)
TestItselfSampled = conformance.brief(
    lambda target: SpecTrDrafter.from_options(target, draft_model=target, gamma=4, drafts=3, draft_temperature=0.3),
    accepts="some",
)
TestPerturbed = conformance.suite(
    lambda target: SpecTrDrafter.from_options(
        target, draft_model=perturbed(target, 0.05), gamma=4, drafts=3, draft_temperature=0.5
    ),
    accepts="some",
    families=("llama", "mistral-sliding"),
)
TestStranger = conformance.brief(stranger, families=("mistral", "mixtral"))
