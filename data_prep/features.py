"""Make the feature stores of a config: dialogues -> token ids and loss mask -> frozen target -> one store per split.

    python -m data_prep.features --config configs/features/stdlib.yaml [--dry-run | --verify] [key=value ...]
    torchrun --nproc-per-node 8 -m data_prep.features --config ...     or deepspeed --module, or srun python -m
    python -m data_prep.features --config ... --rank 0 --ranks 4       on each of four machines that share `out`

One pass over the target gives the hidden states of all methods in ``for``. After a kill, the same command continues at
the next shard, with any number of processes; finished splits are skipped. --dry-run prints the sizes of the stores
without loading weights, and fails if the disk is too small. --verify reads finished stores and compares their
checksums. With ``engine: vllm`` vLLM runs the target.
"""

from data_prep.common.ranks import add_rank_arguments, find_rank
from data_prep.configs import FeaturesConfig
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.config import load_config


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.features", __doc__, "YAML file, see configs/features/", "limit=1000 device=cuda")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--verify", action="store_true", help="only compare the checksums of the finished stores")
    instead.add_argument("--dry-run", action="store_true", help="only print the sizes of the stores")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load_config(FeaturesConfig, parsed.config, parsed.overrides)
    rank = find_rank(parsed.rank, parsed.ranks)
    config.check()

    from data_prep.extraction.stores import dry_run, make_stores, resume_notice, verify_stores

    with keeping(lambda: resume_notice(config)):
        if not (parsed.verify or parsed.dry_run):
            make_stores(config, rank)
        elif rank.index == 0:
            verify_stores(config) if parsed.verify else dry_run(config)


if __name__ == "__main__":
    run_program(main)
