"""vLLM, SGLang and llama.cpp beside our own methods, on the same prompts, by the same clock.

    python -m eval.engines --config configs/engines/stdlib.yaml [--suite NAME] [key=value ...]

All of eval.speed, with one more row for every entry of ``engines``. Each engine is a process of its own environment
(docs/engines.md says how to install it) with its model loaded, and takes turns prompt by prompt. An engine that is
not installed is left out, and one that crashes has no figures: the report says so, and the others continue.
"""

import contextlib

from drafters.cli.program import CommandLine, command, keeping, run_program
from eval.configs import EnginesConfig, add_suite, load_with_suite


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.engines", __doc__, "YAML, see EnginesConfig", "prompts.count=8")
    add_suite(parser)
    parsed = parser.parse(arguments)
    config = load_with_suite(EnginesConfig, parsed)
    config.check_paths()

    from eval.measure.other_engines import Engines
    from eval.report.measured import measure_and_report
    from eval.report.tables import make_console

    console = make_console()
    notice = f"nothing was measured since this start, earlier runs are kept; to resume: {command()}"
    with keeping(lambda: notice), contextlib.ExitStack() as stack:
        measure_and_report(config, parsed.command, console, engines=Engines(config, config.engines, stack, console))


if __name__ == "__main__":
    run_program(main)
