"""Export a trained draft model in transformers' format, or an adapter in peft's, with its provenance."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.common.files import replace_json, replacing_files
from drafters.common.paths import ADAPTER_CONFIG_FILE
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
    model, text = with_weights(config, weights).model, None
    if config.lora is None:
        model.to(torch.bfloat16)
        target, before = (Path(name).name for name in (provenance["target"]["name"], config.draft_model))
        loss = config.divergence + (f" ({config.beta:g})" if config.divergence == "jsd" else "")
        text = f"A draft model for speculative decoding with `{target}`: `{before}`, aligned with that target by {loss}"
        text = card(config.out, "draft-model", text, provenance["training"])
    write_model(config.out, model, (config.draft_model, None), text, provenance)


def write_model(
    folder: Path, model: Any, source: tuple[str, str | None], text: str | None, provenance: dict[str, Any]
) -> None:
    """Write a model with the tokenizer of ``source`` (name, revision), a card ``text`` and its provenance.

    A process killed meanwhile leaves the older files, the new ones, or a folder that does not load.
    """
    with replacing_files(folder, last=("config.json", ADAPTER_CONFIG_FILE, PROVENANCE)) as new:
        model.save_pretrained(new)
        with contextlib.suppress(ValueError):  # a model may have no tokenizer
            load_bare_tokenizer(*source).save_pretrained(new)
        if text is not None:
            (new / "README.md").write_text(text, encoding="utf-8")
        replace_json(new / PROVENANCE, provenance)


def card(run: Path, tag: str, text: str, training: dict[str, Any]) -> str:
    """A model card."""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, {tag}]
---
# {run.name}

{text}, {training["tokens"]:,} tokens in {training["steps"]:,} steps. `{PROVENANCE}` has the rest.
"""
