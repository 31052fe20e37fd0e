"""A ShareGPT file whose answers are replaced by the target's own: what a drafter should learn from.

    python -m data_prep.regenerate --config configs/regenerate/stdlib.yaml [--rank 0 --ranks 2] [key=value ...]

Turn by turn: every user turn is answered after the system message, the earlier user turns and the new answers to them.
The target runs here, accelerated by any lossless drafter, or behind an OpenAI-compatible endpoint. A run that was
killed goes on when it is started again, and lost no more than the batch under way. Several processes share the work:
start the same command once for each --rank, or under torchrun, deepspeed or srun; the last one to finish puts the parts
together. A finished run leaves ``<out>`` and, with its settings and counts, ``<out>.json``.
"""

from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from data_prep.answers.endpoint import EndpointConfig
from data_prep.answers.ownership import check_own
from data_prep.answers.writing import Writing
from data_prep.common.ranks import TargetKeys, add_rank_arguments, find_rank
from data_prep.dialogues.reader import check_source
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.common.files import check_file
from drafters.common.paths import check_model
from drafters.config import Amount, Config, Size, load_config
from drafters.methods import check_method

# A run may go on with other values of these: they decide how fast it is, and not which distribution is drawn from. (Of
# the source, its digest counts.)
FREE_ON_RESUME = {"source", "out", "minutes", "device", "device_map", "batch", "drafter", "endpoint"}
OF_A_TARGET = {*TargetKeys.model_fields, "drafter", "batch", "max_context"}


class DrafterOptions(Config):
    """A drafter as in configs/speed: its method's name, and whatever options that has."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str


class RegenerateConfig(Writing, TargetKeys):
    """Schema of ``configs/regenerate/*.yaml``. Give ``target`` (and for it ``TargetKeys``) or ``endpoint``."""

    source: str  # ShareGPT file or Hub dataset
    out: str  # JSONL file in ShareGPT form
    target: str | None = None  # folder or Hub repository of the target
    endpoint: EndpointConfig | None = None  # in place of a target: an OpenAI-compatible server
    limit: Amount | None = Field(None, ge=1)  # dialogues, the first ones; default: all
    minutes: float | None = Field(None, gt=0)  # after which what is not answered is left out; default: no limit
    # For a target, as are all of TargetKeys.
    drafter: DrafterOptions | None = None  # for example {drafter: eagle, checkpoint: ..., tree: chain}; default: none
    batch: Size = Field(8, ge=1)  # dialogues at once; less where the drafter decodes fewer

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.target is None) == (self.endpoint is None):
            raise ValueError("give either target (a model to run here) or endpoint (a server), and not both")
        useless = sorted(OF_A_TARGET & self.model_fields_set) if self.endpoint else []
        if useless:
            raise ValueError(f"{', '.join(useless)}: only for a target that runs here, not for an endpoint")
        if self.max_context is not None and self.max_new_tokens >= self.max_context:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and max_context {self.max_context}, which leaves no room for "
                "a prompt; lower max_new_tokens"
            )
        return self


def main(arguments: list[str] | None = None) -> None:
    """Regenerate the answers of a config's source."""
    parser = CommandLine("data_prep.regenerate", __doc__, "YAML file, see configs/regenerate/", "limit=1000 batch=32")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config, rank = load_config(RegenerateConfig, parsed.config, parsed.overrides), find_rank(parsed.rank, parsed.ranks)
    check(config)

    from data_prep.regenerate_run import kept, run

    with keeping(lambda: kept(config)):
        run(config, rank)


def check(config: RegenerateConfig) -> None:
    """Raise ValueError where a file is missing or in the way, or no such drafter."""
    check_source(config.source)
    out = Path(config.out)
    check_file(out)
    if out.exists() and out.samefile(config.source):
        raise ValueError(f"out: {out} is the source; give another file")
    check_own(config.out)
    if config.drafter is not None:
        check_method(config.drafter.drafter)
        path = (config.drafter.model_extra or {}).get("checkpoint")
        check_model(path if isinstance(path, str) else None, "drafter.checkpoint")
    if config.endpoint is not None:
        config.endpoint.check()
    check_model(config.target, "target", config.revision)


if __name__ == "__main__":
    run_program(main)
