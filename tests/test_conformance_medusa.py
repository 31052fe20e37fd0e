"""Medusa under the suite: chain, trees and changing shapes, with an oracle's heads, noisy and random ones."""

import conformance
from rigged import Cycling, medusa

from drafters import TargetModel
from drafters.methods.medusa import MedusaDrafter


def changing(target: TargetModel) -> MedusaDrafter:
    drafter = medusa(target, 0.3, "auto")
    drafter.policy = Cycling()
    return drafter


TestChainAll = conformance.brief(lambda t: medusa(t, 0.0, "chain"), accepts="all", families=("llama", "qwen3"))
TestStaticSome = conformance.suite(lambda t: medusa(t, 0.4, "static", nodes=12, layers=2), accepts="some")
TestOwnLMHeads = conformance.brief(lambda t: medusa(t, None, "static", own_lm_heads=True), families=("mixtral",))
TestChanging = conformance.brief(changing, accepts="some", families=("llama", "mistral-sliding"))
TestTypical = conformance.suite(
    lambda t: medusa(t, 0.4, "static", nodes=12, accept="typical"), accepts="some", families=("llama",)
)
