"""A server's own counters at /metrics, in Prometheus' text form: what vLLM and SGLang say of drafts.

Names: vLLM 0.32 (vllm/v1/spec_decode/metrics.py, vllm/v1/metrics/loggers.py) and SGLang 0.5.23
(sglang/srt/observability/metrics_collector.py; served with --enable-metrics).
"""

import re
from collections import defaultdict
from collections.abc import Mapping

NAMES = (
    "spec_decode_num_(?:drafts|draft_tokens|accepted_tokens)|prefix_cache_(?:queries|hits)"  # vLLM
    "|spec_verify_calls|num_requests|cached_tokens|(?:prompt|generation)_tokens"  # SGLang; the last two are vLLM's, too
)
LINE = re.compile(rf"^(?:vllm|sglang):({NAMES})_total(?:\{{.*\}})? ([-+0-9.eE]+)(?: \d+)?$", re.MULTILINE)


def read_counters(text: str) -> dict[str, float]:
    """Return an engine's counters by name, without prefix and ``_total``, each summed over its labels."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in LINE.findall(text):
        sums[name] += float(value)
    return dict(sums)


def speculation(gains: Mapping[str, float]) -> dict[str, float | None]:
    """Return what the counters gained as ``tau``, ``drafted`` and ``cached``; None: the server has no such counter.

    tau: tokens committed per verification, bonus token included. SGLang counts requests at their end, and their first
    token comes from the prefill. drafted: tokens of a draft. cached: share of prompt tokens from the prefix cache.
    """

    def share(above: float, below: str) -> float | None:
        return above / gains[below] if gains.get(below) else None

    of = defaultdict(float, gains)
    accepted = share(of["spec_decode_num_accepted_tokens"], "spec_decode_num_drafts")
    verified = share(of["generation_tokens"] - of["num_requests"], "spec_verify_calls")
    hits = share(of["prefix_cache_hits"], "prefix_cache_queries")
    return {
        "tau": verified if accepted is None else 1 + accepted,
        "drafted": share(of["spec_decode_num_draft_tokens"], "spec_decode_num_drafts"),
        "cached": share(of["cached_tokens"], "prompt_tokens") if hits is None else hits,
    }
