"""What one forward costs, in time and energy, by the number of inputs in it (MJSD, Table 1).

    python -m eval.batch_cost --config configs/batch_cost/X.yaml [key=value ...]

A forward here is one new token for each input of a batch, after a context of given length, with the LM head. Batch
sizes alternate within the run; the figures are medians over their blocks of forwards. Writes batch_cost.json and
batch_cost.md into ``out``.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import Config, Length, Seed, Size, load_config
from eval.measure.entries import DISTINCT, Odd, check_entries
from eval.speed import BatchSize, TargetEntry


class BatchCostConfig(Config):
    """All paths are relative to the working directory."""

    target: TargetEntry
    out: Path
    batches: Annotated[list[BatchSize], DISTINCT] = Field([1, 2, 4, 8, 16], min_length=1, description="in a forward")
    context: Length = Field(256, ge=1, description="tokens of every input before the one that is fed")
    runs: Size = Field(100, ge=1, description="forwards of a block, which is timed and metered as a whole")
    blocks: Odd = Field(5, description="odd; blocks of every batch size; the median counts")
    warmup: Size = Field(5, ge=0, description="forwards of every batch size before all others, unmeasured")
    threads: Size | None = Field(None, ge=1, description="CPU threads; None: by the load of other processes")
    seed: Seed = Field(0, description="of the tokens and of the batch sizes' order")


def check(config: BatchCostConfig) -> None:
    """Check what can be checked before the target is loaded.

    Raises:
        ValueError: the target is not there, or ``out`` cannot be written to.
    """
    check_entries([], {"target.path": config.target.path})
    check_folder(config.out)


def main(arguments: list[str] | None = None) -> None:
    """Measure the batch sizes of a config and write its page."""
    parsed = CommandLine("eval.batch_cost", __doc__, "YAML, see BatchCostConfig", "context=512").parse(arguments)
    config = load_config(BatchCostConfig, parsed.config, parsed.overrides)
    check(config)

    from eval.batch_cost_run import run
    from eval.report.screen import make_console

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        run(config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
