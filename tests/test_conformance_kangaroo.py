"""Kangaroo under the suite: exit states that tell the output exactly, roughly and not at all; both early exits."""

import conformance
from rigged import kangaroo, quiet_depths

TestAll = conformance.suite(
    lambda t: kangaroo(t, True, eta=0.0), accepts="all", build=quiet_depths(0.0), families=("llama", "qwen3")
)
TestSome = conformance.suite(lambda t: kangaroo(t, True, eta=0.0), accepts="some", build=quiet_depths(0.1))
TestEarlyExit = conformance.suite(
    lambda t: kangaroo(t, True, eta=0.4), build=quiet_depths(0.1), families=("llama", "mistral-sliding")
)
TestRandomAdapter = conformance.suite(lambda t: kangaroo(t, False, eta=0.01), families=("llama",))
