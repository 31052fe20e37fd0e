"""The journal: every run of a report as a line of JSON, from which a killed report resumes."""

import fcntl
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from data_prep.common.ranks import Rank
from data_prep.store.lock import LOCK, is_locked, lock_file
from drafters.base import Expected
from drafters.cli.program import command
from drafters.common.files import naming, replacing
from drafters.loop.generate import Step, Trace
from eval.measure.identity import differing, digest
from eval.measure.models import ALONE
from eval.measure.runs import Run
from eval.prompts.prompts import Prompt

JOURNAL, UNFINISHED = "measurements.jsonl", "measurements.unfinished.*.jsonl"
START = ("date", "load_average")
RUN_FIELDS = (
    "method", "temperature", "round", "tokens", "prefill_seconds", "decode_seconds", "wall_seconds", "first_tokens",
    "energy_joules",
)  # fmt: skip
STEP_FIELDS = ("drafted", "depth", "accepted", "committed", "forwards")
TIME_FIELDS = ("draft_seconds", "verify_seconds", "other_seconds", "model_seconds")
Lines = list[dict[str, Any]]


class RunJournal:
    """The journal of an unfinished report, as a context manager: a line with the environment, then a line per run.

    Its name contains a digest of its identity, so that runs of two identities never meet. A kill may leave half a line
    and a prompt that only some methods have decoded. Both are cut off, because the methods must take turns on a prompt;
    the next start with the same identity resumes after the last complete prompt.

    Args:
        out: the report's folder; created if missing.
        identity: see ``eval.measure.identity``.
        facts: the environment now. Adds ``parts``: date and load average of every start, and the runs it made.
        methods: the labels of all methods at a temperature and a batch size.
        rank: rank among the processes that share the prompts; each writes its own journal until all are done.

    Attributes:
        runs: runs of earlier starts, complete prompts only.
        notes: messages for the user about other journals.

    Raises (on entering):
        ValueError: another process is writing it.
        OSError: it cannot be read or written.
    """

    def __init__(
        self,
        out: Path,
        identity: dict[str, Any],
        facts: dict[str, Any],
        methods: Callable[[float, int], Iterable[str]],
        rank: Rank = ALONE,
    ) -> None:
        shares = [f".{index}-of-{rank.count}" if rank.count > 1 else "" for index in range(rank.count)]
        self._all = [out / UNFINISHED.replace("*", f"{digest(identity)}{share}") for share in shares]
        self.path = self._all[rank.index]
        self._identity, self._facts = identity, facts
        self._methods = functools.cache(lambda temperature, batch: frozenset(methods(temperature, batch)))
        self.runs: list[Run] = []
        self.notes: list[str] = []
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+")
        try:
            lock_file(self.path.parent, self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{self.path} is being written by another process; wait for it, or give another out"
            ) from None
        parts = self._take_over()
        start = {name: self._facts[name] for name in START}
        if parts:
            self._append({"resumed": start})
            self.notes.append(f"resuming after {len(self.runs):,} runs, measured from {parts[0]['date']} on")
        else:
            self._append({"environment": self._facts, "identity": self._identity})
        self._facts["parts"] = [*parts, start]
        self.notes += [_about_other(path, self._identity) for path in self._others()]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._file.close()
        except OSError:  # a full disk again: the first error names the file, this one does not
            if error is None:
                raise
        if not self.runs:
            self.path.unlink(missing_ok=True)

    def write(self, run: Run, *prompts: Prompt) -> None:
        """Append a run of these prompts; OSError (full disk) leaves the runs before."""
        self._append(journal_line(run, *prompts))
        self.runs.append(run)

    def resume_notice(self) -> str:
        """Return what an interrupted run leaves, and the command that resumes it."""
        prompts = Counter((run.temperature, run.batch, run.round, run.prompt) for run in self.runs)
        whole = sum(runs for place, runs in prompts.items() if runs == len(self._methods(*place[:2])))
        progress = (
            f"{whole:,} runs, of complete prompts, are kept in {self.path}" if whole else "no prompt is complete yet"
        )
        return f"{progress}; to resume: {command()}"

    def gather(self) -> bool:
        """Return whether all processes have measured their shares; then ``runs`` has all. Call in ``folder_lock``."""
        self._append({"measured": len(self.runs)})
        if not all(path.is_file() and _complete(path) for path in self._all):
            return False
        self.runs = [run_from_line(line) for line in self._everything() if "method" in line]
        return True

    def _everything(self) -> Lines:
        """Return the lines of all processes: the starts and the runs."""
        lines = [line for path in self._all for line in _lines_of(path)]
        first, *starts = (start for line in lines if (start := line.get("environment") or line.get("resumed")))
        resumptions = [{"resumed": {name: start[name] for name in START}} for start in starts]
        begun = {"environment": first, "identity": self._identity}
        return [begun, *resumptions, *(line for line in lines if "method" in line)]

    def finish(self) -> None:
        """Give the journal its final name, after all files of the report; delete those of other identities."""
        final = self.path.with_name(JOURNAL)
        with naming(self.path), replacing(final) as temporary:
            temporary.write_bytes(b"".join(_encoded(line) for line in self._everything()))
        for path in [*self._all, *(other for other in self._others() if not is_locked(other)), final.with_name(LOCK)]:
            path.unlink(missing_ok=True)
        self.path = final

    def _append(self, line: dict[str, Any]) -> None:
        with naming(self.path):
            self._file.write(_encoded(line))
            self._file.flush()

    def _others(self) -> list[Path]:
        return [path for path in sorted(self.path.parent.glob(UNFINISHED)) if path not in self._all]

    def _take_over(self) -> Lines:
        """Read ``runs``, cut off what follows the last complete prompt, and return every start with its runs."""
        parts: Lines = []
        prompt: list[Run] = []
        end = 0
        for place, line in json_lines(self._file):
            if "measured" in line:
                continue  # written again when this start has come so far
            start = line.get("environment") or line.get("resumed")
            if start is not None:
                parts.append({name: start[name] for name in START} | {"runs": 0})
            else:
                prompt.append(run_from_line(line))
                if {run.method for run in prompt} != self._methods(prompt[0].temperature, prompt[0].batch):
                    continue
                self.runs += prompt
                parts[-1]["runs"] += len(prompt)
                prompt = []
            end = place
        self._file.truncate(end if self.runs else 0)
        return [part for part in parts if part["runs"]]


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def json_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (end position, object) of every line, up to the first that a kill or a full disk left incomplete."""
    file.seek(0)
    end = 0
    for line in file.readlines():
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(value, dict):
            return
        end += len(line)
        yield end, value


def _lines_of(path: Path) -> Lines:
    with path.open("rb") as file:
        return [line for _, line in json_lines(file)]


def _complete(path: Path) -> bool:
    """Return whether a process's journal has its share of the runs."""
    lines = _lines_of(path)
    return bool(lines) and "measured" in lines[-1]


def _about_other(path: Path, identity: dict[str, Any]) -> str:
    lines = _lines_of(path)
    theirs = lines[0].get("identity", {}) if lines else {}
    other = ", ".join(differing(theirs, identity)) or "everything"
    return (
        f"{path} holds {sum('method' in line for line in lines):,} runs of another identity (different: {other}); it "
        "is deleted when this report is written: to keep it, choose another out"
    )


def journal_line(run: Run, *prompts: Prompt) -> dict[str, Any]:
    """Return a run as a line: tokens, seconds, joules and steps in order."""
    line: dict[str, Any] = {name: getattr(run, name) for name in RUN_FIELDS}
    if run.expected is not None:
        line["promised"] = run.expected._asdict()
    if run.failure is not None:
        line["failure"] = run.failure
    line |= {"index": run.prompt, "prompt": ", ".join(prompt.id for prompt in prompts)}
    line |= {"prompt_tokens": sum(len(prompt.ids) for prompt in prompts), "new_tokens": len(run.tokens)}
    if run.lengths:
        line["lengths"] = list(run.lengths)
    if run.trace is not None:
        if run.lengths:
            line["row"] = [step.row for step in run.trace.steps]
        if any(step.source for step in run.trace.steps):
            line["source"] = [step.source for step in run.trace.steps]
        line |= {name: [getattr(step, name) for step in run.trace.steps] for name in STEP_FIELDS}
        line |= {name: getattr(run.trace, name) for name in TIME_FIELDS}
    return line


def run_from_line(line: dict[str, Any]) -> Run:
    """Return the run of a line of ``journal_line``."""
    trace = None
    if STEP_FIELDS[0] in line:
        count = len(line[STEP_FIELDS[0]])
        rows, sources = line.get("row", [0] * count), line.get("source", [""] * count)
        steps = [Step(*figures) for figures in zip(rows, *(line[name] for name in STEP_FIELDS), sources, strict=True)]
        trace = Trace(steps, prefill_seconds=line["prefill_seconds"], **{name: line[name] for name in TIME_FIELDS})
    known: dict[str, Any] = {"trace": trace, "failure": line.get("failure"), "lengths": tuple(line.get("lengths", ()))}
    known["expected"] = Expected(**line["promised"]) if "promised" in line else None
    return Run(prompt=line["index"], **known, **{name: line[name] for name in RUN_FIELDS})
