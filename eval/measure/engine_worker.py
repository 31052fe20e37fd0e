"""An engine of another environment as a method: a process of that environment's Python that answers prompt by prompt.

``eval.engine_workers`` is the other end.
"""

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AllowInfNan, NonNegativeFloat, NonNegativeInt

from data_prep.common.other_python import OtherPython
from drafters.common.wording import shortened
from drafters.config import Config, validate
from drafters.loop.generate import Step, Trace
from eval.measure.runs import Limits, Method, Outcome, check_tokens


class WorkerError(RuntimeError):
    """The worker ended, was silent too long, or reported an error; the message has the last line of its log."""


class WorkerCrash(WorkerError):
    """A signal ended the process; the message begins with its name."""


class Worker:
    """A running engine with its model loaded, as a context manager; entering may raise WorkerError.

    Args:
        python: Python of the engine's environment. module: the program that it runs. job: model, method and limits.
        log: file of all that the engine prints. patience: seconds for loading, and for each answer.

    Attributes:
        facts: the engine's description of itself.
    """

    def __init__(self, python: Path, module: str, job: dict[str, Any], log: Path, patience: float = 900.0) -> None:
        self._python, self._module, self._job, self.log, self._patience = python, module, job, log, patience
        self.facts: dict[str, Any] = {}
        self._failure: WorkerError | None = None
        self._process: OtherPython

    def __enter__(self) -> Self:
        try:
            self._process = OtherPython(self._python, self._module, self.log)
        except OSError as error:
            raise WorkerError(f"{self._python} cannot be started ({error.strerror})") from None
        try:
            self.facts = self.ask(self._job)
        except BaseException:
            self._process.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._process.close()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one line and return the answer; a WorkerError ends the process, and later calls raise it again."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._answer(question)
        except WorkerError as error:
            raise self.give_up(error) from None

    def give_up(self, error: WorkerError) -> WorkerError:
        """End the process; return the error that every later question raises."""
        self._failure = error
        self._process.kill()
        return error

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._patience, stop)
        timer.start()
        self._process.say(question)
        answer = self._process.hear()
        timer.cancel()
        if not answer.endswith("\n"):
            raise self._ended(late.is_set())
        try:
            reply = json.loads(answer)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            last = self._process.last_line()
            raise WorkerError(f"the engine answered {shortened(answer)}, no JSON object; {last}")
        if "error" in reply:
            raise WorkerError(f"{' '.join(str(reply['error']).split())} (see {self.log})")
        return reply

    def _ended(self, late: bool) -> WorkerError:
        """Return the error of a process that gave no answer."""
        status, last = self._process.status(), self._process.last_line()
        if late:
            return WorkerError(
                f"no answer from the engine in {self._patience:g} seconds, so its process was ended; {last}"
            )
        if status is not None and status < 0:
            return WorkerCrash(f"{signal.Signals(-status).name} ended the engine's process; {last}")
        return WorkerError(f"the engine's process ended without an answer (status {status}); {last}")


Seconds = Annotated[NonNegativeFloat, AllowInfNan(False)]


class Answer(Config):
    """A worker's answer to a prompt, see ``eval.engine_workers.protocol``."""

    tokens: list[NonNegativeInt]
    prefill_seconds: Seconds
    decode_seconds: Seconds
    commits: list[NonNegativeInt] | None
    drafted: list[NonNegativeInt] | None
    accepted: list[NonNegativeInt] | None


def worker_method(worker: Worker, temperature: float, limits: Limits, vocabulary: int) -> Method:
    """Return the method that decodes in the worker's engine; its errors become ``failure``, so that others continue.

    Args:
        vocabulary: number of the target's tokens.
    """

    def decode(prompts: list[list[int]], seed: int, most: int = limits.max_new_tokens) -> Outcome:
        (ids,) = prompts
        try:
            reply = worker.ask(question(ids, seed, temperature, most))
            try:
                outcome = _outcome(validate(Answer, reply, "the engine's answer"), vocabulary)
                check_tokens(outcome, replace(limits, max_new_tokens=most))
            except ValueError as error:
                raise worker.give_up(WorkerError(f"{error} (see {worker.log})")) from None
        except WorkerError as error:
            return Outcome([], 0.0, 0.0, failure=str(error))
        return outcome

    return decode


def question(ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return a prompt in the form of ``eval.engine_workers.protocol``."""
    return {"ids": ids, "seed": seed, "temperature": temperature, "max_new_tokens": max_new_tokens}


def _outcome(answer: Answer, vocabulary: int) -> Outcome:
    if answer.tokens and max(answer.tokens) >= vocabulary:
        raise ValueError(f"token {max(answer.tokens)}, and the target has {vocabulary:,}")
    times = answer.prefill_seconds, answer.decode_seconds
    if answer.commits is None:
        return Outcome(answer.tokens, *times)
    if sum(answer.commits) != len(answer.tokens):
        raise ValueError(f"the engine's steps gave {sum(answer.commits)} tokens, its output has {len(answer.tokens)}")
    trace = None
    if answer.drafted is not None and answer.accepted is not None:
        trace = Trace(steps_of(answer.commits[1:], answer.drafted, answer.accepted), prefill_seconds=times[0])
    return Outcome(answer.tokens, *times, trace, first_tokens=(answer.commits or [0])[0])


def steps_of(commits: list[int], drafted: list[int], accepted: list[int]) -> list[Step]:
    """Return an engine's steps, from the tokens each committed and the drafts of its verifications.

    A step without a draft commits one token and has no verification. Among steps that commit one token, the first ones
    get the rejected drafts; the assignment changes no figure.
    """
    verified = list(zip(drafted, accepted, strict=True))
    steps = []
    for number, committed in enumerate(commits):
        last = number == len(commits) - 1  # EOS or the limit may have cut it
        fits = bool(verified) and (committed == verified[0][1] + 1 or (last and committed <= verified[0][1]))
        if not fits and committed > 1:
            raise ValueError(f"step {number} gave {committed} tokens, more than its verification accepted")
        depth, count = verified.pop(0) if fits else (0, 0)
        steps.append(Step(0, depth, depth, count, committed))
    if verified:
        raise ValueError(f"{len(verified)} verifications belong to no step")
    return steps
