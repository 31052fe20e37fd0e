"""Make the feature stores of a config: dialogues -> token ids and loss mask -> frozen target -> one store per split.

    python -m data_prep.features --config configs/features/stdlib.yaml [--verify] [key=value ...]
    torchrun --nproc-per-node 8 -m data_prep.features --config ...     or deepspeed --module, or srun python -m
    python -m data_prep.features --config ... --rank 0 --ranks 4       on each of four machines that share `out`

One pass over the target gives final features (EAGLE) and exit-layer states (Kangaroo). After a kill, the same command
continues at the next shard, with any number of processes; finished splits are skipped. --verify reads finished stores
and compares their checksums. With ``engine: vllm`` vLLM runs the target.
"""

from data_prep.common.ranks import add_rank_arguments, find_rank
from data_prep.configs import FeaturesConfig
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.config import load_config


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.features", __doc__, "YAML file, see configs/features/", "limit=1000 device=cuda")
    parser.add_argument("--verify", action="store_true", help="only compare the checksums of the finished stores")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load_config(FeaturesConfig, parsed.config, parsed.overrides)
    rank = find_rank(parsed.rank, parsed.ranks)
    config.check()

    from data_prep.extraction.stores import kept, make_stores, verify_stores

    with keeping(lambda: kept(config)):
        if not parsed.verify:
            make_stores(config, rank)
        elif rank.index == 0:
            verify_stores(config)


if __name__ == "__main__":
    run_program(main)
