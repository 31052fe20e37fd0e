"""A target that is tuned together with its Medusa heads (Medusa-2): the module, and its exports."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from drafters.common.files import replace_json, replacing_files
from drafters.common.paths import ADAPTER_CONFIG_FILE
from drafters.hub.checkpoint import TargetIdentity
from drafters.methods.medusa import MedusaHeads
from drafters.model.files import load_bare_tokenizer, model_fingerprint
from train.configs import MedusaConfig
from train.core.attention import NAME, Dialogues
from train.draft.module import DraftModule, causal_module, load_weights

TARGET, HEADS = "target.", "heads."  # prefixes of the module's weights


class JointModule(nn.Module):
    """The target from token ids up to its LM head, whole or with LoRA, and the heads on its features.

    Embeddings and LM head are frozen, because the heads draft through the same LM head.

    Raises:
        ValueError: LoRA on the LM head or the embeddings, or not on the weights of a target's fingerprint.
    """

    def __init__(self, target: DraftModule, heads: MedusaHeads) -> None:
        super().__init__()
        self.target, self.heads = target, heads
        base = target.base
        if target.lora is None:
            base.get_input_embeddings().requires_grad_(False)
            base.get_output_embeddings().requires_grad_(False)
            return
        trained = [name for name, weights in target.model.named_parameters() if weights.requires_grad]
        if ends := [name for name in trained if "lm_head" in name or "embed_tokens" in name]:
            raise ValueError(
                f"joint.lora.targets names {ends[0]}, and embedding and LM head stay as they are; leave it out"
            )
        last = f"layers.{base.config.num_hidden_layers - 1}.self_attn.o_proj."
        if not any(last in name for name in trained):  # else both targets would have the same fingerprint
            raise ValueError("joint.lora.targets leaves o_proj out, which the fingerprint of a target needs; add it")

    @property
    def export_bytes(self) -> int:
        """Bytes of the saved target and heads."""
        base = self.target.base
        target, heads = (sum(weights.numel() for weights in part.parameters()) for part in (base, self.heads))
        return int(target * stored_dtype(base.config).itemsize + 2 * heads)

    def lm_heads(self) -> list[nn.Linear]:
        """The heads have no LM heads of their own."""
        return []

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Dialogues | Tensor | None = None) -> Tensor:
        """Ids and positions ``[R, L]`` -> outputs of target and heads ``[R, L, 1 + K, H]``, before the LM head."""
        features = self.target(input_ids, position_ids, mask)
        return torch.cat([features[..., None, :], self.heads(features)], dim=-2)


def joint_module(
    config: MedusaConfig, shape: PretrainedConfig, heads: MedusaHeads, attention: str = NAME
) -> JointModule:
    """The module of a run, with random weights; ``shape``: the target's configuration."""
    assert config.joint is not None
    target = causal_module("target", config.target, shape, config.joint.lora, attention)
    return JointModule(target, heads)


def of_part(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of TARGET or HEADS, without the prefix."""
    return {name.removeprefix(part): value for name, value in weights.items() if name.startswith(part)}


def tuned_target(config: MedusaConfig, shape: PretrainedConfig, weights: dict[str, Tensor]) -> DraftModule:
    """The tuned target on the CPU in float32: trained weights from a ``JointModule``'s ``weights``, the others from the
    target's files."""
    with torch.random.fork_rng(devices=[]):
        heads = MedusaHeads(shape, config.heads, config.layers, own_lm_heads=False)
        module = joint_module(config, shape, heads, attention="sdpa").target
    load_weights(module, config.target, config.revision)
    trained = of_part(weights, TARGET)
    for name, value in module.named_parameters():
        if value.requires_grad:
            value.data = trained[name].float()
    return module.eval()


def export_tuned(
    config: MedusaConfig, shape: PretrainedConfig, weights: dict[str, Tensor], provenance: dict[str, Any]
) -> TargetIdentity:
    """Write the tuned target into ``target/`` of the run folder, with LoRA also its adapter into ``adapter/``.

    Return the identity of the tuned target, for the heads' checkpoint.

    A process killed meanwhile leaves older ones, new ones, or folders that do not load.
    """
    assert config.joint is not None
    module = tuned_target(config, shape, weights)
    if config.joint.lora is not None:
        module.model.peft_config["default"].revision = config.revision
        with replacing_files(config.out / "adapter", last=(ADAPTER_CONFIG_FILE,)) as folder:
            module.model.save_pretrained(folder)
            (folder / "README.md").write_text(card(config, provenance), encoding="utf-8")
    model = module.merged().to(stored_dtype(shape))  # type: ignore[arg-type]
    base = provenance["target"]
    model.config.tuned_from = {"name": base["name"], "fingerprint": base["fingerprint"]}
    with replacing_files(config.tuned_folder, last=("config.json", "training.json")) as folder:
        model.save_pretrained(folder)
        with contextlib.suppress(ValueError):  # a model may have no tokenizer
            load_bare_tokenizer(config.target, config.revision).save_pretrained(folder)
        (folder / "README.md").write_text(card(config, provenance), encoding="utf-8")
        replace_json(folder / "training.json", provenance)
    return identity(model, str(config.tuned_folder))


def identity(model: PreTrainedModel, name: str) -> TargetIdentity:
    """The identity of ``model``, saved in ``name``, for a checkpoint."""
    body, config = model.model, model.config
    return TargetIdentity(
        name=name,
        fingerprint=model_fingerprint(config, body.norm.weight, body.layers[-1].self_attn.o_proj.weight[0]),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
    )


def stored_dtype(shape: PretrainedConfig) -> torch.dtype:
    """The dtype of a target's files, by its configuration."""
    found = getattr(shape, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def card(config: MedusaConfig, provenance: dict[str, Any]) -> str:
    """The model card."""
    training, base = provenance["training"], Path(provenance["target"]["name"]).name
    how = "all layers" if config.joint is None or config.joint.lora is None else f"LoRA of rank {config.joint.lora.r}"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, medusa]
---
# {Path(config.out).name}

`{base}`, tuned together with {config.heads} Medusa heads (Medusa-2: {how}), {training["tokens"]:,} tokens in
{training["steps"]:,} steps. It is another model than `{base}`: decoding with the heads gives exactly what this model
gives, and not what `{base}` does. `training.json` has the rest.
"""
