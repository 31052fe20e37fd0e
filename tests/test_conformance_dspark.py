"""DSpark under the suite: each Markov head, chains, trees and auto, truncated chains, and a random head."""

import conformance
import tiny
from rigged import block_costs, dspark, goes_by

KEPT = tiny.VOCAB_SIZE * 9 // 10

TestChainSome = conformance.suite(lambda t: dspark(t, 0.1, "chain"), accepts="some", families=("llama", "mixtral"))
TestChainRnn = conformance.brief(
    lambda t: dspark(t, 0.1, "chain", "fill-in", markov_head="rnn", draft_vocab_size=KEPT),
    accepts="some",
    families=("llama",),
)
TestTreeSome = conformance.brief(
    lambda t: dspark(t, 0.2, "tree", nodes=12, top_k=3, markov_head="rnn"),
    accepts="some",
    families=("llama", "mistral-sliding"),
)
TestAuto = conformance.brief(
    lambda t: goes_by(dspark(t, 0.2, "auto", markov_head="gated")), accepts="some", families=("llama",)
)
TestTruncated = conformance.brief(lambda t: block_costs(dspark(t, 0.1, "chain", truncate=True)), families=("llama",))
TestTruncatedByMaxQ = conformance.brief(
    lambda t: block_costs(dspark(t, 0.1, "chain", truncate=True, confidence_head=False)), families=("llama",)
)
