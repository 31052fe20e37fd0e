"""A ShareGPT file whose answers are replaced by the target's own: what a drafter should learn from.

    python -m data_prep.regenerate --config configs/regenerate/stdlib.yaml [--rank 0 --ranks 2] [key=value ...]

Turn by turn: every user turn is answered after the system message, the earlier user turns and the new answers to them.
The target runs here, accelerated by any lossless drafter, or behind an OpenAI-compatible endpoint. A run that was
killed goes on when it is started again, and lost no more than the batch under way. Several processes share the work:
start the same command once for each --rank, or under torchrun, deepspeed or srun; the last one to finish puts the parts
together. A finished run leaves ``<out>`` and, with its settings and counts, ``<out>.json``.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from drafters.config import Config, load_config
from drafters.methods import check_method
from drafters.paths import check_model
from drafters.program import CommandLine, keeping, run_program

from .answers.endpoint import EndpointConfig
from .dialogues.reader import check_source
from .ranks import Rank, add_rank_arguments, find_rank

# A run may go on with other values of these: they decide how fast it is, and not which distribution is drawn from. (Of
# the source, its digest counts.)
FREE_ON_RESUME = {"source", "out", "device", "device_map", "batch", "drafter", "endpoint"}
OF_A_TARGET = {"revision", "dtype", "device", "device_map", "chat_template", "drafter", "batch", "max_context"}


class DrafterOptions(Config):
    """A drafter as in configs/speed: its method's name, and whatever options that has."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str


class RegenerateConfig(Config):
    """Schema of ``configs/regenerate/*.yaml``. Give ``target`` or ``endpoint``."""

    source: str  # ShareGPT file or Hub dataset
    out: str  # JSONL file in ShareGPT form
    target: str | None = None  # folder or Hub repository of the target
    endpoint: EndpointConfig | None = None  # in place of a target: an OpenAI-compatible server
    max_new_tokens: int = Field(1024, ge=1)  # of one answer
    truncated: Literal["keep", "drop"] = "keep"  # answers cut there; drop: the dialogue ends before such an answer
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)  # 0: greedy
    top_k: int = Field(0, ge=0)  # 0: off
    top_p: float = Field(1.0, gt=0, le=1)  # 1: off
    seed: int = 0
    limit: int | None = Field(None, ge=1)  # dialogues, the first ones; default: all
    # The rest is for a target.
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str | None = None  # default: cuda if there is one (under a launcher the process's own), else cpu
    device_map: str | dict[str, int | str] | None = None  # in place of device: layers over several GPUs, e.g. auto
    chat_template: str | None = None  # file with a Jinja template, used in place of the tokenizer's own
    drafter: DrafterOptions | None = None  # for example {drafter: eagle, checkpoint: ..., tree: chain}; default: none
    batch: int = Field(8, ge=1)  # dialogues at once; less where the drafter decodes fewer
    max_context: int | None = Field(None, ge=2)  # tokens of prompt and answer; default: what the target was made for

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
    config, rank = _parse(arguments)
    check(config)

    from .regenerate_run import kept, run

    with keeping(lambda: kept(config)):
        run(config, rank)


def check(config: RegenerateConfig) -> None:
    """Raise ValueError where a file is missing or in the way, or no such drafter."""
    check_source(config.source)
    out = Path(config.out)
    if out.is_dir() or (out.exists() and out.samefile(config.source)):
        raise ValueError(f"out: {out} is {'a folder' if out.is_dir() else 'the source'}; give another file")
    if out.exists() and not sidecar(config).exists() and not unfinished(config).exists():
        raise ValueError(f"out: {out} exists and was not written by this program; give another file or delete it")
    if config.drafter is not None:
        check_method(config.drafter.drafter)
        path = (config.drafter.model_extra or {}).get("checkpoint")
        check_model(path if isinstance(path, str) else None, "drafter.checkpoint")
    if config.endpoint is not None:
        config.endpoint.check()
    check_model(config.target, "target", config.revision)


def sidecar(config: RegenerateConfig) -> Path:
    """``<out>.json``: it exists once the output is whole."""
    return Path(f"{config.out}.json")


def unfinished(config: RegenerateConfig) -> Path:
    """The folder of the journals."""
    return Path(f"{config.out}.unfinished")


def _parse(arguments: list[str] | None) -> tuple[RegenerateConfig, Rank]:
    parser = CommandLine("data_prep.regenerate", __doc__, "YAML file, see configs/regenerate/", "limit=1000 batch=32")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    rank = find_rank(parsed.rank, parsed.ranks)
    return load_config(RegenerateConfig, parsed.config, parsed.overrides), rank


if __name__ == "__main__":
    run_program(main)
