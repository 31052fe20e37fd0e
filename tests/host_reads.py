"""What crosses between host and device in a step of the decoding loop, for every method, on the simulated GPU.

python tests/host_reads.py --out docs/results/host-reads.json --page docs/host-reads.md
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEW_TOKENS = 24


@dataclass(frozen=True)
class Allowed:
    """A method that reads more than once a step: how often at most in the runs of the tests, and why it has to."""

    reads: int
    why: str


ALLOWED = {
    "kangaroo": Allowed(
        7,
        "the second early exit: whether there is a next draft token hangs on the confidence of this one. Read later, "
        "every draft would cost the shallow layers of all its tokens. `eta: 0` never looks and reads once",
    ),
    "bild": Allowed(
        6, "the fallback policy hands over to the target where the draft model is not confident: one look a draft token"
    ),
    "llmcad": Allowed(
        13,
        "branches get tokens by their confidence, level by level, on the host; and more while the target verifies, "
        "beside it, on a stream of its own",
    ),
    "ouroboros": Allowed(
        8,
        "the draft model's phrases come out of a pool on the host, looked up by its last token: one read a forward of "
        "the draft model, and one a sampled token",
    ),
    "cascade": Allowed(
        5, "its drafts are steps of the same loop with the draft model as target: one read each, and one of its own"
    ),
    "specinfer": Allowed(
        2, "drafted sequences are merged by their common prefixes on the host, before the target runs"
    ),
    "spectr": Allowed(2, "drafted sequences are merged by their common prefixes on the host, before the target runs"),
}

HEAD = """# What crosses between host and device a step

A decoding step may copy to the host once: the verdict. Every further copy, and every copy to the device from memory
that is not pinned, makes the host wait for all work queued on its stream. This table counts them for every method on a
simulated CUDA device (`tests/simulated_cuda/`: CPU memory, real values, every copy counted), with captured forwards, a
batch of one, and random tiny models that accept drafts in part. How many there are depends on how many tokens are
drafted and accepted, not on the size of the models. Most uploads come before the step's work is queued, so there is
nothing to wait for.

`python tests/host_reads.py --out docs/results/host-reads.json --page docs/host-reads.md` writes it
([JSON](results/host-reads.json), with the functions that each copy comes from), and `tests/test_cuda_runs.py` holds
every method to one read a step or to its exception.

| method | T | steps | reads a step | most | uploads a step | most |
| --- | --- | --- | --- | --- | --- | --- |
"""


def measure() -> list[dict[str, Any]]:
    """A row of the table for each method and temperature."""
    from cuda_runs import GREEDY_ONLY, METHODS, PROMPTS, Models, decode
    from simulated_cuda import simulated_cuda

    rows = []
    with simulated_cuda():
        models = Models("cuda", "graphs")
        for method in METHODS:
            for temperature in (0.0,) if method in GREEDY_ONLY else (0.0, 1.0):
                found = decode(method, models, temperature, [PROMPTS[:1]], NEW_TOKENS)
                steps = len(found.reads)
                where: Counter[str] = Counter()
                for (kind, line), count in found.where.items():
                    if kind in ("read", "upload", "late read", "late upload"):
                        file, place = line.split(":")  # the line's number would be stale soon
                        where[f"{kind}: {file}, {place.split(' in ')[1]}"] += count
                rows.append(
                    {
                        "method": method,
                        "temperature": temperature,
                        "steps": steps,
                        "reads": {"mean": round(sum(found.reads) / steps, 2), "most": max(found.reads)},
                        "uploads": {"mean": round(sum(found.uploads) / steps, 2), "most": max(found.uploads)},
                        "where": dict(where.most_common()),
                    }
                )
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The document."""
    lines = [HEAD.rstrip("\n")]
    for row in rows:
        reads, uploads = row["reads"], row["uploads"]
        mark = "\\*" if row["method"] in ALLOWED else ""
        lines.append(
            f"| {row['method']}{mark} | {row['temperature']:g} | {row['steps']} | {reads['mean']:.2f} "
            f"| {reads['most']} | {uploads['mean']:.2f} | {uploads['most']} |"
        )
    lines += ["", "\\* The exceptions to one read a step, and why they have to be:", ""]
    lines += [f"- **{method}**: {allowed.why}." for method, allowed in ALLOWED.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--page", type=Path, required=True, help="markdown to write")
    given = parser.parse_args()
    rows = measure()
    given.out.write_text(json.dumps({"new_tokens": NEW_TOKENS, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    given.page.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
