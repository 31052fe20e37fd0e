"""Accept a changed drafter, or not: tau before and after on new traffic and on a guard, in the decoding loop.

    python -m eval.gate --target T --drafter HEAD [--changed NEW] --traffic heldout.jsonl [--guard SUITE] --out D

NEW is accepted if the 95% interval of the change of tau over conversations is above 0 on the traffic (and its
sign-flip test below 5%), and above -2% (--most-loss) on the guard: a suite of configs/suites, or a file of prompts.
Prompts of the guard whose question is in --apart-from are taken out. Without --changed only HEAD is measured. Greedy;
chains, whose length does not depend on the machine's speed. Writes gate.json, gate.md and figures.json (for a model
card) into --out. The exit status is 0 if NEW is accepted. After a kill the same command continues.
"""

import argparse
from pathlib import Path

from drafters.cli.program import CommandLine, above_zero, command, keeping, positive, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import validate
from eval.prompts.choice import PromptsConfig, check_prompt_files, source_key


def main(arguments: list[str] | None = None) -> int:
    parser = CommandLine("eval.gate", __doc__)
    parser.add_argument("--target", required=True, help="folder or Hub repository")
    parser.add_argument("--drafter", required=True, help="the present head: folder or Hub repository")
    parser.add_argument("--changed", help="the new head")
    parser.add_argument("--traffic", required=True, type=Path, help="held-out dialogues: heldout.jsonl")
    parser.add_argument("--guard", help="suite or file of prompts on which tau must not fall")
    parser.add_argument("--apart-from", type=Path, action="append", default=[], help="dialogues trained on; repeatable")
    parser.add_argument("--most-loss", type=above_zero, default=2.0, help="accepted loss on the guard, percent")
    parser.add_argument("--prompts", type=positive, default=200, help="most conversations of each (default 200)")
    parser.add_argument("--new-tokens", type=positive, default=128, help="most tokens of an answer (default 128)")
    parser.add_argument("--longest", type=positive, help="most tokens of a prompt; longer ones are skipped")
    parser.add_argument("--chat-template", type=Path, help="file with a template instead of the target's own")
    parser.add_argument("--out", required=True, type=Path, help="folder of the measurements and of gate.json")
    parsed = parser.parse(arguments)
    check_model(parsed.target, "--target")
    check_model(parsed.drafter, "--drafter")
    check_model(parsed.changed, "--changed")
    check_folder(parsed.out, "--out")
    sets = {"traffic": prompts(parsed.traffic, parsed, [])}
    if parsed.guard is not None:
        sets["guard"] = prompts(parsed.guard, parsed, parsed.apart_from)
    for each in sets.values():
        check_prompt_files(each)

    from eval.report.gate import run

    with keeping(lambda: f"measurements so far are kept in {parsed.out}; to continue: {command()}"):
        return run(parsed, sets)


def prompts(source: str | Path, parsed: argparse.Namespace, apart_from: list[Path]) -> PromptsConfig:
    """Return the prompts of a file, or of a suite by its name or YAML file; ValueError if they cannot be read."""
    keys = {
        source_key(str(source)): str(source),
        "count": parsed.prompts,
        "max_prompt_tokens": parsed.longest,
        "apart_from": apart_from,
    }
    return validate(PromptsConfig, keys, "the command line")


if __name__ == "__main__":
    run_program(main)
