"""vLLM's process, from the dump's side: started once, then given the missing shards of one split after another."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from data_prep.common.other_python import start
from data_prep.dialogues.encoding import EncodedSplit
from data_prep.extraction.job import Job
from data_prep.store.manifest import StoreManifest

WORKER = "data_prep.extraction.worker"


class VLLM:
    """vLLM with the target loaded, as a context manager; raises ValueError on entering if it cannot be started.

    Args:
        settings: keywords of ``vllm.LLM``, and ``layers``: the hidden states to keep, as numbers of layers before them.
        folder: for jobs and log; shared by all machines that vLLM uses.
    """

    def __init__(self, python: Path, settings: dict[str, Any], folder: Path) -> None:
        self._python, self._settings, self._folder = python, settings, folder
        self.log = folder / "vllm.log"
        self._jobs = 0
        self._process: subprocess.Popen[str]
        self._stdin: IO[str]
        self._stdout: IO[str]

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._process = start(self._python.absolute(), WORKER, self.log)
        except OSError as error:
            raise ValueError(f"vllm.python: {self._python} cannot be started ({error.strerror})") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        try:
            self._say(self._settings)
            self._hear("loaded")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end()
        if error is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def write(
        self,
        store: Path,
        header: StoreManifest,
        spans: list[tuple[int, int, int]],
        split: EncodedSplit,
        progress: Callable[[int], object],
    ) -> None:
        """Let vLLM write shards of a store whose lock the caller holds; ``progress`` gets numbers of tokens.

        Raises ValueError if vLLM fails; finished shards stay.
        """
        self._jobs += 1
        job = (self._folder / f"job-{self._jobs}").absolute()  # a new name, because the connector caches jobs
        shutil.rmtree(job, ignore_errors=True)
        Job.write(job, store, header, spans, split)
        self._say(str(job))
        self._hear("done", progress)
        shutil.rmtree(job)

    def _say(self, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # ``_hear`` reports why it ended
            self._stdin.write(json.dumps(value) + "\n")
            self._stdin.flush()

    def _hear(self, last: str, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Read messages up to one with the key ``last``."""
        for line in self._stdout:
            told = json.loads(line)
            if "error" in told:
                raise ValueError(f"vLLM: {told['error']} (its log: {self.log})")
            if last in told:
                return
            progress(told["tokens"])
        status = self._process.wait()
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = f"; the end of its log: {lines[-1].strip()}" if lines else ""
        raise ValueError(f"vLLM ended (status {status}){said} ({self.log})")

    def _end(self) -> None:
        """End the process and its session."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdout.close()
