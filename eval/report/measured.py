"""From a speed config to a report: measure, judge the outputs, write all files."""

from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.common.ranks import Rank
from data_prep.store.lock import folder_lock
from drafters.cli.program import keeping
from drafters.common.files import replace_json, replace_text
from drafters.common.wording import json_object
from drafters.hub.reports import REPORT, read
from drafters.loop.state import until
from eval.configs import SpeedConfig
from eval.figures.accuracy import accuracy
from eval.figures.divergence import tolerance_note
from eval.figures.scores import quantisation_cost
from eval.measure.models import ALONE, Models, answer_ends, chat_of
from eval.measure.other_engines import Engines
from eval.measure.run_journal import RunJournal
from eval.measure.runs import Run
from eval.measure.session import Session, conditions_of, measure_all
from eval.prompts.prompt_files import files_sha256
from eval.report.build import build
from eval.report.by_prompt import as_csv, in_report
from eval.report.charts import save, speedups
from eval.report.html import html
from eval.report.judged import add_coverage, judge
from eval.report.page import markdown, print_table
from eval.report.remarks import shortage_line
from eval.report.tables import say
from eval.report.texts import make_texts

PAGE, PICTURE, HTML, PROMPTS = "report.md", "speedup.png", "report.html", "prompts.csv"


def measure_and_report(
    config: SpeedConfig,
    argv: list[str],
    console: Console,
    models: Models | None = None,
    engines: Engines | None = None,
    rank: Rank = ALONE,
) -> dict[str, Any]:
    """Measure, write the report and print its table; return the report.

    Args:
        models: the loaded models of ``config.target``, if there are any.
        engines: other engines, which take turns with our methods.
        rank: rank among the processes that share the prompts. The last to end writes the report; the others return {}.

    Raises:
        ValueError: something configured is missing or does not fit; raised before anything is measured.
        MeasurementError: a needed method failed.
        OSError: a file could not be written.
    """
    session = Session(config, argv, models, engines, rank)
    session.facts["divergence_tolerance"] = tolerance_note(session.models.target)
    if shortage := shortage_line(session.prompts.describe()):
        say(console, shortage, "bold red")
    opening = RunJournal(config.out, session.identity(), session.facts, session.labels, rank)
    with opening as journal, keeping(journal.resume_notice):
        for note in journal.notes:
            say(console, note)
        measure_all(session, journal, rank)
        with folder_lock(config.out):
            if journal.gather():
                return _finish(session, journal, console)
            share = f"{len(journal.runs):,} runs, this process's share, are measured"
            say(console, f"{share}; the last process writes the report")
            return {}


def _finish(session: Session, journal: RunJournal, console: Console) -> dict[str, Any]:
    """Judge the outputs in the journal and write the report."""
    config, models, prompts, runs = session.config, session.models, session.prompts.measured, journal.runs
    if models.target.quantize is not None:
        plain = [run for run in runs if run.method == session.plain and run.round == 0]
        texts = [prompts[run.prompt].ids + run.tokens for run in plain]
        session.facts["quantisation"] = quantisation_cost(models.stock, models.target, texts)
    tokenizer, eos = chat_of(config.target).tokenizer, answer_ends(config.target, models.target)

    def marks(outputs: list[Run]) -> dict[str, Any]:
        ended = [until(run.tokens, eos) for run in outputs]
        answers = tokenizer.batch_decode(ended, skip_special_tokens=True)
        cut = [tokens[-1] not in eos for tokens in ended]
        return accuracy([prompts[run.prompt] for run in outputs], answers, cut)

    known = session.described, session.plain, prompts
    judged = judge(runs, *known, models.target, marks)
    add_coverage(judged, runs, session.lineup.draft_vocabularies, prompts)
    report = build(session.facts, *known, judged, session.left_out, runs)
    try:
        write_report(report, config.out)
    finally:
        print_table(report, console)  # on a full disk, the screen still has the figures
    replace_text(config.out / PROMPTS, as_csv(in_report(runs, prompts, session.plain)))
    replace_text(config.out / HTML, html(report, make_texts(runs, *known, tokenizer)))
    save(speedups(report), config.out / PICTURE)
    journal.finish()  # last: after a kill, the same command writes all files again
    say(console, ", ".join(str(config.out / name) for name in (HTML, PAGE, REPORT, PICTURE, PROMPTS)))
    return report


def finished_report(config: SpeedConfig) -> dict[str, Any] | None:
    """Return the report in ``config.out`` if this config was measured with the same code, machine and files."""
    file = config.out / REPORT
    if not file.is_file():
        return None
    try:
        report = json_object(file, str(file))
        facts = report["environment"]
        same = facts["config"] == config.model_dump(mode="json")
        same = same and facts["prompt_set"]["sha256"] == files_sha256(config.prompts.read_files)
        same = same and all(facts[name] == value for name, value in conditions_of(config).items())
    except (ValueError, KeyError, TypeError):
        return None  # of another program or version: measured again and replaced
    return read(file) if same else None


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write report.json (strict JSON: a NaN is an error) and report.md.

    The pictures and tables of an earlier report are deleted, because they show another run.
    """
    replace_json(out / REPORT, report)
    for name in (PICTURE, HTML, PROMPTS):
        (out / name).unlink(missing_ok=True)
    replace_text(out / PAGE, markdown(report, PICTURE))
