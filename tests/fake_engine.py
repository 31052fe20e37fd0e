"""A worker for eval.engines that needs no engine: transformers' greedy tokens, told as steps of a drafter.

Its drafts are two tokens long; of every second one both are accepted, of the others none.
"""

import os
import signal
import stat
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

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        start = time.perf_counter()
        output = self._model.generate(
            self._torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=max_new_tokens,
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

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        if ids[0] == 13:
            print("out of memory", file=sys.stderr)
            os._exit(9)
        if ids[0] == 14:
            raise ValueError("a prompt of\ntwo lines")
        unknown = dict.fromkeys(("commits", "drafted", "accepted"))
        return {"tokens": [seed], "prefill_seconds": 0.1, "decode_seconds": 0.2, **unknown}


def write_garbage() -> None:
    """Where the answers go: the one pipe beside stdin that the process has."""
    (pipe,) = (number for number in range(3, 32) if is_pipe(number))
    os.write(pipe, b"\xff\xfe what is this\n")


def is_pipe(number: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return False


DEATHS = {  # by gamma: on which prompt (the first is that of the start), and how
    91: (4, lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    92: (4, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    93: (4, lambda: time.sleep(1000)),
    94: (4, write_garbage),
    95: (4, lambda: ["no", "answer"]),
    96: (4, lambda: {"tokens": [7], "prefill_seconds": float("nan"), "decode_seconds": 0.1}),
    97: (1, lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    98: (1, lambda: os.kill(os.getpid(), signal.SIGSEGV)),  # unless weights are left as they are
}


class Mortal:
    """Loads nothing, makes two tokens, and ends as its ``gamma`` says; one that is not among ``DEATHS`` lives."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._prompts = 0
        self._last, self._death = DEATHS.get(job["gamma"] if job["repack"] is not False else 0, (0, None))
        self.facts = {"engine": "Mortal", "version": "1", "weights": "Q4"}

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> Any:
        self._prompts += 1
        if self._prompts == self._last and self._death and (found := self._death()):
            return found
        unknown = dict.fromkeys(("commits", "drafted", "accepted"))
        return {"tokens": [7, 7], "prefill_seconds": 0.1, "decode_seconds": 0.1, **unknown}


if __name__ == "__main__":
    serve({"simple": Simple, "mortal": Mortal}.get(os.environ.get("FAKE_ENGINE", ""), Fake))
