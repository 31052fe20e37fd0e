"""The journal: every single run of a report as a line of JSON, from which a killed report goes on."""

import contextlib
import fcntl
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from data_prep.common.ranks import Rank
from drafters.base import Expected
from drafters.cli.program import command
from drafters.common.files import naming, replacing
from drafters.loop.trace import Step, Trace
from eval.measure.identity import differing, digest
from eval.measure.runner import Run
from eval.prompts.prompts import Prompt

JOURNAL, UNFINISHED, LOCK = "measurements.jsonl", "measurements.unfinished.*.jsonl", ".measurements.lock"
ALONE = Rank()
START = ("date", "load_average")
END = "end"  # the key of the last line: what a report needs beside the runs
RUN_FIELDS = (
    "method", "temperature", "round", "tokens", "prefill_seconds", "decode_seconds", "wall_seconds", "first_tokens",
    "energy_joules", "host_energy_joules",
)  # fmt: skip
STEP_FIELDS = ("drafted", "depth", "accepted", "committed", "forwards")
TIME_FIELDS = ("draft_seconds", "verify_seconds", "other_seconds", "model_seconds")


class RunJournal:
    """The journal of a report in the making, as a context manager: the environment, then a line a run.

    Until the report is there it bears its identity's digest in its name, so that runs of two identities cannot meet. A
    kill may leave half a line, and a prompt that some methods have not decoded: both are cut off, for methods are
    compared on a prompt while they take turns on it. The next run of the same identity begins with what stands before.

    Args:
        out: the report's folder; made if missing.
        identity: see ``eval.measure.identity``.
        facts: the environment as it is now. ``parts`` is added: date and load average of every start, of those before
            with the runs that they left.
        methods: the labels that decode every prompt at a temperature and a batch size.
        rank: of several processes that share the prompts, each with a journal of its own until all are measured.

    Attributes:
        runs: what earlier starts measured, whole prompts only.
        notes: what the user should know of the journals found.

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
        names = [f"{digest(identity)}{_share(Rank(index, rank.count))}" for index in range(rank.count)]
        self._all = [out / UNFINISHED.replace("*", name) for name in names]
        self.path = self._all[rank.index]
        self._identity, self._facts = identity, facts
        self._methods = functools.cache(lambda temperature, batch: frozenset(methods(temperature, batch)))
        self.runs: list[Run] = []
        self.notes: list[str] = []
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+")
        if not _lock(self._file):
            self._file.close()
            raise ValueError(f"{self.path} is being written by another process; wait for it, or give another out")
        parts = self._take_over()
        start = {name: self._facts[name] for name in START}
        if parts:
            self._append({"resumed": start})
            self.notes.append(f"going on after {len(self.runs):,} runs, measured from {parts[0]['date']} on")
        else:
            self._append({"environment": self._facts, "identity": self._identity})
        self._facts["parts"] = [*parts, start]
        self.notes += [_about_other(path, self._identity) for path in self._others()]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._file.close()
        except OSError:  # the same full disk again; the error under way names the file, this one does not
            if error is None:
                raise
        if not self.runs:  # nothing was measured: nothing to go on from
            self.path.unlink(missing_ok=True)

    def write(self, run: Run, *prompts: Prompt) -> None:
        """Append a run of these prompts.

        Raises:
            OSError: the disk is full, say; the runs before stay.
        """
        self._append(journal_line(run, *prompts))
        self.runs.append(run)

    def end(self, found: dict[str, Any]) -> None:
        """Everything is measured: append what the report needs beside the runs, so that it can be made again.

        Raises:
            OSError: the disk is full, say; the runs stay.
        """
        self._append({END: found})

    def kept(self) -> str:
        """What an interrupted run leaves, and the command that goes on."""
        if self.path.name == JOURNAL:
            return f"report.json and {JOURNAL} in {self.path.parent} are complete; to measure again: {command()}"
        prompts = Counter((run.temperature, run.batch, run.round, run.prompt) for run in self.runs)
        whole = sum(runs for place, runs in prompts.items() if runs == len(self._methods(*place[:2])))
        kept = f"{whole:,} runs, those of whole prompts, are kept in {self.path}" if whole else "no prompt is whole yet"
        return f"{kept}; to go on: {command()}"

    def gather(self) -> bool:
        """Whether all processes have measured their shares; then ``runs`` are everybody's. To be asked ``alone``."""
        if len(self._all) == 1:
            return True
        self._append({"measured": len(self.runs)})
        if not all(_whole(path) for path in self._all):
            return False
        _, lines, _ = self._everything()
        self.runs = [run_from_line(line) for line in lines]
        return True

    def _everything(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        """Of all processes' journals the starts, the runs in the order in which one process makes them, and the end."""
        lines = [line for path in self._all for line in _whole(path)]
        runs = [line for line in lines if "method" in line]
        temperatures = list(dict.fromkeys(line["temperature"] for line in runs))
        batches = list(dict.fromkeys(len(line.get("lengths", "1")) for line in runs))

        def order(line: dict[str, Any]) -> tuple[int, ...]:
            batch = batches.index(len(line.get("lengths", "1")))
            return temperatures.index(line["temperature"]), line["round"], batch, line["index"]

        first, *starts = (start for line in lines if (start := line.get("environment") or line.get("resumed")))
        told = [{"resumed": {name: start[name] for name in START}} for start in starts]
        begun = {"environment": first, "identity": self._identity}
        return [begun, *told], sorted(runs, key=order), [line for line in lines if END in line]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While none of the other processes is in here."""
        if len(self._all) == 1:
            yield
            return
        with (self.path.parent / LOCK).open("a") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def finish(self) -> None:
        """The report is written: the journal, of all processes, takes its final name; those of other identities go."""
        if len(self._all) > 1:
            with naming(self.path), replacing(self.path.with_name(JOURNAL)) as whole, whole.open("wb") as file:
                for line in itertools.chain(*self._everything()):
                    file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            for path in [*self._all, self.path.with_name(LOCK)]:
                path.unlink(missing_ok=True)
        for other in self._others():
            with other.open("rb+") as file:  # NFS locks only what is open for writing
                if _lock(file):  # else another process is at it
                    other.unlink()
        final = self.path.with_name(JOURNAL)
        self.path = self.path.replace(final) if len(self._all) == 1 else final

    def _append(self, line: dict[str, Any]) -> None:
        with naming(self.path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def _others(self) -> list[Path]:
        return [path for path in sorted(self.path.parent.glob(UNFINISHED)) if path not in self._all]

    def _take_over(self) -> list[dict[str, Any]]:
        """Read ``runs``, cut off what follows the last whole prompt, and return every start with what it measured."""
        parts: list[dict[str, Any]] = []
        prompt: list[Run] = []
        end = 0
        for place, line in json_lines(self._file):
            if END in line:
                continue  # of a process that was killed while it wrote the report: it is made again, and cut off here
            start = line.get("environment") or line.get("resumed")
            if "measured" in line:
                continue  # it is said again when this start has come so far
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


def json_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object on every line, and where it ends; up to the first that a kill or a full disk left half written."""
    file.seek(0)
    end = 0
    for line in file.readlines():
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(found, dict):
            return
        end += len(line)
        yield end, found


def read_runs(path: Path) -> tuple[list[Run], dict[str, Any] | None]:
    """The runs of a finished journal, and its last line's ``END``; None where it has none.

    Raises:
        ValueError: there is no run in it.
    """
    with path.open("rb") as file:
        lines = [line for _, line in json_lines(file)]
    runs = [run_from_line(line) for line in lines if "method" in line]
    if not runs:
        raise ValueError(f"{path} has no runs; is it what eval.speed writes?")
    return runs, lines[-1].get(END)


def _whole(path: Path) -> list[dict[str, Any]]:
    """The lines of a process's journal, if it has measured its share; else none."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = [line for _, line in json_lines(file)]
    return lines if lines and ("measured" in lines[-1] or END in lines[-1]) else []


def _share(rank: Rank) -> str:
    """In a journal's name: which of several processes writes it."""
    return f".{rank.index}-of-{rank.count}" if rank.count > 1 else ""


def _lock(file: IO[bytes]) -> bool:
    """Lock the file: False where another process holds it, True even where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _about_other(path: Path, identity: dict[str, Any]) -> str:
    with path.open("rb") as file:
        lines = [line for _, line in json_lines(file)]
    runs = sum("method" in line for line in lines)
    theirs = lines[0].get("identity", {}) if lines else {}
    other = ", ".join(differing(theirs, identity)) or "everything"
    return (
        f"{path} holds {runs:,} runs of another kind, which are not mixed with these (other: {other}); it goes when "
        "this report is written: to keep it, choose another out"
    )


def journal_line(run: Run, *prompts: Prompt) -> dict[str, Any]:
    """All of a run, so that nothing measured is lost whatever comes after it; seconds, joules, steps in order."""
    line: dict[str, Any] = {name: getattr(run, name) for name in RUN_FIELDS}
    if run.promised is not None:
        line["promised"] = run.promised._asdict()
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
    """The run that ``journal_line`` wrote down."""
    trace = None
    if STEP_FIELDS[0] in line:
        count = len(line[STEP_FIELDS[0]])
        rows, sources = line.get("row", [0] * count), line.get("source", [""] * count)
        steps = [Step(*figures) for figures in zip(rows, *(line[name] for name in STEP_FIELDS), sources, strict=True)]
        trace = Trace(steps, prefill_seconds=line["prefill_seconds"], **{name: line[name] for name in TIME_FIELDS})
    promised = Expected(**line["promised"]) if "promised" in line else None
    known: dict[str, Any] = {"trace": trace, "promised": promised, "failure": line.get("failure")}
    known["lengths"] = tuple(line.get("lengths", ()))
    return Run(prompt=line["index"], **known, **{name: line[name] for name in RUN_FIELDS})
