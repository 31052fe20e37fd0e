"""Export a trained draft model in transformers' format, or an adapter in peft's, with its provenance."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.common.files import replace_json, replacing_files
from drafters.common.paths import ADAPTER_CONFIG_FILE, shown_name, shown_names
from drafters.hub.checkpoint import HUB_NAMES
from drafters.model.files import load_bare_tokenizer
from train.configs import DraftModelConfig
from train.core.lora import copy_weights
from train.draft.module import DraftModule, draft_module

PROVENANCE = "training.json"


def with_weights(config: DraftModelConfig, weights: dict[str, Tensor]) -> DraftModule:
    """A second module of the run, on the CPU, with copies of ``weights`` in their dtype."""
    with torch.random.fork_rng(devices=[]):
        module = draft_module(config.draft_model, config.lora, attention="sdpa")
    copy_weights(module, weights)
    module.base.tie_weights()
    return module.eval()


def export(config: DraftModelConfig, weights: dict[str, Tensor], provenance: dict[str, Any]) -> None:
    """Write the draft model, or its adapter, into the top of the run folder, replacing an older export."""
    model, known, kind = with_weights(config, weights).model, provenance["training"][HUB_NAMES], "A draft model"
    if config.lora is None:
        model.to(torch.bfloat16)
    else:  # peft's own card would name the folder of its base as a model on the Hub
        kind = "An adapter of a draft model"
    target, before = (shown_name(name, known) for name in (provenance["target"]["name"], config.draft_model))
    loss = config.divergence + (f" ({config.beta:g})" if config.divergence == "jsd" else "")
    text = f"{kind} for speculative decoding with `{target}`: `{before}`, aligned with that target by {loss}"
    text = card(
        config.out, "draft-model", text, provenance["training"], "transformers" if config.lora is None else "peft"
    )
    write_model(config.out, model, (config.draft_model, None), text, provenance)


def write_model(
    folder: Path, model: Any, source: tuple[str, str | None], text: str, provenance: dict[str, Any]
) -> None:
    """Write a model with the tokenizer of ``source`` (name, revision), a card ``text`` and its provenance.

    Of local names in the provenance only the last component is written.

    A process killed meanwhile leaves the older files, the new ones, or a folder that does not load.
    """
    with replacing_files(folder, last=("config.json", ADAPTER_CONFIG_FILE, PROVENANCE)) as new:
        model.save_pretrained(new)
        with contextlib.suppress(ValueError):  # a model may have no tokenizer
            load_bare_tokenizer(*source).save_pretrained(new)
        (new / "README.md").write_text(text, encoding="utf-8")
        replace_json(new / PROVENANCE, shown_names(provenance, provenance["training"][HUB_NAMES]))


def card(run: Path, tag: str, text: str, training: dict[str, Any], library: str = "transformers") -> str:
    """A model card."""
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags: [speculative-decoding, {tag}]
---
# {run.name}

{text}, {training["tokens"]:,} tokens in {training["steps"]:,} steps. `{PROVENANCE}` has the rest.
"""
