"""Measure served engines under load: with how many draft tokens is the server fastest, at which number of requests?

    python -m eval.load --endpoint 2=http://localhost:8002/v1 --endpoint 4=http://localhost:8004/v1 \\
        --baseline http://localhost:8000/v1 --prompts FILE --requests 1,8,32 --out FOLDER [key=value ...]

An endpoint is an OpenAI-style server (vLLM, SGLang); its label is for the tables, for example its number of draft
tokens. Each number of requests is kept in flight until all prompts are answered. The page has tokens/s, time to the
first token, time per token, tau from the server's counters, failed requests, and the ratio to the baseline by prompt.
Servers that do not fit side by side: start one, measure it, start the next and give the same --out.

Writes load.json and load.md into --out after every turn.
"""

import json
from typing import Any

from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.config import from_overrides
from eval.configs import LoadConfig
from eval.prompts.choice import source_key

PLAIN, SERVED = "plain", "served"  # labels of a baseline and of an endpoint that have none


def read_config(parsed: Any) -> LoadConfig:
    """Return the config: the options, then ``key=value``."""
    baseline = [labelled(parsed.baseline, PLAIN)] if parsed.baseline else []
    endpoints = [*baseline, *(labelled(text, SERVED) for text in parsed.endpoint)]
    labels = [label for label, _ in endpoints]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two endpoints are called {repeated[0]!r}; give each a label: --endpoint 4=URL")
    options: dict[str, Any] = {
        "endpoints": dict(endpoints),
        "baseline": labels[0] if baseline else None,
        f"prompts.{source_key(parsed.prompts)}": parsed.prompts,
        "requests": parsed.requests.split(","),
        "model": parsed.model,
        "max_new_tokens": parsed.max_new_tokens,
        "out": parsed.out,
    }
    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    return from_overrides(LoadConfig, [*given, *parsed.overrides])


def labelled(text: str, label: str) -> tuple[str, str]:
    """Return the label and the address of ``label=URL`` or ``URL``."""
    before, equals, url = text.partition("=")
    return (before, url) if equals and "/" not in before else (label, text)


def main(arguments: list[str] | None = None) -> int:
    parser = CommandLine("eval.load", __doc__, overrides="parts=4 extra={ignore_eos: true}; see LoadConfig")
    parser.add_argument("--endpoint", action="append", default=[], metavar="[LABEL=]URL", help="up to /v1; repeatable")
    parser.add_argument("--baseline", metavar="[LABEL=]URL", help="the same target without a drafter")
    parser.add_argument("--prompts", required=True, help="file of dialogues or questions, or a suite")
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests in flight (default 1,8,32)")
    parser.add_argument("--model", help="the server's name of the model (default: the first that it lists)")
    parser.add_argument("--max-new-tokens", type=positive, help="most tokens of an answer (default 128)")
    parser.add_argument("--out", help="folder (default runs/load)")
    parsed = parser.parse(arguments)
    config = read_config(parsed)
    config.check()

    from rich.console import Console

    from eval.figures.load import rows_of
    from eval.measure.load import measure
    from eval.report.load_page import choice_table, figures_table, last_turn, markdown, remarks
    from eval.report.tables import make_console, say, write_page

    console, quiet = make_console(), Console(quiet=True)
    with keeping(lambda: f"turns so far are in {config.out}; to start again: {command()}"):
        for report in measure(config, parsed.command):
            report["rows"] = rows_of(report, config.seed)
            say(console, last_turn(report))
            write_page(report, markdown(report), config.out, "load", quiet)
        for line in [*choice_table(report), "", *figures_table(report["rows"]), *remarks(report)]:
            say(console, line)
        say(console, f"{config.out}/load.md, {config.out}/load.json")
    return 0


if __name__ == "__main__":
    run_program(main)
