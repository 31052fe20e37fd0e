"""EAGLE under the suite: each tree, with an oracle's features, noisy ones, and those of a random head."""

import conformance
from rigged import eagle

from drafters.config import UNSHIFTED

TestChainAll = conformance.brief(lambda t: eagle(t, 0.0, "chain", depth=5), accepts="all", families=("llama", "qwen3"))
TestChainSome = conformance.brief(lambda t: eagle(t, 0.4, "chain"), accepts="some", families=("mistral-sliding",))
TestStaticSome = conformance.brief(lambda t: eagle(t, 0.4, "static"), accepts="some")
TestDynamicSome = conformance.suite(lambda t: eagle(t, 0.4, "dynamic", top_k=4, nodes=12, depth=5), accepts="some")
TestUnshifted = conformance.brief(lambda t: eagle(t, None, "dynamic", inputs=UNSHIFTED), families=("llama",))
TestTokens = conformance.brief(lambda t: eagle(t, None, "chain", inputs="token"), families=("llama",))
TestFeatures = conformance.brief(lambda t: eagle(t, None, "static", inputs="feature"), families=("llama",))
TestDynamicRandomHead = conformance.brief(lambda t: eagle(t, None, "dynamic"), families=("mixtral",))
