"""vLLM, one prompt at a time: as ``LLM.generate``, with the time of the first tokens."""

import os
import time
from typing import Any

from eval.engine_workers.protocol import serve

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process, without messages between steps
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLM:
    """An engine for one row of the report."""

    def __init__(self, job: dict[str, Any]) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        import torch
        import vllm

        self._vllm = vllm
        self._job = job
        options: dict[str, Any] = {}
        if speculative := speculation(job):
            # Report drafted and accepted tokens of every verification.
            options = {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
        self._drafts = bool(options)
        self._engine = vllm.LLM(
            model=job["target"],
            revision=job["revision"],
            dtype=job["dtype"],
            max_model_len=job["max_context"],
            max_num_seqs=1,
            enable_prefix_caching=False,  # every prompt has a complete prefill
            seed=0,
            **options,
        ).llm_engine
        self._prompts = 0
        facts = {"weights": job["dtype"], "torch": torch.__version__, "threads": torch.get_num_threads()}
        facts |= {"device": vllm.platforms.current_platform.device_type}
        self.facts = {"engine": "vLLM", "version": vllm.__version__, **facts}

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """See ``protocol.Engine``."""
        engine, job = self._engine, self._job
        sampled = {"top_k": job["top_k"], "top_p": job["top_p"], "seed": seed} if temperature > 0 else {}
        settings = self._vllm.SamplingParams(
            temperature=temperature,
            max_tokens=max_new_tokens,
            ignore_eos=True,  # the model's own; the run's are in stop_token_ids
            stop_token_ids=job["eos"],
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            **sampled,
        )
        self._prompts += 1
        tokens: list[int] = []
        commits: list[int] = []
        verified: Any = None
        start = first = time.perf_counter()
        engine.add_request(str(self._prompts), {"prompt_token_ids": ids}, settings)
        while engine.has_unfinished_requests():
            for output in engine.step():
                chunk = output.outputs[0]
                if chunk.token_ids:
                    if not tokens:
                        first = time.perf_counter()
                    tokens += chunk.token_ids
                    commits.append(len(chunk.token_ids))
                verified = getattr(chunk, "spec_decode_metrics", None) or verified
        end = time.perf_counter()
        answer = {"tokens": tokens, "prefill_seconds": first - start, "decode_seconds": end - first, "commits": commits}
        if verified is None:
            unknown: list[int] | None = None if self._drafts and len(commits) > 1 else []
            return answer | {"drafted": unknown, "accepted": unknown}
        return answer | {"drafted": verified.per_step_drafted, "accepted": verified.per_step_accepted}


def speculation(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config`` for a method; None for plain decoding."""
    method, tokens = job["method"], {"num_speculative_tokens": job["gamma"]}
    if method == "plain":
        return None
    if method == "prompt_lookup":
        ngrams = {"prompt_lookup_min": job["min_ngram"], "prompt_lookup_max": job["max_ngram"]}
        return {"method": "ngram", **tokens, **ngrams}
    return {"method": method, "model": job["drafter"], **tokens}


if __name__ == "__main__":
    serve(VLLM)
