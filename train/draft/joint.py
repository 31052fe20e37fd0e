"""A target that is tuned together with its Medusa heads (Medusa-2): the module, and its exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.common.files import replacing_files
from drafters.common.paths import ADAPTER_CONFIG_FILE, shown_name
from drafters.hub.checkpoint import HUB_NAMES, TargetIdentity
from drafters.methods.medusa import MedusaHeads
from drafters.model.ends import load_frozen_ends
from train.core.attention import Dialogues
from train.draft.export import card, write_model
from train.draft.module import DraftModule, causal_module, load_weights, names_of

if TYPE_CHECKING:
    from train.medusa import MedusaConfig

TARGET, HEADS = "target.", "heads."  # prefixes of the module's weights


class JointModule(nn.Module):
    """The target from token ids up to its LM head, whole or with LoRA, and the heads on its features.

    Embeddings and LM head are frozen, because the heads draft through the same LM head.

    Raises:
        ValueError: LoRA on the LM head or the embeddings.
    """

    def __init__(self, target: DraftModule, heads: MedusaHeads) -> None:
        super().__init__()
        self.target, self.heads = target, heads
        if target.lora is None:
            for weights in target.ends():
                weights.requires_grad_(False)
            return
        trained = [name for name, weights in target.model.named_parameters() if weights.requires_grad]
        if ends := [name for name in trained if "lm_head" in name or "embed_tokens" in name]:
            raise ValueError(f"joint.lora.targets names {ends[0]}, and embedding and LM head stay; leave it out")

    @property
    def export_bytes(self) -> int:
        """Bytes of the saved target and heads."""
        base = self.target.base
        target, heads = (sum(weights.numel() for weights in part.parameters()) for part in (base, self.heads))
        return int(target * stored_dtype(base.config).itemsize + 2 * heads)

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Dialogues | None = None) -> Tensor:
        """Ids and positions ``[R, L]`` -> outputs of target and heads ``[R, L, 1 + K, H]``, before the LM head."""
        features = self.target(input_ids, position_ids, mask)
        return torch.cat([features[..., None, :], self.heads(features)], dim=-2)


def of_part(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of TARGET or HEADS, without the prefix."""
    return {name.removeprefix(part): value for name, value in weights.items() if name.startswith(part)}


def tuned_target(config: MedusaConfig, shape: PretrainedConfig, weights: dict[str, Tensor]) -> DraftModule:
    """The tuned target on the CPU in float32: trained weights from a ``JointModule``'s ``weights``, the others from the
    target's files."""
    assert config.joint is not None
    with torch.random.fork_rng(devices=[]):
        module = causal_module("target", config.target, shape, config.joint.lora, attention="sdpa")
    load_weights(module, config.target, config.revision)
    trained = of_part(weights, TARGET)
    ends = names_of(module, module.ends())
    for name, value in module.named_parameters():
        if value.requires_grad and name not in ends:
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
    module, lora = tuned_target(config, shape, weights), config.joint.lora
    base = provenance["target"]
    name = shown_name(base["name"], provenance["training"][HUB_NAMES])
    how = "all layers" if lora is None else f"LoRA of rank {lora.r}"
    text = (
        f"It is another model than `{name}`: decoding with the heads gives exactly what this model gives, and not what "
        f"`{name}` does.\n\n`{name}`, tuned together with {config.head.heads} Medusa heads (Medusa-2: {how})"
    )
    text = card(config.out, "medusa", text, provenance["training"])
    if lora is not None:
        module.model.peft_config["default"].revision = config.revision
        with replacing_files(config.out / "adapter", last=(ADAPTER_CONFIG_FILE,)) as folder:
            module.model.save_pretrained(folder)
            (folder / "README.md").write_text(text, encoding="utf-8")
    model = module.merged().to(stored_dtype(shape))  # type: ignore[arg-type]
    model.config.tuned_from = {"name": name, "fingerprint": base["fingerprint"]}
    write_model(config.tuned_folder, model, (config.target, config.revision), text, provenance)
    tuned = str(config.tuned_folder)
    return load_frozen_ends(tuned, device="meta").identity(tuned)


def stored_dtype(shape: PretrainedConfig) -> torch.dtype:
    """The dtype of a target's files, by its configuration."""
    return getattr(shape, "dtype", None) or torch.bfloat16
