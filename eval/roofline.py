"""How near decoding comes to what the machine's memory allows, for a model shape with random weights.

    python -m eval.roofline --shape llama-7b [key=value ...]

Plain decoding reads every weight once a token: no decoding of one row can be faster than those bytes at the measured
bandwidth (reading's or copying's, the larger). Beside that floor stand plain decoding here, stock ``generate``, the
cost of verifying several rows, and the steps of EAGLE and Kangaroo. Untrained heads are never accepted, so acceptance
is REPLAYED from a profile (drafters/methods/replay.py), and every figure that depends on it says so. Methods alternate
within the run; medians count.

Writes docs/results/<machine>/roofline-<shape>.json and .md.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import Config, Dtype, Engine, Layers, Length, Quantization, Seed, Size, from_overrides
from eval.measure.entries import Odd
from eval.rooflines.shapes import check_shape

# EAGLE, Table 1 (Vicuna-7B, MT-bench, greedy): n-alpha of a chain. Its tree has tau 3.94 there.
Rate = Annotated[float, Field(ge=0.0, le=1.0)]
PAPER_ALPHA = [0.79, 0.74, 0.72, 0.73, 0.67]


class RooflineConfig(Config):
    """What ``key=value`` may set."""

    dtype: Dtype = "auto"
    device: str | None = Field(None, description="None: a GPU where there is one, else the CPU")
    engine: Engine | None = None
    quantize: Quantization | None = None
    context: Length = Field(1024, ge=2, description="tokens before those that are decoded")
    new_tokens: Length = Field(128, ge=2)
    rows: list[Size] = Field([1, 2, 4, 8, 16, 26, 32, 60, 64], min_length=1, description="rows of a verification")
    batches: list[Size] = Field([1, 4], min_length=1, description="prompts at once, for plain decoding and EAGLE")
    rounds: Odd = Field(3, description="odd; the median counts")
    eagle_profile: list[Rate] = Field(PAPER_ALPHA, min_length=1)
    eagle_tau: float = Field(3.94, ge=1.0, description="the profile's rates are raised to one power to give it")
    kangaroo_profile: list[Rate] = Field([0.6], min_length=1)
    kangaroo_tau: float = Field(2.0, ge=1.0)
    exit_layer: Layers = Field(2, ge=1, description="Kangaroo's")
    stock: bool = Field(True, description="stock generate, too")
    compiled: bool | None = Field(None, description="stock generate on a compiled static cache; None: on a GPU only")
    threads: Size | None = Field(None, ge=1, description="CPU threads; None: by the load of other processes")
    seed: Seed = 0
    out: Path | None = Field(None, description="folder; None: docs/results/<machine>")


def main(arguments: list[str] | None = None) -> None:
    """Measure a shape and write its page."""
    parser = CommandLine("eval.roofline", __doc__, overrides="quantize=int8; see RooflineConfig")
    parser.add_argument("--shape", required=True, help="for example llama-7b; a wrong name lists all")
    parsed = parser.parse(arguments)
    config = from_overrides(RooflineConfig, parsed.overrides)
    check_shape(parsed.shape)
    if config.out is not None:
        check_folder(config.out)

    from eval.report.screen import make_console
    from eval.roofline_run import run

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        run(parsed.shape, config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
