"""Kangaroo under the suite: exit states that tell the output exactly, roughly, not at all; both early exits; trees."""

import conformance
from rigged import kangaroo, quiet_depths

TestAll = conformance.brief(
    lambda t: kangaroo(t, True, eta=0.0), accepts="all", build=quiet_depths(0.0), families=("llama", "qwen3")
)
TestSome = conformance.suite(lambda t: kangaroo(t, True, eta=0.0), accepts="some", build=quiet_depths(0.1))
TestEarlyExit = conformance.brief(
    lambda t: kangaroo(t, True, eta=0.4), build=quiet_depths(0.1), families=("llama", "mistral-sliding")
)
TestRandomAdapter = conformance.brief(lambda t: kangaroo(t, False, eta=0.01), families=("llama",))
TestOwnLMHead = conformance.brief(
    lambda t: kangaroo(t, True, eta=0.0, own_lm_head=True),
    accepts="some",
    build=quiet_depths(0.1),
    families=("mixtral",),
)
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TestTree = conformance.suite(
    lambda t: kangaroo(t, True, eta=0.0, paths=TREE), build=quiet_depths(0.1), families=("llama", "mistral-sliding")
)
TestTreeEarlyExit = conformance.brief(
    lambda t: kangaroo(t, True, eta=0.3, confidence="entropy", paths=TREE), build=quiet_depths(0.1), families=("llama",)
)
