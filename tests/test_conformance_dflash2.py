"""DFlash2 under the suite: the selector's chains, trees path by path and auto, truncated chains, a random head."""

import conformance
from rigged import block_costs, dflash2, goes_by

TestChainSome = conformance.brief(lambda t: dflash2(t, 0.1, "chain"), accepts="some", families=("llama", "mixtral"))
TestTreeSome = conformance.suite(
    lambda t: dflash2(t, 0.2, "tree", nodes=12, top_k=3, mask_embedding=True),
    accepts="some",
    families=("llama", "mistral-sliding"),
)
TestAuto = conformance.brief(lambda t: goes_by(dflash2(t, 0.2, "auto")), accepts="some", families=("llama",))
TestTruncated = conformance.brief(lambda t: block_costs(dflash2(t, 0.1, "chain", truncate=True)), families=("llama",))
TestRandom = conformance.brief(lambda t: dflash2(t, None, "tree", sliding_window=6), families=("llama",))
