"""SGLang, one prompt at a time: a stream of ``Engine.generate``, whose chunks are the tokens of one step each.

Tested with the arguments of SGLang 0.5.23 and a fake engine; it has not served a head on a GPU (docs/parity.md).
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from eval.engine_workers.protocol import serve

ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK"}
ALGORITHMS |= {"draft_model": "STANDALONE"}
HOT_TOKENS = "hot_token_ids.pt"  # of an exported head with a draft vocabulary
TRIES = 3  # of a prompt whose chunks hold several steps, because this process was late


class SGLang:
    """An engine for one row of the report."""

    def __init__(self, job: dict[str, Any]) -> None:
        import sglang
        import torch

        self._job = job
        self._engine = sglang.Engine(**arguments(job))
        facts = {"weights": job["dtype"], "torch": torch.__version__}
        self.facts = {"engine": "SGLang", "version": sglang.__version__, **facts}

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """See ``protocol.Engine``; SGLang reads no seed of a request in its default mode."""
        job = self._job
        for _ in range(TRIES):
            answer, histogram = self._stream(ids, sampling(job, temperature, max_new_tokens))
            if job["method"] == "plain":
                return answer | {"commits": [1] * len(answer["tokens"]), "drafted": [], "accepted": []}
            accepted = accepted_tokens(answer["commits"], histogram)
            if accepted is not None:
                return answer | {"drafted": [job["gamma"]] * len(accepted), "accepted": accepted}
        raise ValueError(
            f"SGLang sent {sum(histogram)} verifications in {len(answer['commits']) - 1} chunks, in {TRIES} tries, so "
            "the accepted tokens of each step are not known; leave the machine's cores to this run"
        )

    def _stream(self, ids: list[int], settings: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return tokens, times and the tokens of each chunk, and SGLang's histogram of the verifications."""
        tokens: list[int] = []
        commits: list[int] = []
        start = first = time.perf_counter()
        for chunk in self._engine.generate(input_ids=ids, sampling_params=settings, stream=True):
            reason = chunk["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                raise ValueError(f"SGLang refused the prompt: {reason.get('message')}")
            if not tokens:
                first = time.perf_counter()
            commits.append(len(chunk["output_ids"]) - len(tokens))  # a chunk has all tokens up to here
            tokens = list(chunk["output_ids"])
        end = time.perf_counter()
        answer = {"tokens": tokens, "prefill_seconds": first - start, "decode_seconds": end - first, "commits": commits}
        return answer, chunk["meta_info"].get("spec_correct_drafts_histogram", [])


def accepted_tokens(commits: list[int], histogram: list[int]) -> list[int] | None:
    """Return the accepted draft tokens of each verification, in order; None if a chunk holds several steps.

    Args:
        commits: tokens of each chunk, the prefill's first. A verification adds one to the tokens that it accepts.
        histogram: verifications by the number of tokens that they accept, before EOS or the limit cuts the last one.
    """
    whole, counted = [count - 1 for count in commits[1:-1]], Counter(dict(enumerate(histogram)))
    if commits[0] != 1 or len(commits) - 1 != sum(histogram) or not Counter(whole) <= counted:
        return None
    last = list((counted - Counter(whole)).elements())
    return [*whole, *last] if not last or commits[-1] <= last[0] + 1 else None


def sampling(job: dict[str, Any], temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return SGLang's ``SamplingParams``."""
    settings = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    # With ignore_eos SGLang ignores stop_token_ids, too.
    settings |= {"stop_token_ids": job["eos"], "ignore_eos": not job["eos"]}
    return settings | ({"top_k": job["top_k"] or -1, "top_p": job["top_p"]} if temperature > 0 else {})


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's ``ServerArgs``."""
    method, gamma = job["method"], job["gamma"]
    settings = {"model_path": job["target"], "revision": job["revision"], "dtype": job["dtype"]}
    settings |= {"context_length": job["max_context"], "max_running_requests": 1, "random_seed": 0}
    settings |= {"skip_tokenizer_init": True, "log_level": "warning"}
    settings |= {"disable_radix_cache": True}  # every prompt has a complete prefill
    if method == "plain":
        return settings
    settings |= {"speculative_algorithm": ALGORITHMS[method], "speculative_draft_model_path": job["drafter"]}
    if method == "dspark":
        return settings | {"speculative_dspark_block_size": gamma}
    settings |= {"speculative_num_draft_tokens": gamma + 1}  # with the root, or the anchor
    if method in ("dflash", "dflash2"):
        return settings
    if (Path(job["drafter"]) / HOT_TOKENS).exists():
        settings |= {"speculative_token_map": str(Path(job["drafter"]) / HOT_TOKENS)}
    return settings | {"speculative_num_steps": gamma, "speculative_eagle_topk": 1}


if __name__ == "__main__":
    serve(SGLang)
