"""Other engines as methods of a speed test: each in a process of its own environment."""

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafters import TargetModel
from drafters.common.wording import dtype_name
from drafters.layouts.export import export
from drafters.model.files import resolve_device, resolve_dtype
from eval.configs import EnginesConfig, ParityConfig
from eval.entries import EngineEntry
from eval.measure.engine_worker import Worker, WorkerCrash, WorkerError, question, worker_method
from eval.measure.runs import Limits, Method

SPARE = 16  # positions that an engine may need beyond the last draft
FIRST = 64, 8  # tokens of the first prompt and of its answer, which show that the engine runs


class Engines:
    """The installed engines, each loaded once.

    Args:
        config: the target, ``out`` and ``patience``. entries: the engines.

    Attributes:
        described: facts on each engine for the report's rows, by label.
        facts: ``engines`` by label and ``engines_left_out`` with the reasons, for the report.
    """

    def __init__(
        self,
        config: EnginesConfig | ParityConfig,
        entries: list[EngineEntry],
        stack: contextlib.ExitStack,
        console: Console,
    ) -> None:
        self._config, self._entries, self._stack, self._console = config, entries, stack, console
        self._workers: dict[str, Worker] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {"engines": {}, "engines_left_out": {}}

    def start(self, target: TargetModel, prompts: Sequence[list[int]], limits: Limits) -> None:
        """Load every installed engine, and try it on the first prompt; note the reason for the others."""
        self._vocabulary = target.config.vocab_size
        longest = max(map(len, prompts))
        first = question(prompts[0][: FIRST[0]], limits.seed, 0.0, min(FIRST[1], limits.max_new_tokens))
        for entry in self._entries:
            context = min(longest + limits.max_new_tokens + entry.gamma + SPARE, target.max_context)
            try:
                worker = self._start(entry, self._job(entry, context, limits), first)
            except WorkerError as error:
                self.facts["engines_left_out"][entry.label] = str(error)
                self._console.print(f"left out: {entry.label}: {error}", style="bold", markup=False, highlight=False)
                continue
            worker.facts |= self._fault(entry, worker)
            self._workers[entry.label] = worker
            self.facts["engines"][entry.label] = worker.facts
            row = {"lossless": True, "stock": False, "entry": entry.label, "grid": None, "beside": entry.beside}
            names = [f"{worker.facts['engine']} {worker.facts['version']}", worker.facts.get("weights")]
            self.described[entry.label] = row | {"engine": ", ".join(filter(None, names))}

    def methods(self, temperature: float, limits: Limits) -> Mapping[str, Method]:
        """Return the methods by label."""
        make = partial(worker_method, temperature=temperature, limits=limits, vocabulary=self._vocabulary)
        return {label: make(worker) for label, worker in self._workers.items()}

    def _start(self, entry: EngineEntry, job: dict[str, Any], first: dict[str, Any]) -> Worker:
        """Load an engine and let it make its first tokens; llama.cpp again without repacking if it crashes."""
        if not entry.interpreter.exists():
            how = "see" if entry.engine == "sglang" else "make engines, see"
            raise WorkerError(f"not installed: there is no {entry.interpreter} ({how} docs/engines.md)")
        try:
            return self._tried(entry, job, first, "")
        except WorkerCrash as crash:
            if entry.engine != "llama_cpp" or entry.repack is not None:
                raise
            self._console.print(f"{entry.label}: {crash}; again, without repacked weights", markup=False)
            worker = self._tried(entry, job | {"repack": False}, first, "-without-repacking")
            worker.facts["without"] = "repacked weights, because with them it crashes here"
            return worker

    def _tried(self, entry: EngineEntry, job: dict[str, Any], first: dict[str, Any], suffix: str) -> Worker:
        log = self._config.out / "engines" / f"{'-'.join(entry.label.split())}{suffix}.log"
        self._console.print(f"starting {entry.label} (its log: {log})", markup=False, highlight=False)
        worker = Worker(entry.interpreter, entry.worker, job, log.absolute(), self._config.patience)
        self._stack.enter_context(worker).ask(first)
        return worker

    def _fault(self, entry: EngineEntry, worker: Worker) -> dict[str, str]:
        """Tell a known fault of vLLM, which lowers acceptance; it becomes one of the engine's facts."""
        if (entry.engine, entry.method) != ("vllm", "dflash") or worker.facts.get("device") != "cpu":
            return {}
        layers = json.loads((self._head(entry) / "config.json").read_text())["num_hidden_layers"]
        if layers == 1:
            return {}
        fault = "the first layer's k_norm for the context keys of all layers"
        message = f"{entry.label}: the head has {layers} layers, and vLLM on a CPU takes {fault}, so it accepts less"
        self._console.print(f"{message}; serve a head of one layer, or serve on a GPU", style="bold", markup=False)
        return {"with": fault}

    def _head(self, entry: EngineEntry) -> Path:
        """The folder of the exported head."""
        return self._config.out / "engines" / f"{'-'.join(entry.label.split())}-head"

    def _job(self, entry: EngineEntry, context: int, limits: Limits) -> dict[str, Any]:
        chosen = self._config.target
        drafter = entry.draft_model
        if entry.checkpoint is not None and entry.interpreter.exists():
            folder = self._head(entry)
            shutil.rmtree(folder, ignore_errors=True)  # an earlier run may have exported an older head
            export(entry.checkpoint, entry.engine, folder, chosen.path)
            drafter = str(folder)  # always the same name: vLLM finds its compiled code by it
        options = {"method", "gamma", "min_ngram", "max_ngram", "gguf_type", "repack"}
        return {
            **entry.model_dump(mode="json", include=options),
            "target": _absolute(chosen.path),
            "revision": chosen.revision,
            "dtype": dtype_name(resolve_dtype(chosen.dtype, resolve_device(chosen.device))),
            "drafter": _absolute(drafter),
            "gguf": None if entry.gguf is None else _absolute(str(entry.gguf)),
            "max_context": context,
            "eos": sorted(limits.eos),
            "top_k": limits.top_k,
            "top_p": limits.top_p,
            "threads": torch.get_num_threads(),
        }


def _absolute(name: str | None) -> str | None:
    """Return a local path as absolute, for a process with another working directory; Hub names stay."""
    return name if name is None or not Path(name).exists() else str(Path(name).absolute())
