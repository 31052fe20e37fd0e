"""Replace the answers of a ShareGPT file by the target's own: a drafter should learn from these.

    python -m data_prep.regenerate --config configs/regenerate/stdlib.yaml [--rank 0 --ranks 2] [key=value ...]

Turn by turn, every user turn is answered after the system message, the earlier user turns and their new answers. The
target runs here, accelerated by any lossless drafter, or behind an OpenAI-compatible endpoint. After a kill, the same
command continues; only the batch in progress is lost. Several processes share the work: start the command once for each
--rank, or under torchrun, deepspeed or srun. The last process to finish merges the parts into ``<out>`` and writes
settings and counts to ``<out>.json``.
"""

from data_prep.common.ranks import add_rank_arguments, find_rank
from data_prep.configs import RegenerateConfig
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.config import load_config


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.regenerate", __doc__, "YAML file, see configs/regenerate/", "limit=1000 batch=32")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load_config(RegenerateConfig, parsed.config, parsed.overrides)
    rank = find_rank(parsed.rank, parsed.ranks)
    config.check()

    from data_prep.answers.finished import resume_notice
    from data_prep.answers.regeneration import regenerate

    with keeping(lambda: resume_notice(config.out, "answer")):
        regenerate(config, rank)


if __name__ == "__main__":
    run_program(main)
