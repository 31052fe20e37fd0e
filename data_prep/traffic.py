"""Split the log of a server into train.jsonl, valid.jsonl and heldout.jsonl, by conversation and time.

    python -m data_prep.traffic log.jsonl --target MODEL --out runs/adapted/traffic [--conversations 2000]

Reads our own records and logs of OpenAI-compatible servers (data_prep/dialogues/served.py), of any size, from the
newest conversation on. The newest fifth is held out; each of its conversations is one prompt, its last request. The
tenth before is for choosing weights. Repeated prompts are dropped, and held-out conversations whose questions were all
asked before, in this order. The prompts' numbers of tokens are compared with the server's, which shows another
tokenizer or template. Prints counts, and writes counts and a hash of the log; the records' ids are numbers.
"""

from pathlib import Path

from data_prep.configs import CONVERSATIONS
from data_prep.dialogues.reader import check_source
from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.traffic", __doc__)
    parser.add_argument("log", help="JSON lines, gzipped or not: a request with its response in each")
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model that answered")
    parser.add_argument("--out", required=True, type=Path, help="folder of the three files and traffic.json")
    parser.add_argument(
        "--conversations", type=positive, default=CONVERSATIONS, help=f"most, the newest (default {CONVERSATIONS})"
    )
    parser.add_argument("--chat-template", help="file with the Jinja template that the server used, if not the model's")
    parsed = parser.parse(arguments)
    check_source(parsed.log)
    check_model(parsed.target, "--target")
    check_folder(parsed.out, "--out")
    if parsed.chat_template is not None and not Path(parsed.chat_template).is_file():
        raise ValueError(f"--chat-template: no file {parsed.chat_template}")

    from data_prep.answers.traffic import write_traffic

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        write_traffic(parsed)


if __name__ == "__main__":
    run_program(main)
