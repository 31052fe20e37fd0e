"""An engine of another environment as a method: a process of that environment's Python, asked prompt by prompt.

The other end is ``eval.engine_workers``.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from pydantic import AllowInfNan, NonNegativeFloat, NonNegativeInt

from data_prep.common.other_python import start
from drafters.common.wording import shortened
from drafters.config import Config, validate
from drafters.loop.trace import Step, Trace
from eval.measure.runner import Limits, Method, Outcome, check_tokens


class WorkerError(RuntimeError):
    """The worker ended, went silent, or said what is wrong; the message has its own last words and the log's path."""


class WorkerCrash(WorkerError):
    """A signal ended its process, of which the message begins with the name."""


class Worker:
    """A running engine with its model loaded, as a context manager.

    Args:
        python: of the engine's environment. module: the program that it runs. job: what the engine is to do.
        log: where all that the engine prints goes. patience: seconds that it has for loading, and for an answer.

    Attributes:
        facts: what the engine says it is. log: as given.

    Raises (on entering):
        WorkerError: there is no such Python, or the engine cannot be loaded there.
    """

    def __init__(self, python: Path, module: str, job: dict[str, Any], log: Path, patience: float = 900.0) -> None:
        self._python, self._module, self._job, self.log, self._patience = python, module, job, log, patience
        self.facts: dict[str, Any] = {}
        self._failure: WorkerError | None = None
        self._late = False
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._process = start(self._python, self._module, self.log)
        except OSError as error:
            raise WorkerError(f"{self._python} cannot be started ({error.strerror})") from None
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
            self._kill()
            self._process.wait()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            WorkerError: there is none in time, or it is an error. The process is ended then, and whatever is asked
                later has the same error.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._answer(json.dumps(question) + "\n")
        except WorkerError as error:
            raise self.give_up(error) from None

    def give_up(self, error: WorkerError) -> WorkerError:
        """End the process, of which nothing can be expected any more; returns what every later question raises."""
        self._failure = error
        self._kill()
        self.close()
        return error

    def _answer(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._patience, self._stop)
        timer.start()
        try:
            self._process.stdin.write(question)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            raise self._ended()
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise WorkerError(f"the engine answered {shortened(answer)}, no JSON object; {self._last_words()}")
        if "error" in found:
            raise WorkerError(f"{' '.join(str(found['error']).split())} (see {self.log})")
        return found

    def _stop(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        """End the process and all that it started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> WorkerError:
        """What to say of a process that gave no answer."""
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            status = None  # it closed its output and lives on
        if self._late:
            said = f"no answer of the engine's within {self._patience:g} seconds, and its process was ended"
        elif status is not None and status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            return WorkerCrash(f"{name} ended the engine's process; {self._last_words()}")
        else:
            said = f"the engine's process ended without an answer{'' if status is None else f' (status {status})'}"
        return WorkerError(f"{said}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the end of {self.log}: {lines[-1].strip()}" if lines else f"{self.log} is empty"


Seconds = Annotated[NonNegativeFloat, AllowInfNan(False)]


class Answer(Config):
    """A worker's answer to a prompt: ``eval.engine_workers.protocol`` has what it means."""

    tokens: list[NonNegativeInt]
    prefill_seconds: Seconds
    decode_seconds: Seconds
    commits: list[NonNegativeInt] | None
    drafted: list[NonNegativeInt] | None
    accepted: list[NonNegativeInt] | None


def worker_method(worker: Worker, temperature: float, limits: Limits, vocabulary: int) -> Method:
    """Decode in the worker's engine. Whatever goes wrong there is the outcome's ``failure``: others go on.

    Args:
        vocabulary: number of the target's tokens.
    """

    def decode(prompts: list[list[int]], seed: int, most: int = limits.max_new_tokens) -> Outcome:
        (ids,) = prompts
        try:
            made = worker.ask(question(ids, seed, temperature, most))
            try:
                outcome = _outcome(validate(Answer, made, "the engine's answer"), vocabulary)
                check_tokens(outcome, replace(limits, max_new_tokens=most))
            except ValueError as error:
                raise worker.give_up(WorkerError(f"{error} (see {worker.log})")) from None
        except WorkerError as error:
            return Outcome([], 0.0, 0.0, failure=str(error))
        return outcome

    return decode


def question(ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """A prompt, as ``eval.engine_workers.protocol`` has it."""
    return {"ids": ids, "seed": seed, "temperature": temperature, "max_new_tokens": max_new_tokens}


def _outcome(made: Answer, vocabulary: int) -> Outcome:
    if made.tokens and max(made.tokens) >= vocabulary:
        raise ValueError(f"token {max(made.tokens)}, and the target has {vocabulary:,}")
    times = made.prefill_seconds, made.decode_seconds
    if made.commits is None:
        return Outcome(made.tokens, *times)
    if sum(made.commits) != len(made.tokens):
        raise ValueError(f"the engine's steps gave {sum(made.commits)} tokens, its output has {len(made.tokens)}")
    known = made.drafted is not None and made.accepted is not None
    steps = steps_of(made.commits[1:], made.drafted or [], made.accepted or []) if known else None
    trace = None if steps is None else Trace(steps, prefill_seconds=times[0])
    return Outcome(made.tokens, *times, trace, first_tokens=(made.commits or [0])[0])


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
