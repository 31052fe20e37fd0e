"""DFlash under the suite: both layouts, chains, trees and auto, an oracle with a draft vocabulary, and random heads."""

import conformance
import tiny
from rigged import Cycling, dflash, goes_by

KEPT = tiny.VOCAB_SIZE * 9 // 10


def cycling(target: conformance.TargetModel) -> conformance.Drafter:
    """An oracle whose drafts change shape every step, no draft included."""
    drafter = dflash(target, 0.3, "auto")
    drafter.policy = Cycling()
    return drafter


TestChainAll = conformance.brief(lambda t: dflash(t, 0.0, "chain"), accepts="all", families=("llama", "qwen3"))
TestChainSome = conformance.brief(
    lambda t: dflash(t, 0.3, "chain", "anchor-first", draft_vocab_size=KEPT), accepts="some", families=("mixtral",)
)
TestChainRandomHead = conformance.brief(
    lambda t: dflash(t, None, "chain", causal=True, layer="llama"), families=("llama",)
)
TestTreeSome = conformance.suite(
    lambda t: dflash(t, 0.3, "tree", nodes=12, top_k=4), accepts="some", families=("llama", "mistral-sliding")
)
TestTreeRandomHead = conformance.brief(
    lambda t: dflash(t, None, "tree", "anchor-first", nodes=20, draft_vocab_size=KEPT), families=("llama",)
)
TestAuto = conformance.brief(lambda t: goes_by(dflash(t, 0.3, "auto")), accepts="some", families=("llama",))
TestCycling = conformance.brief(cycling, families=("llama",))
