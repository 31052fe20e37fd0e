"""Export a trained draft model in transformers' format, or an adapter in peft's, with its provenance."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.common.files import replace_json, replacing_files
from drafters.model.files import load_bare_tokenizer
from train.configs import DraftModelConfig
from train.core.lora import copy_weights
from train.draft.module import DraftModule, draft_module

CONFIGS = ("config.json", "adapter_config.json")  # written last: a folder does not load without them


def with_weights(config: DraftModelConfig, weights: dict[str, Tensor]) -> DraftModule:
    """A second module of the run, on the CPU, with copies of ``weights`` in their dtype."""
    with torch.random.fork_rng(devices=[]):
        module = draft_module(config.draft_model, config.lora, attention="sdpa")
    copy_weights(module, weights)
    module.base.tie_weights()
    return module.eval()


def export(config: DraftModelConfig, weights: dict[str, Tensor], provenance: dict[str, Any]) -> None:
    """Write the draft model, or its adapter, into the top of the run folder, replacing an older export.

    A process killed meanwhile leaves the older one, the new one, or a folder that does not load.
    """
    module = with_weights(config, weights)
    with replacing_files(config.out, last=(*CONFIGS, config.provenance_file)) as folder:
        if config.lora is None:
            module.model.to(torch.bfloat16)
            (folder / "README.md").write_text(card(config, provenance), encoding="utf-8")
        module.model.save_pretrained(folder)
        with contextlib.suppress(ValueError):  # a model may have no tokenizer
            load_bare_tokenizer(config.draft_model).save_pretrained(folder)
        replace_json(folder / config.provenance_file, provenance)


def card(config: DraftModelConfig, provenance: dict[str, Any]) -> str:
    """The model card."""
    training, target = provenance["training"], provenance["target"]["name"]
    loss = config.divergence + (f" ({config.beta:g})" if config.divergence == "jsd" else "")
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model]
---
# {Path(config.out).name}

A draft model for speculative decoding with `{Path(target).name}`: `{Path(config.draft_model).name}`, aligned with that
target by {loss}, {training["tokens"]:,} tokens in {training["steps"]:,} steps. `{config.provenance_file}` has the rest.
"""
