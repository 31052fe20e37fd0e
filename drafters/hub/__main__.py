"""Publish a trained drafter on the Hub, with a model card.

    python -m drafters.hub push RUN REPO_ID [--private] [--revision BRANCH] [--certificate F] [--report F] [--dry-run]

RUN is the folder of a training run (its TensorBoard events are sent, too) or of any checkpoint. --certificate takes the
folder (or lossless.json) of eval.lossless, --report the folder (or report.json) of eval.speed; those of another target
or method are refused. --figures takes a JSON file of measured values by name (figures.json of eval.gate). --dry-run
lists the files, and --card F writes the card into F: neither sends anything. The same command continues an interrupted
upload.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_file
from drafters.common.paths import is_hub_id
from drafters.common.wording import json_object, size_text
from drafters.hub.client import check_repo_ids
from drafters.hub.model_card import Card, check_card
from drafters.hub.reports import Certificate, Report, read


def main(arguments: list[str] | None = None) -> None:
    """Publish a checkpoint, or show what would be published."""
    parser = CommandLine("drafters.hub", __doc__)
    parser.add_argument("action", choices=("push",))
    parser.add_argument("folder", type=Path, metavar="RUN", help="of a trained drafter")
    parser.add_argument("repo_id", metavar="REPO_ID", help="of the Hub, as user/my-drafter")
    parser.add_argument("--certificate", type=Path, help="of eval.lossless: a folder, or its lossless.json")
    parser.add_argument("--report", type=Path, help="of eval.speed: a folder, or its report.json")
    parser.add_argument("--figures", type=Path, help="JSON file of measured values by name, for the card")
    parser.add_argument("--license", help="an identifier of the Hub; without, the card names none")
    parser.add_argument("--base-model", help="the target on the Hub, if the drafter was trained upon a folder of it")
    parser.add_argument("--dataset", action="append", default=[], help="on the Hub, that it was trained on; repeatable")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is new")
    parser.add_argument("--revision", help="branch to write to, made if it is not there; default main")
    parser.add_argument("--card", type=Path, help="write the card into this file, and publish nothing")
    parser.add_argument("--dry-run", action="store_true", help="list the files with their sizes, and publish nothing")
    given = parser.parse(arguments)

    check_repo_ids(given.repo_id, given.base_model, *given.dataset)
    if given.card is not None:
        check_file(given.card, "--card")
    check_card(given.folder, given.certificate, given.report, given.figures)
    figures = json_object(given.figures, "--figures") if given.figures is not None else None
    for evidence, schema in ((given.certificate, Certificate), (given.report, Report)):
        if evidence is not None:
            read(evidence, schema)

    from drafters.hub.checkpoint import config_of
    from drafters.hub.publishing import card_of, files_of, push_to_hub
    from drafters.layouts.export import serving
    from drafters.methods import drafter_class

    config = config_of(given.folder)
    if given.base_model is None and not config.records_hub_names and is_hub_id(config.target.name):
        name = config.target.name
        print(f"note: config.json does not say whether {name} is on the Hub; if it is, add --base-model {name}")
    card = Card(
        title=getattr(drafter_class(config.drafter_type), "card_title", ""),
        license=given.license,
        figures=figures,
        certificate=given.certificate,
        report=given.report,
        base_model=given.base_model,
        datasets=tuple(given.dataset),
        serving=serving(given.folder, given.repo_id, given.base_model),
    )
    if given.card is not None:
        given.card.parent.mkdir(parents=True, exist_ok=True)
        given.card.write_text(card_of(given.folder, given.repo_id, card), encoding="utf-8")
        print(given.card)
        return
    files = files_of(given.folder, given.repo_id, card)
    sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in files.items()}
    for name, size in sizes.items():
        print(f"{name:{max(map(len, sizes))}}  {size_text(size):>10}")
    where = f"{given.repo_id}, branch {given.revision or 'main'}"
    print(f"{len(sizes)} files, {size_text(sum(sizes.values()))}, for {where}")
    if not given.dry_run:
        print(push_to_hub(given.folder, given.repo_id, given.private or None, card=card, revision=given.revision))


if __name__ == "__main__":
    run_program(main)
