"""``eval.speed`` for several values of one key of its config.

    python -m eval.sweep --config configs/real/lengths.yaml [key=value ...]

The config is a speed config with ``vary: {key: [values]}``; the key is dotted, such as ``max_new_tokens`` or
``prompts.consecutive``.

Every value has its own plain decoding as baseline and its own report in ``out/<key>=<value>/``; ``out`` gets
sweep.json and sweep.md. The models are loaded once, and again only if ``target`` itself varies. The same
command resumes a sweep: a value with a report of the same config, commit and machine is not measured again.
"""

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.config import load_config
from eval.configs import SweepConfig


def main(arguments: list[str] | None = None) -> None:
    parsed = CommandLine("eval.sweep", __doc__, "YAML, see SweepConfig", "prompts.count=8").parse(arguments)
    config = load_config(SweepConfig, parsed.config, parsed.overrides)
    config.check_paths()

    from eval.report.series import sweep
    from eval.report.tables import make_console

    with keeping(lambda: f"the values measured are kept in {config.out}; to resume: {command()}"):
        sweep(config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
