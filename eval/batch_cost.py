"""What one forward costs, in time and energy, by the number of inputs in it (MJSD, Table 1).

    python -m eval.batch_cost --config configs/ablations/mjsd-batch-cost.yaml [key=value ...]

A forward here is one new token for each input of a batch, after a context of given length, with the LM head. Batch
sizes alternate in the run; figures are medians over blocks of forwards. Writes batch_cost.json and batch_cost.md into
``out``.
"""

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import load_config
from eval.configs import BatchCostConfig
from eval.entries import check_entries


def main(arguments: list[str] | None = None) -> None:
    parsed = CommandLine("eval.batch_cost", __doc__, "YAML, see BatchCostConfig", "context=512").parse(arguments)
    config = load_config(BatchCostConfig, parsed.config, parsed.overrides)
    check_entries([], {"target.path": config.target.path})
    check_folder(config.out)

    from eval.report.tables import make_console
    from eval.rooflines.batch_cost import measure_and_write

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        measure_and_write(config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
