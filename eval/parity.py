"""Served acceptance is lower than trained: which convention does the engine have wrong?

    python -m eval.parity --checkpoint F --target T --engine vllm|sglang [--prompts FILE] [key=value ...]
    python -m eval.parity --checkpoint F --target T --engine ours

The engine and our loop decode the same prompts greedily, with drafts that are chains. The check passes if drafts are as
long, and acceptance is the same within two standard errors at every position. If not, our loop tries the known
mistakes, and the check names those that reproduce the engine's acceptance. ``--engine ours`` needs no engine: it says
which reading of the checkpoint accepts most, and what to change. Without a prompt file the target samples the
beginnings.

Writes parity.json and parity.md into ``out``. The exit status is 0 for a check that passed.
"""

import json
from typing import Any

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import from_overrides
from eval.configs import ParityConfig
from eval.prompts.choice import check_prompt_files

KEYS = {"checkpoint": "checkpoint", "target": "target.path", "engine": "engine", "prompts": "prompts.file"}


def read_config(parsed: Any) -> ParityConfig:
    """Return the config: the four options, then ``key=value``."""
    options = {key: getattr(parsed, name) for name, key in KEYS.items() if getattr(parsed, name) is not None}
    return from_overrides(
        ParityConfig, [*(f"{key}={json.dumps(value)}" for key, value in options.items()), *parsed.overrides]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = CommandLine("eval.parity", __doc__, overrides="depth=7 max_new_tokens=256; see ParityConfig")
    parser.add_argument("--checkpoint", required=True, help="our EAGLE, EAGLE-3, DFlash or DSpark head, or MTP layers")
    parser.add_argument("--target", required=True, help="folder or Hub repository")
    parser.add_argument("--engine", required=True, help="vllm, sglang, or ours: no engine")
    parser.add_argument("--prompts", help="file of dialogues or questions")
    parsed = parser.parse(arguments)
    config = read_config(parsed)
    check_model(config.target.path, "--target", config.target.revision)
    check_model(config.checkpoint, "--checkpoint")
    if config.prompts is not None:
        check_prompt_files(config.prompts)
    check_folder(config.out)

    from eval.figures.diagnosis import PASS, parity
    from eval.report.diagnosis_page import figures_table, markdown, verdict_lines
    from eval.report.tables import make_console, say, write_page

    console = make_console()
    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        report = parity(config, parsed.command, console)
        for line in [*figures_table(report), *verdict_lines(report)]:
            say(console, line)
        write_page(report, markdown(report), config.out, "parity", console)
    return 0 if report["verdict"] == PASS else 1


if __name__ == "__main__":
    run_program(main)
