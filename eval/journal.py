"""The journal: every single run of a report as a line of JSON."""

from typing import Any

from drafters.decoding.trace import Step, Trace
from eval.measure import Run
from eval.prompts import Prompt

STEP_FIELDS = ("drafted", "depth", "accepted", "committed", "forwards")
TIME_FIELDS = ("draft_seconds", "verify_seconds", "other_seconds", "model_seconds")


def journal_line(run: Run, prompt: Prompt) -> dict[str, Any]:
    """All of a run, so that nothing measured is lost whatever comes after it; seconds, joules, steps in order."""
    line: dict[str, Any] = {
        "method": run.method,
        "temperature": run.temperature,
        "round": run.round,
        "index": run.prompt,
        "prompt": prompt.id,
        "prompt_tokens": len(prompt.ids),
        "new_tokens": len(run.tokens),
        "tokens": run.tokens,
        "prefill_seconds": run.prefill_seconds,
        "decode_seconds": run.decode_seconds,
        "wall_seconds": run.wall_seconds,
        "first_tokens": run.first_tokens,
        "energy_joules": run.energy_joules,
        "host_energy_joules": run.host_energy_joules,
    }
    if run.trace is not None:
        line |= {name: [getattr(step, name) for step in run.trace.steps] for name in STEP_FIELDS}
        line |= {name: getattr(run.trace, name) for name in TIME_FIELDS}
    return line


def run_from_line(line: dict[str, Any]) -> Run:
    """What ``journal_line`` was made from."""
    trace = None
    if STEP_FIELDS[0] in line:
        steps = [Step(0, *figures) for figures in zip(*(line[name] for name in STEP_FIELDS), strict=True)]
        trace = Trace(steps, prefill_seconds=line["prefill_seconds"], **{name: line[name] for name in TIME_FIELDS})
    return Run(
        method=line["method"],
        temperature=line["temperature"],
        round=line["round"],
        prompt=line["index"],
        tokens=line["tokens"],
        prefill_seconds=line["prefill_seconds"],
        decode_seconds=line["decode_seconds"],
        wall_seconds=line["wall_seconds"],
        trace=trace,
        first_tokens=line["first_tokens"],
        energy_joules=line["energy_joules"],
        host_energy_joules=line["host_energy_joules"],
    )
