"""An engine of another environment as a method: a process of that environment's Python, asked prompt by prompt.

The other end is ``eval.engine_workers``.
"""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drafters.decoding.trace import Step, Trace
from eval.measure.runner import Limits, Method, Outcome

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """The worker ended, or said what is wrong; the message is its own last words."""


class Worker:
    """A running engine with its model loaded, as a context manager.

    Args:
        python: of the engine's environment. module: the program that it runs. job: what the engine is to do.
        log: where all that the engine prints goes.

    Attributes:
        facts: what the engine says it is.

    Raises (on entering):
        WorkerError: there is no such Python, or the engine cannot be loaded there.
    """

    def __init__(self, python: Path, module: str, job: dict[str, Any], log: Path) -> None:
        self._words, self._job, self._log = [str(python), "-m", module], job, log
        self.facts: dict[str, Any] = {}
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        # Nothing of this environment's: the workers import the standard library and the engine alone.
        path = os.pathsep.join([str(Path(self._words[0]).absolute().parent), os.environ.get("PATH", "")])
        env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONNOUSERSITE": "1"}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        pipe = subprocess.PIPE
        try:
            with self._log.open("w", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    self._words, stdin=pipe, stdout=pipe, stderr=log, env=env, text=True, start_new_session=True
                )
        except OSError as error:
            raise WorkerError(f"{self._words[0]} cannot be started ({error.strerror})") from None
        try:
            self.facts = self.ask(self._job)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it ends by itself where its input does."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # the process is gone, and a line to it was not sent
                    stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            WorkerError: there is none, or it is an error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        try:
            found = json.loads(answer)
        except ValueError:
            raise WorkerError(f"the engine's process ended without an answer; {self._last_words()}") from None
        if not isinstance(found, dict) or "error" in found:
            said = " ".join(str(found["error"] if isinstance(found, dict) else found).split())
            raise WorkerError(f"{said} (see {self._log})")
        return found

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the end of {self._log}: {lines[-1].strip()}" if lines else f"{self._log} is empty"


def worker_method(worker: Worker, temperature: float, limits: Limits) -> Method:
    """Decode in the worker's engine."""

    def decode(ids: list[int], seed: int) -> Outcome:
        made = worker.ask({"ids": ids, "seed": seed, "temperature": temperature})
        tokens, commits = made["tokens"], made["commits"]
        times = made["prefill_seconds"], made["decode_seconds"]
        if commits is None:
            return Outcome(tokens, *times)
        if sum(commits) != len(tokens):
            raise ValueError(f"the engine's steps gave {sum(commits)} tokens, its output has {len(tokens)}")
        steps = None if made["drafted"] is None else steps_of(commits[1:], made["drafted"], made["accepted"])
        trace = None if steps is None else Trace(steps, prefill_seconds=times[0])
        return Outcome(tokens, *times, trace, first_tokens=commits[0])

    return decode


def steps_of(commits: list[int], drafted: list[int], accepted: list[int]) -> list[Step]:
    """An engine's steps, from what each committed and what each verification drafted and accepted.

    A step without a draft commits one token and tells of no verification. Which of several that commit one had a draft
    that failed, and which had none, changes no figure; the first is taken to be the one with it.

    Raises:
        ValueError: the two do not fit.
    """
    verified = list(zip(drafted, accepted, strict=True))
    steps = []
    for number, committed in enumerate(commits):
        last = number == len(commits) - 1  # which EOS or the limit may have cut
        fits = bool(verified) and (committed == verified[0][1] + 1 or (last and committed <= verified[0][1]))
        if not fits and committed > 1:
            raise ValueError(f"step {number} gave {committed} tokens, and no verification accepted so many")
        depth, kept = verified.pop(0) if fits else (0, 0)
        steps.append(Step(0, depth, depth, kept, committed))
    if verified:
        raise ValueError(f"{len(verified)} verifications belong to no step")
    return steps
