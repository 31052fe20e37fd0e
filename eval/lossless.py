"""Does a drafter leave the target's output as it is? A certificate, with what it would have noticed.

    python -m eval.lossless --target T --drafter D [key=value ...]
    python -m eval.lossless --config F [key=value ...]

D is a method that needs no training (``prompt_lookup``; its options are ``drafter.gamma=4``) or the folder of a
trained drafter. Greedy, every token must be the target's argmax given the text before it: in float32, and in bfloat16
but where rounding explains the difference; each is listed. Sampled, many short texts are tested against the target's
own probabilities, which transformers' model gives by plain forwards; the page says how far off the output could be
without being noticed. Without a prompt file the target begins the texts itself.

Writes lossless.json and lossless.md into ``out``. The exit status is 0 for a drafter that passed.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import Amount, Config, Dtype, Length, Seed, Size, Vocabulary, from_overrides, load_config
from drafters.methods import method_names
from eval.measure.entries import DrafterEntry, check_entries
from eval.prompts.prompts import PromptsConfig, check_prompt_files
from eval.speed import TargetEntry

TRAINED = "config.json"  # of a checkpoint's folder


class ExactTarget(TargetEntry):
    """The target, by default in float32, where nothing may differ."""

    dtype: Dtype = "float32"


class LosslessConfig(Config):
    """All paths are relative to the working directory."""

    target: ExactTarget
    drafter: DrafterEntry
    prompts: PromptsConfig | None = Field(None, description="None: the target begins them, by sampling")
    begun: Amount = Field(32, ge=1, description="prompts, where the target begins them")
    begun_tokens: Length = Field(16, ge=1, description="of each of those")
    greedy_tokens: Length = Field(128, ge=1, description="new ones, of every greedy text")
    rounded: Dtype | None = Field(
        "auto", description="greedy texts in this dtype, too, if it is another than target.dtype; None: in none"
    )
    texts: Amount = Field(512, ge=1, description="sampled")
    new_tokens: Length = Field(32, ge=2, description="of a sampled text, at most")
    temperature: float = Field(1.0, gt=0)
    top_k: Vocabulary = Field(0, ge=0, description="0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="1 is off")
    batch: Size = Field(16, ge=1, description="prompts decoded together, if the drafter takes more than one")
    alpha: float = Field(1e-4, gt=0, lt=1, description="the chance that a lossless drafter fails the sampled test")
    threads: Size | None = Field(None, ge=1, description="CPU threads; None: by the load of other processes")
    seed: Seed = Field(0, ge=0)
    out: Path = Path("runs/lossless")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.drafter.grid is not None or self.drafter.temperatures is not None:
            raise ValueError("drafter takes no grid and no temperatures here: one certificate is of one drafter")
        if self.target.quantize is not None:
            raise ValueError(
                f"target.quantize is {self.target.quantize!r}, and transformers' model, by which tokens are judged, is "
                "not quantised: leave it out"
            )
        return self


def drafter_entry(given: str) -> dict[str, Any]:
    """What ``--drafter`` says, as a config's entry.

    Raises:
        ValueError: it is neither a method nor a trained drafter.
    """
    folder = Path(given).expanduser()
    if given not in method_names() and ("/" in given or folder.is_dir()):
        import json

        file = folder / TRAINED
        if not file.is_file():
            raise ValueError(
                f"--drafter {given}: there is no {file}; give a method, the folder of a trained drafter, or, of one on "
                f"the Hub, its method and drafter.checkpoint={given}"
            )
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--drafter {given}: {file} is not valid JSON ({error})") from None
        method = found.get("drafter_type") if isinstance(found, dict) else None
        if not isinstance(method, str):
            raise ValueError(
                f"--drafter {given}: {file} names no drafter_type; a draft model is an option of a method: "
                f"--drafter speculative drafter.draft_model={given}"
            )
        return {"drafter": method, "checkpoint": given}
    return {"drafter": given}


def check(config: LosslessConfig) -> None:
    """Check what can be checked before the target is loaded.

    Raises:
        ValueError: an unknown method, files or folders that are not there, or an ``out`` that cannot be written to.
    """
    if config.prompts is not None:
        check_prompt_files(config.prompts)
    check_entries([config.drafter], {"target.path": config.target.path})
    check_folder(config.out)


def read_config(parsed: Any) -> LosslessConfig:
    """The file's keys, where there is one; then --target and --drafter; then ``key=value``.

    Raises:
        ValueError: a key or a value is wrong, or there is no target or drafter.
    """
    given: list[str] = []
    if parsed.target is not None:
        given.append(_override("target.path", parsed.target))
    if parsed.drafter is not None:
        given += [_override(f"drafter.{key}", value) for key, value in drafter_entry(parsed.drafter).items()]
    if parsed.config is not None:
        return load_config(LosslessConfig, parsed.config, [*given, *parsed.overrides])
    missing = [f"--{name}" for name in ("target", "drafter") if getattr(parsed, name) is None]
    if missing:
        raise ValueError(f"give {' and '.join(missing)}, or --config with a file that says what to certify")
    return from_overrides(LosslessConfig, [*given, *parsed.overrides])


def _override(key: str, value: str) -> str:
    import json

    return f"{key}={json.dumps(value)}"


def main(arguments: list[str] | None = None) -> int:
    """Certify a drafter and write its page."""
    parser = CommandLine("eval.lossless", __doc__, overrides="texts=4096; see LosslessConfig")
    parser.add_argument("--target", help="folder or Hub repository")
    parser.add_argument("--drafter", help="a method's name, or the folder of a trained drafter")
    parser.add_argument("--config", type=Path, help="YAML, see LosslessConfig")
    parsed = parser.parse(arguments)
    config = read_config(parsed)
    check(config)

    from eval.lossless_run import run
    from eval.report.screen import make_console

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        return 0 if run(config, parsed.command, make_console())["verdict"] == "lossless" else 1


if __name__ == "__main__":
    run_program(main)
