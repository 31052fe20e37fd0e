"""Talk to a target with a drafter, and see which tokens were drafted.

    python -m drafters.chat --target T --drafter D [--compare] [key=value ...]

D is a trained drafter's folder or Hub repository, a method that needs no training (``prompt_lookup``, ``suffix``, ...)
or ``none``. ``key=value`` are the drafter's options: tree=auto draft_vocab=8192; for a hybrid head.drafter=eagle
head.checkpoint=F head.tree=auto. Drafted tokens that were accepted are coloured, each drafter's in its own colour;
after each answer come tau and tokens/s. --compare has plain decoding answer the same. Ctrl-C stops an answer, /reset
begins a new conversation, /quit or Ctrl-D ends.
"""

from pathlib import Path
from typing import Any, get_args

from pydantic import ConfigDict, Field

from drafters.cli.program import CommandLine, positive, run_program
from drafters.common.paths import check_model
from drafters.config import Config, Dtype, Quantization, Seed, from_overrides, validate
from drafters.methods import check_method, method_names

NONE = "none"


class Options(Config):
    """Options of a drafter, which checks them when it is built."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Sampled(Config):
    """How answers are sampled."""

    temperature: float = Field(ge=0.0)
    seed: Seed


def is_method(drafter: str) -> bool:
    """True if --drafter names a method, False if it names a trained drafter.

    Raises:
        ValueError: it is neither.
    """
    if drafter == NONE or drafter in method_names():
        return True
    if "/" not in drafter and not Path(drafter).is_dir():
        check_method(drafter)
    return False


def main(arguments: list[str] | None = None) -> None:
    """Hold a conversation on this terminal, or with what is piped in."""
    parser = CommandLine("drafters.chat", __doc__, overrides="gamma=4")
    parser.add_argument("--target", required=True, help="folder or Hub repository, with its tokenizer")
    parser.add_argument("--drafter", required=True, help="a folder, a Hub repository, a method's name, or none")
    parser.add_argument("--compare", action="store_true", help="answer with plain decoding, too")
    parser.add_argument("--temperature", default="0", help="0, the default, is greedy")
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="of an answer; default 512")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto", help="default auto: bf16 where it is fast")
    parser.add_argument("--quantize", choices=get_args(Quantization), help="the target's layers")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--seed", default="0", help="of sampling; default 0")
    parsed = parser.parse(arguments)
    sampled = validate(Sampled, {"temperature": parsed.temperature, "seed": parsed.seed}, "the command line")
    parsed.temperature, parsed.seed = sampled.temperature, sampled.seed
    method = is_method(parsed.drafter)
    options: dict[str, Any] = from_overrides(Options, parsed.overrides).model_dump()
    check_model(parsed.target, "--target")
    if not method:
        check_model(parsed.drafter, "--drafter", options.get("revision"))
    if parsed.drafter == NONE and parsed.compare:
        raise ValueError("--compare decodes without a drafter, too, and --drafter none is that: leave one of them out")

    from drafters.cli.chat import run

    run(parsed, method, options)


if __name__ == "__main__":
    run_program(main)
