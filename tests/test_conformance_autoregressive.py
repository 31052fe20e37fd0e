"""Plain decoding under the suite: the baseline of every speedup must itself be right."""

import conformance
import tiny

from drafters.methods.autoregressive import AutoregressiveDrafter

TestAutoregressive = conformance.suite(
    AutoregressiveDrafter.from_options, accepts="none", families=tiny.FAMILIES, longest_draft=0
)
