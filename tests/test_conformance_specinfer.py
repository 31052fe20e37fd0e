"""SpecInfer under the suite: drafts wholly, partly and hardly accepted, of one model and of several."""

import conformance
from rigged import perturbed
from tiny import build

from drafters import TargetModel
from drafters.methods.papers.specinfer import SpecInferDrafter


def mixed(target: TargetModel) -> SpecInferDrafter:
    """Three draft models; one has other weights, another shape and another depth."""
    stranger = TargetModel(build("qwen3", seed=7, num_hidden_layers=2))
    return SpecInferDrafter.from_options(
        target, draft_models=[stranger, perturbed(target, 0.1), perturbed(target, 0.05, seed=3)], gamma=3
    )


TestItself = conformance.brief(
    lambda target: SpecInferDrafter.from_options(target, draft_models=[target, target], gamma=5), accepts="all"
)
TestPerturbed = conformance.suite(
    lambda target: SpecInferDrafter.from_options(
        target, draft_models=[perturbed(target, 0.05), perturbed(target, 0.05, seed=3)], gamma=4
    ),
    accepts="some",
    families=("llama", "mistral-sliding", "mixtral"),
)
TestMixed = conformance.brief(mixed, accepts="some", families=("llama", "mistral"))
TestOne = conformance.brief(
    lambda target: SpecInferDrafter.from_options(target, draft_models=[perturbed(target, 0.05)], gamma=1),
    families=("llama",),
)
