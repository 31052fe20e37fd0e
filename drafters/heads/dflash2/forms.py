"""DFlash2 heads in the forms of z-lab, vLLM, SGLang and speculators: those of DFlash, with further keys and tensors.

Codebooks, convolutions and their keys have the same names everywhere. z-lab, vLLM and SGLang read the keys in
``dflash_config``, speculators at the top (z-lab's dflash 0.1.0, vLLM 0.33, SGLang 0.5.23, speculators 0.9.0). llama.cpp
has such heads, too; its conversion was not read.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from drafters.heads.block.forms import BlockForms
from drafters.heads.block.reading import number
from drafters.heads.dflash2.module import CODEBOOKS, DFlash2Head
from drafters.heads.dflash2.shape import DFlash2Shape
from drafters.heads.keys import check_said

OWN_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
PROJECTION = "candidate_selector.hidden_projection.weight"
FIRST = ("layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight")


class DFlash2Forms(BlockForms):
    """Forms of DFlash2 heads."""

    served_as = "dflash"  # engines know a DFlash2 head by its architecture

    def own_part(
        self, flat: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str
    ) -> dict[str, Any]:
        if missing := [name for name in (*CODEBOOKS, PROJECTION, *FIRST) if name not in weights]:
            raise ValueError(f"{source} is a DFlash2 head without {', '.join(missing)}; the file is incomplete")
        for name in CODEBOOKS:
            if weights[name].dim() != 2 or len(weights[name]) != target.vocab_size:
                raise ValueError(
                    f"{source}: {name} is {list(weights[name].shape)}, and must have a row for each of the target's "
                    f"{target.vocab_size:,} tokens"
                )
        kernel, projection = (weights[name] for name in FIRST)
        if kernel.dim() != 3 or projection.dim() != 2 or projection.shape[0] % max(2 * kernel.shape[1], 1):
            raise ValueError(
                f"{source}: {FIRST[0]} is {list(kernel.shape)} and {FIRST[1]} {list(projection.shape)}; they must be "
                "[2, k, H] and [2 * k * groups, H]"
            )
        groups = projection.shape[0] // (2 * kernel.shape[1])
        found = {
            "conv_kernel_size": kernel.shape[1],
            "conv_group_size": kernel.shape[2] // max(groups, 1),
            "selector_rank": weights[CODEBOOKS[0]].shape[1],
            "selector_top_k": number(flat, "selector_top_k", 1, source),
        }
        for key, value in found.items():
            check_said(flat, key, value, f"its tensors are those of {value}", source)
        return found

    def own_keys(self, shape: Any) -> dict[str, Any]:
        return {key: getattr(shape, key) for key in OWN_KEYS} | {"block_size": shape.rows}


DFLASH2_FORMS = DFlash2Forms(
    method="dflash2",
    noun="a DFlash2 head",
    readers=("official", "vllm", "sglang", "speculators"),
    shape=DFlash2Shape,
    backbone=DFlash2Head,
    code="DFlash2DraftModel.from_pretrained('{out}').spec_generate(target, input_ids, new_tokens, stop_token_ids)",
    note="`from dflash.model import DFlash2DraftModel` (z-lab). The target is a model of transformers.",
)
