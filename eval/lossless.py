"""Does a drafter keep the target's output? A certificate, with the smallest difference it would have found.

    python -m eval.lossless --target T --drafter D [key=value ...]
    python -m eval.lossless --config F [key=value ...]

D is a method without training (``prompt_lookup``; an option is ``drafter.gamma=4``) or the folder of a trained drafter.
Greedy, every token must be the target's argmax given the text before it, in float32 and in bfloat16; each difference is
listed, and rounding must explain it. Sampled, many short texts are tested against the target's own probabilities, from
plain forwards of transformers' model. Without a prompt file the target samples the beginnings.

Writes lossless.json and lossless.md into ``out``. The exit status is 0 for a drafter that passed.
"""

import json
from pathlib import Path
from typing import Any

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import from_overrides, load_config
from drafters.methods import method_names
from eval.configs import LosslessConfig
from eval.entries import check_entries
from eval.prompts.choice import check_prompt_files


def drafter_entry(drafter: str) -> dict[str, Any]:
    """Return ``--drafter`` as a config's entry; ValueError if it is neither a method nor a trained drafter."""
    folder = Path(drafter).expanduser()
    if drafter in method_names() or not ("/" in drafter or folder.is_dir()):
        return {"drafter": drafter}
    try:
        method = json.loads((folder / "config.json").read_text(encoding="utf-8"))["drafter_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"--drafter {drafter} is no folder of a trained drafter ({type(error).__name__}: {error}); give a method "
            f"or such a folder. On the Hub: --drafter METHOD drafter.checkpoint={drafter}; a draft model: --drafter "
            f"speculative drafter.draft_model={drafter}"
        ) from None
    return {"drafter": method, "checkpoint": drafter}


def read_config(parsed: Any) -> LosslessConfig:
    """Return the config: the file's keys, if there is one, then --target and --drafter, then ``key=value``."""
    options: dict[str, str] = {}
    if parsed.target is not None:
        options["target.path"] = parsed.target
    if parsed.drafter is not None:
        options |= {f"drafter.{key}": value for key, value in drafter_entry(parsed.drafter).items()}
    overrides = [*(f"{key}={json.dumps(value)}" for key, value in options.items()), *parsed.overrides]
    if parsed.config is not None:
        return load_config(LosslessConfig, parsed.config, overrides)
    missing = [f"--{name}" for name in ("target", "drafter") if getattr(parsed, name) is None]
    if missing:
        raise ValueError(f"give {' and '.join(missing)}, or --config with a file that says what to certify")
    return from_overrides(LosslessConfig, overrides)


def main(arguments: list[str] | None = None) -> int:
    parser = CommandLine("eval.lossless", __doc__, overrides="texts=4096; see LosslessConfig")
    parser.add_argument("--target", help="folder or Hub repository")
    parser.add_argument("--drafter", help="a method's name, or the folder of a trained drafter")
    parser.add_argument("--config", type=Path, help="YAML, see LosslessConfig")
    parsed = parser.parse(arguments)
    config = read_config(parsed)
    if config.prompts is not None:
        check_prompt_files(config.prompts)
    check_entries([config.drafter], {"target.path": config.target.path})
    check_folder(config.out)

    from eval.figures.certificate import LOSSLESS, certificate
    from eval.report.certificate_page import markdown, verdict_line
    from eval.report.tables import make_console, say, write_page

    console = make_console()
    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        report = certificate(config, parsed.command)
        say(console, verdict_line(report))
        write_page(report, markdown(report), config.out, "lossless", console)
    return 0 if report["verdict"] == LOSSLESS else 1


if __name__ == "__main__":
    run_program(main)
