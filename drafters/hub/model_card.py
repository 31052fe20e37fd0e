"""The model card of a published drafter: its method, its target, how to use it, and what was measured.

The card repeats ``config.json``, a certificate of eval.lossless and a report of eval.speed. It adds no figures.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from drafters.common.fingerprints import same_weights
from drafters.common.paths import names_only, shown_names
from drafters.hub.reports import Certificate, read

CARD_FILE = "README.md"
NOT_OPTIONS = ("name", "label", "temperatures", "grid", "drafter", "checkpoint")  # of a certificate's drafter
Found = Mapping[str, Any]

TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

A drafter for speculative decoding: {{ title }} with {{ weights }} weights, trained for the target `{{ target }}`. \
It works with that target only.
{%- if base %} It is a LoRA on the drafter `{{ base }}`, and is merged into it when it is loaded.{% endif %}
{%- if tuned_from %} That target was tuned from `{{ tuned_from }}` together with these heads and is another model: the \
drafter preserves its output.{% endif %}

## Use

```python
from drafters import TargetModel, generate, load_drafter
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ pinned }})
target = TargetModel.from_pretrained({{ pinned }})
drafter = load_drafter({{ loaded }})
input_ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
result = generate(target, drafter, input_ids, max_new_tokens=128)
print(tokenizer.decode(result.tokens[0]))
```

The library is the distribution `learned-drafters`, whose imports are `drafters`; install it from its checkout with \
`pip install .`. `drafters` on the package index is another project.

Or in transformers' own `generate`, if the library is installed:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ pinned }})
model = AutoModelForCausalLM.from_pretrained({{ pinned }}, dtype="auto")
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(
    **inputs, max_new_tokens=128, custom_generate={{ repo_id }}, trust_remote_code=True
)
print(tokenizer.decode(output[0]))
```
{% for section in sections %}
{{ section }}
{% endfor %}"""


@dataclass(frozen=True)
class Card:
    """What a card says beside ``config.json``.

    Attributes:
        title: the method in words; empty shows the drafter's type.
        license: an identifier of the Hub; None leaves it out, because only the author can choose one.
        figures: measured values by name, each with its conditions in the name ("tau, greedy, held-out").
        certificate, report: of ``eval.lossless`` and ``eval.speed``: their JSON, or its file or folder.
        base_model: the target's Hub repository, for a drafter that was trained with a local copy of it.
        datasets: Hub repositories of the training data.
        serving: how engines serve it, in Markdown.
    """

    title: str = ""
    license: str | None = None
    figures: Mapping[str, str | float] | None = None
    certificate: str | Path | Found | None = None
    report: str | Path | Found | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    serving: str = ""


def check_card(folder: Path, *evidence: object) -> None:
    """Raise ValueError if ``folder`` does not exist, or has a card of its own, which lacks the ``evidence`` given."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}; save the drafter first, or give the folder of a trained one")
    if (folder / CARD_FILE).is_file() and any(one is not None for one in evidence):
        raise ValueError(f"{folder / CARD_FILE} would be published without the figures given: remove it")


def published(config: Found, known: Collection[str]) -> dict[str, Any]:
    """``config.json`` as it is published: of the names of files and folders only the last component is left.

    Args:
        known: the names in it that are the Hub's, which stay.
    """
    training = config.get("training") or {}
    named = [config["target"], config.get("base"), training.get("tuned_from")]
    local = {one["name"] for one in named if one} | {str(training.get("data"))}
    found: dict[str, Any] = shown_names(config, known, local)
    return found


def model_card(
    config: Found, repo_id: str, parameters: int, card: Card | None = None, known: Collection[str] = ()
) -> str:
    """The text of ``README.md`` for a drafter to be published as ``repo_id``.

    Args:
        config: the content of ``config.json``.
        known: the names in it that are the Hub's, and may be in the card's header (``CheckpointConfig.hub_names``).
        parameters: number of the drafter's weights.

    Raises:
        ValueError: the certificate or the report is of another method or target, or no such file.
    """
    card, target_on_hub = card or Card(), config["target"]["name"] in known
    config = published(config, known)
    kind, target, training = config["drafter_type"], config["target"], dict(config.get("training") or {})
    training.pop("hub_names", None)
    name, target_name = repo_id.split("/")[-1], card.base_model or target["name"]
    base = config["base"]["name"] if config.get("base") else None
    tables = {"Target": {**target, "name": target_name}, "Options": config.get("drafter"), "Training": training}
    tables["Measured"] = names_only(card.figures)
    sections = [card.serving] if card.serving else []
    sections += [f"## {title}\n\n{_table(values)}" for title, values in tables.items() if values]
    results: list[EvalResult] = []
    if card.certificate is not None:
        sections.append(losslessness(config, _evidence(read(card.certificate, Certificate), known)))
    if card.report is not None:
        report = _evidence(read(card.report), known)
        sections.append(measured(config, report))
        results = eval_results(config, report)
    on_hub, data = card.base_model or target_on_hub, str(training.get("data", ""))
    datasets = [*card.datasets, *([data.split(":")[0]] if data in known else [])]  # without configuration and split
    pinned = f", revision={target['revision']!r}" if target.get("revision") else ""
    header = ModelCardData(
        library_name="drafters",
        tags=["speculative-decoding", kind, "custom_generate"],
        license=card.license,
        base_model=target_name if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
        datasets=[*dict.fromkeys(datasets)] or None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    made = ModelCard.from_template(
        header,
        template_str=TEMPLATE,
        name=name,
        title=card.title or kind,
        weights=f"{parameters:,}",
        target=target_name,
        base=base,
        tuned_from=training["tuned_from"]["name"] if training.get("tuned_from") else None,
        pinned=f"{target_name!r}{pinned}",
        loaded=f"{base!r}, target, adapter={repo_id!r}" if base else f"{repo_id!r}, target",
        repo_id=repr(repo_id),
        sections=sections,
    )
    return f"{str(made).rstrip()}\n"


def with_header(file: Path, card: Card) -> str:
    """The text of a card that its author wrote; license, target and data of ``card`` are added to its header.

    Raises:
        ValueError: its header is no YAML mapping.
    """
    text = file.read_text(encoding="utf-8-sig")
    if not (card.license or card.base_model or card.datasets):
        return text
    try:
        written = ModelCard(text if text.startswith("---") else f"---\n{{}}\n---\n{text}")
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: the header is no YAML mapping ({reason}); correct it") from None
    data: Any = written.data
    known = data.datasets or []
    data.license, data.base_model = card.license or data.license, card.base_model or data.base_model
    data.datasets = [*dict.fromkeys([*([known] if isinstance(known, str) else known), *card.datasets])] or None
    return str(written)


def losslessness(config: Found, certificate: Found) -> str:
    """The section of a certificate; raises ValueError if it is of another method or target than ``config``."""
    _check_target(config, certificate, "the certificate")
    kind, certified = config["drafter_type"], certificate["drafter"]["drafter"]
    if certified != kind:
        raise ValueError(f"the certificate is of the method {certified!r}, and the drafter is of type {kind!r}")
    options = {name: value for name, value in certificate["drafter"].items() if name not in NOT_OPTIONS and value}
    shown = f" ({', '.join(f'{name} {value}' for name, value in options.items())})" if options else ""
    lines = [f"## Losslessness\n\n**{certificate['verdict']}**, by `eval.lossless`{shown}.\n"]
    lines += [f"- {reason}" for reason in certificate["reasons"]]
    lines += [
        f"- greedy, {part['dtype']}: {part['tokens']:,} tokens of {part['texts']:,} texts against transformers' own "
        f"model; {len(part['divergences']):,} differ, {part['unexplained']:,} of them by more than rounding explains"
        for part in certificate["greedy"]
    ]
    if (sampled := certificate["sampled"]) is not None:
        distance = next((f"{test['distance']:.3f}" for test in sampled["tests"]), "-")
        lines.append(
            f"- sampled, {sampled['tokens']:,} tokens against the target's own probabilities: p = "
            f"{sampled['p_value']:.2g}; a total variation of {distance} would have been detected with probability "
            f"{sampled['power']:.0%}"
        )
    return "\n".join([*lines, _command(certificate["environment"])])


def measured(config: Found, report: Found) -> str:
    """The section of a report: rows of the drafter's method and of plain decoding; raises as ``losslessness``."""
    facts, limits = report["environment"], report["environment"]["limits"]
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    lines = [
        f"## Speed\n\nOver plain decoding in the same loop, {facts['dtype']}, on {facts['gpu'] or facts['cpu']} with "
        f"{facts['threads']} threads; {facts['prompt_set']['prompts']} prompts of "
        f"{Path(facts['prompt_set']['file']).name}, at most {limits['max_new_tokens']} new tokens"
        f"{'; ' + versions if versions else ''}. Other machines give other figures.\n",
        "| | temperature | tau | speedup (95% interval) | tokens/s |\n| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in _rows(config, report, "autoregressive"):
        name = row["drafter"].replace("|", "\\|") + ("" if row["lossless"] else " (**lossy**)")
        tau, speedup = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("tau", "speedup"))
        interval = "" if row["speedup_ci"] is None else " ({:.2f} to {:.2f})".format(*row["speedup_ci"])
        speed = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}"
        lines.append(f"| {name} | {row['temperature']:g} | {tau} | {speedup}{interval} | {speed} |")
    return "\n".join([*lines, _command(facts)])


def eval_results(config: Found, report: Found) -> list[EvalResult]:
    """tau and speedup of the drafter's rows, for the card's header; raises as ``losslessness``."""
    workload = Path(report["environment"]["prompt_set"]["file"]).stem  # with its folder it would look like the Hub's
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=workload,
            dataset_name=workload,
            metric_type=metric,
            metric_name=f"{metric}, {row['drafter']}, temperature {row['temperature']:g}",
            metric_value=round(row[metric], 3),
        )
        for row in _rows(config, report)
        for metric in ("tau", "speedup")
        if row[metric] is not None
    ]


def _rows(config: Found, report: Found, *others: str) -> Iterator[Found]:
    """Rows of the drafter's method and of the methods ``others``; raises ValueError if it has none of the first."""
    _check_target(config, report, "the report")
    kind, drafters = config["drafter_type"], report["environment"]["config"]["drafters"]
    entries = {entry.get("label") or entry["drafter"]: entry["drafter"] for entry in drafters}
    methods = [entries.get(row.get("entry"), entries.get(row["drafter"])) for row in report["rows"]]
    if kind not in methods:
        raise ValueError(f"the report has no row of type {kind!r}; it has {', '.join(map(repr, entries))}")
    pairs = zip(report["rows"], methods, strict=True)
    return (row for row, method in pairs if method in (kind, *others))


def _evidence(found: Found, known: Collection[str]) -> dict[str, Any]:
    """A certificate or report without local names. In its command, configs of this toolkit keep their folder."""
    shown: dict[str, Any] = names_only(found)
    argv = [part if part.startswith("configs/") else shown_names(part, known) for part in shown["environment"]["argv"]]
    shown["environment"] |= {"argv": argv}
    return shown | ({"drafter": shown_names(shown["drafter"], known)} if "drafter" in shown else {})


def _command(facts: Found) -> str:
    commit = (facts["commit"] or "unknown")[:12] + (" with local changes" if facts["dirty"] else "")
    return f"\nOf {facts['date'][:10]}, commit {commit}:\n\n    {shlex.join(facts['argv'])}"


def _check_target(config: Found, found: Found, what: str) -> None:
    ours, theirs = config["target"], found["environment"]["target"]
    if not same_weights(ours["fingerprint"], theirs["fingerprint"], what):
        raise ValueError(
            f"{what} is of the target {theirs['name']!r} (fingerprint {theirs['fingerprint']}), and the drafter was "
            f"trained for {ours['name']!r} (fingerprint {ours['fingerprint']})"
        )


def _table(values: Found) -> str:
    """A Markdown table of ``values``; nested mappings become dotted names, as in an override."""
    return "\n".join(["| | |\n| --- | --- |", *(f"| {_cell(key)} | {_cell(value)} |" for key, value in _flat(values))])


def _flat(values: Found, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
