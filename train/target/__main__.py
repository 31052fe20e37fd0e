"""Train a small Llama target from scratch, tokenizer included; or with `tokenizer:` a draft model for another target.

    python -m train.target --config configs/target/stdlib.yaml [key=value ...] [--resume]

The run folder holds run.json, metrics.jsonl, TensorBoard events, checkpoints and `export/`, a Hugging Face snapshot
that is renewed during training. A killed run continues with --resume, bit for bit. The schedule is warm-up, constant,
linear decay: another `steps=` on --resume moves the decay.
"""

import sys

from drafters.cli.program import CommandLine, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import load_config
from train.configs import TargetConfig


def main(argv: list[str] | None = None) -> None:
    """The command line in the module's docstring."""
    parser = CommandLine("train.target", __doc__, "YAML of the run", "steps=2600")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    args = parser.parse(argv)
    config = load_config(TargetConfig, args.config, args.overrides)
    check(config)

    from train.target.run import kept, run

    with keeping(lambda: kept(config)):
        run(config, args.resume, sys.argv[1:] if argv is None else argv)


def check(config: TargetConfig) -> None:
    """Raise ValueError if the corpus or the `tokenizer:` target is missing, or a folder cannot be written."""
    check_folder(config.run_dir, "run_dir:")
    check_folder(config.final_dir, "final_dir:")
    check_model(config.tokenizer, "tokenizer")
    for split in ("train", "heldout"):
        if not (file := config.corpus / f"{split}.jsonl").is_file():
            raise ValueError(f"corpus: no file {file}; make it with python -m data_prep.stdlib_corpus --out F")


if __name__ == "__main__":
    run_program(main)
