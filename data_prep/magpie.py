"""Let a chat model write questions, if there are no dialogues like those that it will be asked.

    python -m data_prep.magpie --config configs/real/magpie.yaml [--rank 0 --ranks 2] [key=value ...]

A chat model was trained on questions as well as on answers. After its template up to where the user's text would begin,
it writes a question like those that it was tuned on (Magpie, Xu et al. 2024, arXiv 2406.08464, section 2.1). The result
is a ShareGPT file of questions without answers, for ``data_prep.regenerate``. A question is dropped and counted if it
does not end within ``max_new_tokens``, is empty, has a special token, or came before.

After a kill, the same command continues; only the questions in progress are lost. Several processes share the work:
start the command once for each --rank. The last process to finish merges the parts into ``<out>`` and writes settings
and counts to ``<out>.json``.
"""

from data_prep.common.ranks import add_rank_arguments, find_rank
from data_prep.configs import MagpieConfig
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.config import load_config


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.magpie", __doc__, "YAML file, see configs/real/magpie.yaml", "count=1000 batch=32")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load_config(MagpieConfig, parsed.config, parsed.overrides)
    rank = find_rank(parsed.rank, parsed.ranks)
    config.check(rank.count)

    from data_prep.answers.finished import resume_notice
    from data_prep.answers.questions import write_questions

    with keeping(lambda: resume_notice(config.out, "question")):
        write_questions(config, rank)


if __name__ == "__main__":
    run_program(main)
