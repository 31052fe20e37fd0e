"""Questions that the target asks itself, where there are no dialogues of the kind that it will be asked about.

    python -m data_prep.magpie --config configs/real/magpie.yaml [--rank 0 --ranks 2] [key=value ...]

A chat model was trained on questions as well as on answers: given its template up to where the user's text would begin,
it writes a question like those that it was tuned on (Magpie, Xu et al. 2024, arXiv 2406.08464, section 2.1). The result
is a ShareGPT file of questions without answers, which ``data_prep.regenerate`` answers. Dropped and counted: a question
that does not end within ``max_new_tokens``, an empty one, one that holds a special token, one that was there before.

A run that was killed goes on when it is started again, and lost no more than the questions under way. Several processes
share the work: start the same command once for each --rank; the last one to finish puts the parts together. A finished
run leaves ``<out>`` and, with its settings and counts, ``<out>.json``.
"""

from pathlib import Path

from pydantic import Field

from data_prep.answers.ownership import check_own
from data_prep.common.ranks import TargetKeys, add_rank_arguments, find_rank
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.common.files import check_file
from drafters.common.paths import check_model
from drafters.config import Amount, Length, Seed, Size, Vocabulary, load_config

# A run may go on with other values of these: they do not change which distribution is drawn from.
FREE_ON_RESUME = {"out", "count", "minutes", "device", "device_map", "batch"}


class MagpieConfig(TargetKeys):
    """Schema of ``configs/*/magpie.yaml``."""

    target: str  # folder or Hub repository of a chat model
    out: str  # JSONL file in ShareGPT form
    count: Amount = Field(ge=1)  # questions; somewhat fewer where two processes have asked the same one
    minutes: float | None = Field(None, gt=0)  # after which those that are there will do; default: no limit
    system: str | None = None  # a system message; default: the template's own, if it has one
    max_new_tokens: Length = Field(256, ge=2)  # of one question
    temperature: float = Field(0.9, gt=0, allow_inf_nan=False)
    top_k: Vocabulary = Field(100, ge=0)  # 0: off
    top_p: float = Field(1.0, gt=0, le=1)  # 1: off
    batch: Size = Field(64, ge=1)  # questions at once
    seed: Seed = 0


def main(arguments: list[str] | None = None) -> None:
    """Let the target of a config ask."""
    parser = CommandLine("data_prep.magpie", __doc__, "YAML file, see configs/real/magpie.yaml", "count=1000 batch=32")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config, rank = load_config(MagpieConfig, parsed.config, parsed.overrides), find_rank(parsed.rank, parsed.ranks)
    check(config, rank.count)

    from data_prep.magpie_run import kept, run

    with keeping(lambda: kept(config)):
        run(config, rank)


def check(config: MagpieConfig, ranks: int = 1) -> None:
    """Raise ValueError where the target is missing, or a file is in the way of the output."""
    check_model(config.target, "target", config.revision)
    if config.count < ranks:
        raise ValueError(f"count is {config.count} for {ranks} processes; give at least one question for each")
    check_file(Path(config.out))
    check_own(config.out)


if __name__ == "__main__":
    run_program(main)
