"""Decoding speed relative to the limit of memory bandwidth, for a model shape with random weights.

    python -m eval.roofline --shape llama-7b [key=value ...]

Plain decoding reads every weight once per token, so the floor of its time is those bytes over the measured bandwidth
(of reading or copying, the larger). The page compares this floor with plain decoding here, stock ``generate``, the cost
of verifying several rows, and the steps of EAGLE and Kangaroo. Untrained heads are never accepted, so acceptance is
REPLAYED from a profile (drafters/methods/replay.py), and every figure that depends on it is marked. Methods alternate
in the run; medians count.

Writes docs/results/<machine>/roofline-<shape>.json and .md.
"""

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import from_overrides
from eval.configs import RooflineConfig
from eval.rooflines.shapes import check_shape


def main(arguments: list[str] | None = None) -> None:
    """Measure a shape and write its page."""
    parser = CommandLine("eval.roofline", __doc__, overrides="quantize=int8; see RooflineConfig")
    parser.add_argument("--shape", required=True, help="for example llama-7b; a wrong name lists all")
    parsed = parser.parse(arguments)
    config = from_overrides(RooflineConfig, parsed.overrides)
    check_shape(parsed.shape)
    if config.out is not None:
        check_folder(config.out)

    from eval.report.tables import make_console
    from eval.rooflines.shape_page import measure_and_write

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        measure_and_write(parsed.shape, config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
