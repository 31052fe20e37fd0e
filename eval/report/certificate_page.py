"""The page of a certificate of losslessness, made from its JSON."""

from typing import Any

from eval.figures.certificate import LOSSLESS, LOSSY, NOT_LOSSLESS, UNDECIDED
from eval.report.tables import machine_line, number, run_again, software_line, table, target_line

SHOWN_DIVERGENCES = 20
STATEMENTS = {
    LOSSLESS: "the tests found no difference",
    NOT_LOSSLESS: "its output is not the target's",
    UNDECIDED: "no difference found, but too little was tested",
    LOSSY: "the method may change the target's output: there is nothing to certify",
}
ABOUT = """\
Greedy: every token is compared with the argmax of transformers' own model, given the whole text before it. Rounding
explains a difference if both logits are so close that it decides.

Sampled: the vocabulary is laid out on [0, 1), each token with the length of its probability under the target given the
text before; a token's place is a uniform point in its piece. Places of tokens that are drawn from the target are
uniform and independent, with any draft; each line is one chi-square test of that with 8 bins. Tokens are laid out by
falling probability of the target, or by the ratio of the draft's probability to the target's. Lines are chosen by what
was known before their tokens were drawn. *would have caught*: the total variation between the places and the uniform
distribution that this test finds with a probability of {power:.0%}. Differences that cancel out over the tokens of a
line, or within an eighth of the scale, show in none. Bonferroni: *p* is the smallest p-value times the number of tests;
a lossless drafter fails with a probability of at most {alpha:g}."""


def verdict_line(certificate: dict[str, Any]) -> str:
    """Return the verdict and its figures in one line."""
    name, sampled = certificate["drafter"]["name"], certificate["sampled"]
    line = f"{name}: {certificate['verdict']} ({STATEMENTS[certificate['verdict']]})"
    if sampled is None:
        return line
    distance = next((test["distance"] for test in sampled["tests"]), None)
    return (
        f"{line}; sampled p = {sampled['p_value']:.2g} on {sampled['tokens']:,} tokens, a total variation of "
        f"{number(distance, 3)} would have been found with a probability of {sampled['power']:.0%}"
    )


def markdown(certificate: dict[str, Any]) -> str:
    """Return ``lossless.md``."""
    facts, sampled = certificate["environment"], certificate["sampled"]
    lines = [
        f"# {certificate['drafter']['name']}: {certificate['verdict']}",
        "",
        f"**{verdict_line(certificate)}.**",
        "",
    ]
    lines += [f"- **{reason}**" for reason in certificate["reasons"]]
    lines += [target_line(facts), machine_line(facts), software_line(facts), ""]
    for shape in certificate.get("shapes") or [certificate]:
        if shape["sampled"] is None:
            continue
        if "name" in shape:
            lines += [f"# Certified: {shape['name']}, {shape['verdict']}", ""]
            lines += [*(f"- {reason}" for reason in shape["reasons"]), ""]
        lines += [*_greedy(shape["greedy"]), *_sampled(shape["sampled"], facts["config"])]
    if sampled is not None:
        lines += [ABOUT.format(**sampled), ""]
    return "\n".join([*lines, *run_again(facts["argv"])])


def _greedy(parts: list[dict[str, Any]]) -> list[str]:
    head = ["dtype", "texts", "tokens", "texts without a difference", "differences", "of them unexplained"]
    rows = [
        [part["dtype"], f"{part['texts']:,}", f"{part['tokens']:,}", f"{part['exact_texts']:,}"]
        + [f"{len(part['divergences']):,}", f"{part['unexplained']:,}"]
        for part in parts
    ]
    lines = ["## Greedy", "", *table(head, rows), ""]
    for part in parts:
        worst = sorted(part["divergences"], key=lambda each: (each["explained"], -each["gap"]))
        if worst:
            cells = [
                [str(each["prompt"]), str(each["position"])]
                + [f"{each[key]:.2g}" for key in ("margin", "gap", "tolerance")]
                + ["yes" if each["explained"] else "**no**"]
                for each in worst[:SHOWN_DIVERGENCES]
            ]
            titles = ["text", "position", "top-2 margin", "below the best logit", "rounding explains", "explained"]
            shown = f"the {len(cells)} largest of {len(worst)}" if len(worst) > len(cells) else "all"
            lines += [f"Differences in {part['dtype']} ({shown}), in logits:", "", *table(titles, cells), ""]
    return lines


def _sampled(sampled: dict[str, Any], config: dict[str, Any]) -> list[str]:
    filters = f"top-k {config['top_k'] or 'off'}, top-p {config['top_p']:g}"
    ends = sampled["ends"]
    orders = {"target": "the target's", "draft": "the draft's"}
    rows = [
        [test["tokens"], orders[test["order"]], f"{test['count']:,}", f"{test['p_value']:.2g}"]
        + [f"{test['distance']:.3f}"]
        for test in sampled["tests"]
    ]
    lines = [
        f"## Sampled, temperature {config['temperature']:g}, {filters}",
        "",
        f"- {sampled['texts']:,} texts, {sampled['tokens']:,} tokens; drafts {sampled['longest_draft']} tokens deep",
        f"- p = {sampled['p_value']:.2g}; it fails below {sampled['alpha']:g}, a single test below "
        f"{sampled['level']:.1e}",
        f"- texts that ended: {ends['observed']:,}, expected {ends['expected']:.1f} "
        f"(p = {sampled['ends_p_value']:.2g}); tokens outside of the target's distribution: {sampled['outside']:,}",
        "",
        *table(["tokens", "laid out by", "number", "p-value", "would have caught"], rows, texts=2),
        "",
    ]
    if sampled["untested"]:
        few = ", ".join(f"{name} ({count:,})" for name, count in sampled["untested"].items())
        lines += [f"Too few to test: {few}.", ""]
    return lines
