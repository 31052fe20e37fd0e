"""Every configured drafter on the same prompts, in one loop, beside plain decoding and stock ``generate``.

    python -m eval.speed --config configs/speed/stdlib.yaml [--suite gsm8k] [key=value ...]

Writes report.html, report.json, report.md, speedup.png and measurements.jsonl (the environment, then every run with
its tokens and steps) into ``out``. They replace those of an earlier report when everything is measured. Until then,
measurements.unfinished.*.jsonl holds the runs, and the same command resumes after a kill; runs of another config,
commit or machine are never mixed in. ``eval.sweep`` measures several values of one key.

Several processes can share the prompts, each with its own GPU: torchrun --nproc-per-node 4 -m eval.speed --config ...,
or --rank 0 --ranks 4 and so on. The last to end writes the report.

--suite replaces the config's prompts: names of configs/suites, or YAML files in their form, with commas between them;
the report is then in a folder of that name in ``out``.
"""

from data_prep.common.ranks import add_rank_arguments, find_rank, refuse_shared_map
from drafters.cli.program import CommandLine, command, keeping, run_program
from eval.configs import SpeedConfig, add_suite, load_with_suite


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.speed", __doc__, "YAML, see SpeedConfig", "prompts.count=8")
    add_suite(parser)
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load_with_suite(SpeedConfig, parsed)
    rank = find_rank(parsed.rank, parsed.ranks)
    refuse_shared_map(rank, config.target.device_map, "target.device_map")
    config.check_paths()

    from eval.report.measured import measure_and_report
    from eval.report.tables import make_console

    with keeping(lambda: f"nothing was measured since this start, earlier runs are kept; to resume: {command()}"):
        measure_and_report(config, parsed.command, make_console(), rank=rank)


if __name__ == "__main__":
    run_program(main)
