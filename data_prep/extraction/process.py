"""vLLM's process, from the dump's side: started once, then given the missing shards of one split after another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from data_prep.common.other_python import OtherPython
from data_prep.dialogues.encoding import EncodedSplit
from data_prep.extraction.shards import Job
from data_prep.store.manifest import StoreManifest

WORKER = "data_prep.extraction.worker"


class VLLM:
    """vLLM with the target loaded, as a context manager; raises ValueError on entering if it cannot be started.

    Args:
        settings: keywords of ``vllm.LLM``, and ``layers``: the hidden states to keep, as numbers of layers before them.
        folder: folder for jobs and log, shared by all machines that vLLM uses.
    """

    def __init__(self, python: Path, settings: dict[str, Any], folder: Path) -> None:
        self._python, self._settings, self._folder = python, settings, folder
        self._jobs = 0
        self._process: OtherPython

    def __enter__(self) -> Self:
        try:
            self._process = OtherPython(self._python.absolute(), WORKER, self._folder / "vllm.log")
        except OSError as error:
            raise ValueError(f"vllm.python: {self._python} cannot be started ({error.strerror})") from None
        try:
            self._ask(self._settings, "loaded")
        except BaseException:
            self._process.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._process.close()
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
        self._ask(str(job), "done", progress)
        shutil.rmtree(job)

    def _ask(self, question: Any, last: str, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Send ``question`` and read messages up to one with the key ``last``."""
        self._process.say(question)
        while line := self._process.hear():
            message = json.loads(line)
            if "error" in message:
                raise ValueError(f"vLLM: {message['error']} (its log: {self._process.log})")
            if last in message:
                return
            progress(message["tokens"])
        raise ValueError(f"vLLM ended (status {self._process.status()}); {self._process.last_line()}")
