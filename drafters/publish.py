"""Publish a trained drafter on the Hub, with a model card that says what was measured.

    python -m drafters.publish runs/eagle you/your-drafter --certificate runs/lossless --report runs/speed/x

--certificate takes the folder (or lossless.json) that eval.lossless wrote, --report the folder (or report.json) of
eval.speed; of another target or method they are refused. --card F writes the card into F and publishes nothing.
"""

from pathlib import Path

from drafters.card_evidence import CERTIFICATE, REPORT, check_card, read_evidence
from drafters.program import CommandLine, run_program


def main(arguments: list[str] | None = None) -> None:
    """Publish a checkpoint, or write its card."""
    parser = CommandLine("drafters.publish", __doc__)
    parser.add_argument("folder", type=Path, help="of a trained drafter")
    parser.add_argument("repo_id", help="of the Hub, as user/my-drafter")
    parser.add_argument("--certificate", type=Path, help="of eval.lossless: a folder, or its lossless.json")
    parser.add_argument("--report", type=Path, help="of eval.speed: a folder, or its report.json")
    parser.add_argument("--license", help="an identifier of the Hub; without, the card names none")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is new")
    parser.add_argument("--card", type=Path, help="write the card into this file, and publish nothing")
    given = parser.parse(arguments)

    check_card(given.folder, given.certificate, given.report)
    for evidence, name in ((given.certificate, CERTIFICATE), (given.report, REPORT)):
        if evidence is not None:
            read_evidence(evidence, name)

    from drafters.checkpoint import card_of, push_to_hub

    options = {"license": given.license, "certificate": given.certificate, "report": given.report}
    if given.card is not None:
        given.card.write_text(card_of(given.folder, given.repo_id, **options), encoding="utf-8")
        print(given.card)
    else:
        print(push_to_hub(given.folder, given.repo_id, private=given.private or None, **options))


if __name__ == "__main__":
    run_program(main)
