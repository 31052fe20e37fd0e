"""EAGLE-3 under the suite: each tree, `auto`, a hybrid, a draft vocabulary, noise, and random heads with every norm."""

import conformance
import tiny
from rigged import eagle3, goes_by
from test_hybrid import hybrid

NEWER = {"fc_norm": True, "norm_output": True, "layer": "qwen3", "layers": 2}
KEPT = tiny.VOCAB_SIZE * 9 // 10

TestChainAll = conformance.brief(lambda t: eagle3(t, 0.0, "chain", depth=5), accepts="all", families=("llama", "qwen3"))
TestStaticSome = conformance.brief(lambda t: eagle3(t, 0.4, "static", **NEWER), accepts="some", families=("llama",))
TestDynamicSome = conformance.suite(
    lambda t: eagle3(t, 0.4, "dynamic", kept=KEPT, top_k=4, nodes=12, depth=5),
    accepts="some",
    families=("mistral-sliding",),
)
TestWindow = conformance.brief(
    lambda t: eagle3(t, None, "static", sliding_window=3, layers=2), families=("llama", "mistral-sliding")
)
TestAuto = conformance.brief(lambda t: goes_by(eagle3(t, 0.4, "auto", **NEWER)), accepts="some", families=("llama",))
TestHybrid = conformance.brief(
    lambda t: hybrid(t, goes_by(eagle3(t, 0.4, "auto", kept=KEPT))), accepts="some", longest_draft=8,
    families=("llama",),
)  # fmt: skip
TestDynamicRandomHead = conformance.brief(lambda t: eagle3(t, None, "dynamic", **NEWER), families=("llama",))
