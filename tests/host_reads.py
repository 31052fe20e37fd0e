"""Count the copies between host and device in a decoding step, for every method, on the simulated GPU.

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
    """Most reads per step of a method that needs more than one, and why it needs them."""

    reads: int
    why: str


MERGED = "the host merges drafted sequences by their common prefixes before the target runs"
ALLOWED = {
    "kangaroo": Allowed(
        7,
        "the second early exit needs the confidence of each draft token before the next. Read later, every draft would "
        "cost the shallow layers of all its tokens. `eta: 0` reads once",
    ),
    "bild": Allowed(6, "after each draft token, the confidence decides whether the target takes over"),
    "llmcad": Allowed(8, "the host gives tokens to branches by confidence, level by level"),
    "ouroboros": Allowed(
        8,
        "phrases are looked up on the host by the draft model's last token: one read per forward of the draft model, "
        "and one per sampled token",
    ),
    "cascade": Allowed(5, "drafts are steps of the same loop with the draft model as target: one read for each"),
    "specinfer": Allowed(2, MERGED),
    "spectr": Allowed(2, MERGED),
}

HEAD = """# How often does a decoding step wait for the GPU?

Once, for the verdict, with the exceptions below. Each further copy to the host, and each copy to the device from memory
that is not pinned, makes the host wait for the work in its stream.

The table counts copies on a simulated CUDA device (`tests/simulated_cuda/`), with captured forwards, a batch of one and
tiny random models that accept a part of the drafts. The counts depend on how many tokens are drafted and accepted, not
on the size of the models. Most uploads come before the step's work is queued, so they do not wait.

`python tests/host_reads.py --out docs/results/host-reads.json --page docs/host-reads.md` writes this page and its
[JSON](results/host-reads.json), which names the functions that copy. `tests/test_cuda_runs.py` checks every method.

| method | T | steps | reads per step | most | uploads per step | most |
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
    lines += ["", "\\* Why these methods read more than once:", ""]
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
