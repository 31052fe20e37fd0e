"""The model card of a published drafter: what it is, for which target, how it was trained, how to use it.

The card states what ``config.json`` records and the figures that it is given; it claims nothing of its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK, metadata_load

from drafters.common.paths import names_only
from drafters.hub.card_evidence import losslessness, measured, model_index
from drafters.hub.reports import Certificate, read

_KNOWN = {  # other types show their own name
    "eagle": "EAGLE autoregression head ([EAGLE](https://arxiv.org/abs/2401.15077))",
    "medusa": "Medusa heads ([Medusa](https://arxiv.org/abs/2401.10774))",
    "kangaroo": "Kangaroo adapter ([Kangaroo](https://arxiv.org/abs/2404.18911))",
}

OTHER_TARGET = (
    " That target was tuned from `{}` together with these heads and is another model: what they preserve is its output."
)


@dataclass(frozen=True)
class Card:
    """What a card says beside ``config.json``.

    Attributes:
        license: an identifier of the Hub; None leaves it out, for only its author can choose one.
        figures: measured values by name, each with its conditions in the name ("tau, greedy, held-out").
        certificate, report: of ``eval.lossless`` and ``eval.speed``: their JSON, or its file or folder.
        base_model: the target's Hub repository, where the drafter was trained upon a copy of it on a disk.
        datasets: what it was trained on, as the Hub calls it.
        serving: how engines serve it, in Markdown.
    """

    license: str | None = None
    figures: Mapping[str, str | float] | None = None
    certificate: str | Path | Mapping[str, Any] | None = None
    report: str | Path | Mapping[str, Any] | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    serving: str = ""


def model_card(config: Mapping[str, Any], repo_id: str, parameters: int, card: Card | None = None) -> str:
    """The text of ``README.md`` for a checkpoint's ``config``, to be published as ``repo_id``.

    Args:
        config: the content of ``config.json``.
        parameters: how many weights the drafter has.

    Raises:
        ValueError: the certificate or the report is of another method or target, or no such file.
    """
    card, config = card or Card(), names_only(config)
    report = None if card.report is None else names_only(read(card.report))
    kind, target, base = config["drafter_type"], config["target"], config.get("base")
    base_name = shown_name(base["name"]) if base else None
    tuned = config.get("training", {}).get("tuned_from")
    target_name = card.base_model or shown_name(target["name"])
    on_hub = card.base_model is not None or is_hub_id(target["name"])
    front: dict[str, Any] = {"library_name": "drafters", "tags": ["speculative-decoding", kind, "custom_generate"]}
    if card.license:
        front["license"] = card.license
    if on_hub:
        front["base_model"] = target_name
        front["base_model_relation"] = "adapter"
    data = str(config.get("training", {}).get("data", ""))
    if datasets := [*dict.fromkeys([*card.datasets, *([data] if is_hub_id(data) else [])])]:
        front["datasets"] = datasets
    if report is not None:
        front["model-index"] = model_index(repo_id.split("/")[-1], config, report)
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=True)}---",
        f"# {repo_id.split('/')[-1]}",
        f"A drafter for speculative decoding: {_KNOWN.get(kind, kind)} with {parameters:,} weights, trained for the "
        f"target `{target_name}`. It works with that target only."
        + (f" A LoRA on the drafter `{base_name}`, merged into it when it is loaded." if base_name else "")
        + (OTHER_TARGET.format(shown_name(tuned["name"])) if tuned else ""),
        "## Use\n\n" + _usage(target_name, target.get("revision"), repo_id, base_name),
        "Or within transformers, whose `generate` then takes what it takes as ever (the library must be installed):\n\n"
        + _within_transformers(target_name, target.get("revision"), repo_id),
        *([card.serving] if card.serving else []),
        "## Target\n\n" + _table({**target, "name": target_name}),
    ]
    more = {"Options": config.get("drafter"), "Training": config.get("training"), "Measured": names_only(card.figures)}
    sections += [f"## {title}\n\n{_table(values)}" for title, values in more.items() if values]
    if card.certificate is not None:
        sections.append(losslessness(config, names_only(read(card.certificate, Certificate))))
    if report is not None:
        sections.append(measured(config, report))
    return "\n\n".join(sections) + "\n"


def with_header(file: Path, card: Card) -> str:
    """The text of a card that its author wrote, with what ``card`` says of license, target and data in its header.

    Raises:
        ValueError: its header is no YAML mapping.
    """
    text = file.read_text(encoding="utf-8-sig")
    new: dict[str, Any] = {"license": card.license, "base_model": card.base_model, "datasets": card.datasets}
    if not any(new.values()):
        return text
    try:
        header = metadata_load(file) or {}
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: the header is no YAML mapping ({reason}); correct it") from None
    known = header.get("datasets") or []
    new["datasets"] = [*dict.fromkeys([*([known] if isinstance(known, str) else known), *card.datasets])]
    header |= {key: value for key, value in new.items() if value}
    body = REGEX_YAML_BLOCK.sub("", text, count=1)
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n{body}"


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can only be a Hub repository ("user/name") and not a folder of this machine."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def shown_name(name: str) -> str:
    """A local path is nobody else's business."""
    return name if is_hub_id(name) else Path(name).name


def _usage(target_name: str, revision: str | None, repo_id: str, base_name: str | None) -> str:
    drafter = f"{base_name!r}, target, adapter={repo_id!r}" if base_name else f"{repo_id!r}, target"
    pinned = f", revision={revision!r}" if revision else ""
    return "\n".join(
        [
            "```python",
            "from drafters import TargetModel, generate, load_drafter",
            "from transformers import AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({target_name!r}{pinned})",
            f"target = TargetModel.from_pretrained({target_name!r}{pinned})",
            f"drafter = load_drafter({drafter})",
            'input_ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
            "result = generate(target, drafter, input_ids, max_new_tokens=128)",
            "print(tokenizer.decode(result.tokens[0]))",
            "```",
        ]
    )


def _within_transformers(target_name: str, revision: str | None, repo_id: str) -> str:
    pinned = f", revision={revision!r}" if revision else ""
    return "\n".join(
        [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({target_name!r}{pinned})",
            f'model = AutoModelForCausalLM.from_pretrained({target_name!r}, dtype="auto"{pinned})',
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "output = model.generate(",
            f"    **inputs, max_new_tokens=128, custom_generate={repo_id!r}, trust_remote_code=True",
            ")",
            "print(tokenizer.decode(output[0]))",
            "```",
        ]
    )


def _table(values: Mapping[str, Any]) -> str:
    """A Markdown table of ``values``; nested mappings become dotted names, as in an override."""
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in _flat(values)]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            rows.append((f"{prefix}{key}", value))
    return rows


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
