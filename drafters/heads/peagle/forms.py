"""Forms of P-EAGLE heads: EAGLE-3's, with ``mask_hidden`` and the mask token. vLLM and speculators load them.

vLLM 0.32 takes the mask token from ``mask_token_id`` or ``pard_token``, and a draft's number of tokens from its command
line. No form has the depths that were trained, except ``made_from`` of our exports.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig

from drafters.common.wording import shortened
from drafters.config import Vocabulary
from drafters.heads.eagle3.forms import Eagle3Forms, Eagle3Keys
from drafters.heads.forms import CERTAIN, Reading, Stated, Stored
from drafters.heads.keys import MADE_FROM, made_from
from drafters.heads.peagle.module import PEagleHead
from drafters.heads.peagle.shape import PEagleShape

METHOD = "peagle"
VLLM = {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"}  # by kind of layer
SPECULATORS = "PEagleSpeculator"
MASK_KEYS = ("mask_token_id", "pard_token")
DEPTHS = 8  # of speculators' training by default


class PEagleKeys(Eagle3Keys):
    """Keys of ``config.json`` of a P-EAGLE head."""

    mask_token_id: Vocabulary | None = None
    pard_token: Vocabulary | None = None


class PEagleForms(Eagle3Forms):
    """Forms of P-EAGLE heads."""

    noun = "a P-EAGLE head"
    readers = ("vllm", "speculators")
    shape = PEagleShape
    keys = PEagleKeys
    code = note = ""
    method = METHOD
    served_as = "eagle3"
    vllm_options: ClassVar = {"parallel_drafting": True}
    architectures = (*VLLM.values(), SPECULATORS)
    loaded_by: ClassVar = dict.fromkeys(VLLM.values(), ("vllm",)) | {SPECULATORS: ("vllm", "speculators")}

    def match(self, config: Mapping[str, Any], names: set[str]) -> int:
        """EAGLE-3's tensors, and ``mask_hidden``."""
        return 2 * CERTAIN if "mask_hidden" in names and super().match(config, names) else 0

    def module(self, target: PretrainedConfig, shape: Any) -> nn.Module:
        return PEagleHead(target, shape)

    def read(self, stored: Stored, target: PretrainedConfig, stated: Stated) -> Reading:
        reading, config = super().read(stored, target, stated), stored.config
        tokens = {key: config[key] for key in MASK_KEYS if config.get(key) is not None}
        if len({*tokens.values()}) != 1:
            raise ValueError(
                f"{stored.source}: {' and '.join(MASK_KEYS)} are {shortened(tokens)}; there must be one mask token"
            )
        depths, notes = made_from(config).get("depths"), list(reading.notes)
        if depths is None:
            notes.append(f"its files do not say how many tokens it was trained to predict at once; taken for {DEPTHS}")
        keys = {"mask_token_id": next(iter(tokens.values())), "depths": depths or DEPTHS, "layers": 1}
        return reading._replace(options=keys | reading.options, notes=notes)

    def config(
        self, to: str, shape: Any, layer: Mapping[str, Any], target: PretrainedConfig, origin: Mapping[str, Any]
    ) -> dict[str, Any]:
        config = super().config(to, shape, layer, target, origin)
        config |= dict.fromkeys(MASK_KEYS, shape.mask_token_id)
        config[MADE_FROM] |= {"depths": shape.depths, "fed_back": "the mask token and mask_hidden: nothing is fed back"}
        if to == "speculators":
            return config | {"speculators_model_type": METHOD, "architectures": [SPECULATORS]}
        return config | {"architectures": [VLLM[shape.layer]]}


PEAGLE_FORMS = PEagleForms()
