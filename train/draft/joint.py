"""A target that is tuned together with the heads that draft for it (Medusa-2): as it is trained, and what is saved of
it."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from drafters.common.files import replace_json, replacing_files
from drafters.common.paths import ADAPTER_CONFIG_FILE
from drafters.hub.checkpoint import TargetIdentity
from drafters.methods.medusa import MedusaHeads
from drafters.model.files import load_bare_tokenizer, model_fingerprint
from train.core.attention import NAME, Dialogues
from train.draft.module import DraftModule, causal_module, load_weights

if TYPE_CHECKING:
    from train.medusa import MedusaConfig

TARGET, HEADS = "target.", "heads."  # how the names of the module's weights begin


class JointModule(nn.Module):
    """The target between token ids and its LM head, whole or with LoRA, and heads on what it gives.

    Its embedding and its LM head stay as they are: the heads draft through the same one.

    Raises:
        ValueError: LoRA beside the LM head or the embedding, or not beside what a target's fingerprint is taken of.
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
        if not any(last in name for name in trained):  # else the tuned target would pass for the one that it was
            raise ValueError("joint.lora.targets leaves o_proj out, by which targets are told apart; add it")

    @property
    def export_bytes(self) -> int:
        """Of the tuned target, as it is saved, and of the heads."""
        base = self.target.base
        target, heads = (sum(weights.numel() for weights in part.parameters()) for part in (base, self.heads))
        return int(target * stored_dtype(base.config).itemsize + 2 * heads)

    def lm_heads(self) -> list[nn.Linear]:
        """The heads have none of their own."""
        return []

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Dialogues | Tensor | None = None) -> Tensor:
        """Ids and positions ``[R, L]`` -> what target and heads give to the LM head ``[R, L, 1 + K, H]``."""
        features = self.target(input_ids, position_ids, mask)
        return torch.cat([features[..., None, :], self.heads(features)], dim=-2)


def joint_module(
    config: "MedusaConfig", shape: PretrainedConfig, heads: MedusaHeads, attention: str = NAME
) -> JointModule:
    """The module of a run, with random weights; ``shape``: the target's configuration."""
    assert config.joint is not None
    target = causal_module("target", config.target, shape, config.joint.lora, attention)
    return JointModule(target, heads)


def of_part(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of TARGET or of HEADS, by their names there."""
    return {name.removeprefix(part): value for name, value in weights.items() if name.startswith(part)}


def tuned_target(config: "MedusaConfig", shape: PretrainedConfig, weights: dict[str, Tensor]) -> DraftModule:
    """The target with what ``weights`` of a ``JointModule`` have of it that was trained, on the CPU, in float32.

    The rest is read from the target's files once more, as exact as it is there.
    """
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
    config: "MedusaConfig", shape: PretrainedConfig, weights: dict[str, Tensor], provenance: dict[str, Any]
) -> TargetIdentity:
    """Write the tuned target into ``target/`` of the run folder, over an older one if any; with LoRA, its matrices
    alone into ``adapter/``, too. Returns what the heads' checkpoint is to say of the tuned target.

    A process killed on the way leaves older ones, new ones, or folders that do not load.
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
        with contextlib.suppress(ValueError):  # token ids in, token ids out: a model may come without one
            load_bare_tokenizer(config.target, config.revision).save_pretrained(folder)
        (folder / "README.md").write_text(card(config, provenance), encoding="utf-8")
        replace_json(folder / "training.json", provenance)
    return identity(model, str(config.tuned_folder))


def identity(model: PreTrainedModel, name: str) -> TargetIdentity:
    """What a checkpoint says of ``model``, to be loaded from ``name``."""
    body, config = model.model, model.config
    return TargetIdentity(
        name=name,
        fingerprint=model_fingerprint(config, body.norm.weight, body.layers[-1].self_attn.o_proj.weight[0]),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
    )


def stored_dtype(shape: PretrainedConfig) -> torch.dtype:
    """What a target's configuration says that its files hold."""
    found = getattr(shape, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def card(config: "MedusaConfig", provenance: dict[str, Any]) -> str:
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
