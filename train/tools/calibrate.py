"""Calibrate the acceptance that a block drafter (DFlash, DSpark) estimates, for its option truncate.

    python -m train.tools.calibrate --checkpoint runs/stdlib-dspark --features runs/stdlib-features

The drafter answers prompts of the store's heldout/ in the decoding loop. Half of the prompts fit one temperature for
each position of a block, the other half judge them. Two files of the checkpoint's folder change: config.json gets
confidence_temperatures, and confidence.json has the figures in the format of SGLang's option
--speculative-dspark-confidence-sts-path. Draft tokens and their distributions stay as they are.
"""

import math
from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, positive, run_program


def main(arguments: list[str] | None = None) -> None:
    """Decode, fit, print, and write both files."""
    parser = CommandLine("train.tools.calibrate", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter; it is changed in place")
    parser.add_argument("--features", type=Path, required=True, help="feature store whose heldout/ has the prompts")
    parser.add_argument("--target", help="folder or Hub repository, if not the one that the drafter names")
    parser.add_argument("--prompts", type=positive, default=128, help="most prompts")
    parser.add_argument("--new-tokens", type=positive, default=128, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the answers; 0: greedy")
    parsed = parser.parse(arguments)
    if not (parsed.checkpoint / "config.json").is_file():
        raise ValueError(
            f"--checkpoint: {parsed.checkpoint} holds no config.json; give the folder of a DFlash or DSpark"
        )
    if not 0 <= parsed.temperature < math.inf:
        raise ValueError(f"--temperature is {parsed.temperature}; give 0 (greedy) or more")

    from train.watch.calibration import calibrate

    with keeping(lambda: f"the checkpoint is as it was, or finished; to start again: {command()}"):
        calibrate(parsed)


if __name__ == "__main__":
    run_program(main)
