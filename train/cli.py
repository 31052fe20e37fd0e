"""The command line that train/eagle.py and train/kangaroo.py share."""

import argparse


def parse_arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """``--config F [--resume] [key=value ...]``; also takes the ``--local_rank`` that DeepSpeed's launcher appends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in `out` from its last checkpoint")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
    return parser.parse_intermixed_args(argv)
