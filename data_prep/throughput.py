"""Measure tokens/s of a dump beside the bare target: the same batches, without using their outputs.

    python -m data_prep.throughput --config configs/features/stdlib.yaml --out FILE.json [--rounds 5] [key=value ...]

Both are measured in turns, in one run. The dump is everything that data_prep.features does once the target is loaded:
forwards, copies to the host, conversion, checksums, files flushed to disk, the manifest. It goes into a temporary
folder beside the config's ``out``, on the same disk, which is deleted. ``limit=`` bounds the number of dialogues.
"""

from pathlib import Path

from data_prep.configs import FeaturesConfig
from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.common.files import check_file
from drafters.config import load_config


def main(arguments: list[str] | None = None) -> None:
    keys = "limit=1000 store_dtype=int8"
    parser = CommandLine("data_prep.throughput", __doc__, "YAML file, see configs/features/", keys)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--split", help="which split to measure (default: the config's first)")
    parser.add_argument("--rounds", type=positive, default=5, help="passes with each of the two (default 5)")
    parsed = parser.parse(arguments)
    config = load_config(FeaturesConfig, parsed.config, parsed.overrides)
    split = parsed.split or next(iter(config.splits))
    if split not in config.splits:
        raise ValueError(f"--split {split}: {parsed.config} has the splits {', '.join(config.splits)}")
    config.check()
    if parsed.out is not None:
        check_file(parsed.out, "--out")

    from data_prep.extraction import throughput

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        throughput.run(config, split, parsed.rounds, parsed.out)


if __name__ == "__main__":
    run_program(main)
