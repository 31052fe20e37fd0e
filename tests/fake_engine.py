"""A worker for eval.engines that needs no engine: transformers' greedy tokens, told as steps of a drafter.

Its drafts are two tokens long; of every second one both are accepted, of the others none.
"""

import os
import sys
import time
from typing import Any

from eval.engine_workers.protocol import serve


class Fake:
    def __init__(self, job: dict[str, Any]) -> None:
        print("an engine prints on stdout")  # which must not reach the answers
        os.write(1, b"as do libraries in C\n")
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._job = torch, job
        self._model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["dtype"]))
        self.facts = {"engine": "Fake", "version": "1.0", "context": job["max_context"], "drafter": job["drafter"]}

    def decode(self, ids: list[int], seed: int, temperature: float) -> dict[str, Any]:
        start = time.perf_counter()
        output = self._model.generate(
            self._torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=self._job["max_new_tokens"],
            eos_token_id=self._job["eos"] or None,
            pad_token_id=0,
        )
        tokens = output[0, len(ids) :].tolist()
        seconds = (time.perf_counter() - start) / 2
        commits, accepted = [1], []
        while sum(commits) < len(tokens):
            accepted.append(2 * (len(accepted) % 2))
            commits.append(min(accepted[-1] + 1, len(tokens) - sum(commits)))
        times = {"prefill_seconds": seconds, "decode_seconds": seconds}
        drafts = {"commits": commits, "drafted": [2] * len(accepted), "accepted": accepted}
        return {"tokens": tokens, **times, **drafts}


class Simple:
    """Loads nothing. A prompt that begins with 13 ends it; one with 14 is refused."""

    def __init__(self, job: dict[str, Any]) -> None:
        if job.get("fails"):
            raise ModuleNotFoundError("No module named 'engine'")
        self.facts = {"engine": "Simple", "version": "0", "path": sys.path[1]}

    def decode(self, ids: list[int], seed: int, temperature: float) -> dict[str, Any]:
        if ids[0] == 13:
            print("out of memory", file=sys.stderr)
            os._exit(9)
        if ids[0] == 14:
            raise ValueError("a prompt of\ntwo lines")
        unknown = dict.fromkeys(("commits", "drafted", "accepted"))
        return {"tokens": [seed], "prefill_seconds": 0.1, "decode_seconds": 0.2, **unknown}


if __name__ == "__main__":
    serve(Simple if os.environ.get("FAKE_ENGINE") == "simple" else Fake)
