"""Forms of EAGLE heads: ``config.json`` of a Llama with one layer, whose tensors lack the embedding."""

from drafters.config import SHIFTED
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.one_layer import OneLayerForms
from drafters.model.layers import SERVED

EAGLE_FORMS = OneLayerForms(
    noun="an EAGLE head",
    readers=("official", "vllm", "sglang"),
    shape=EagleShape,
    module=EagleHead,
    made_as=EagleShape(),
    families=SERVED,
    fixed={"inputs": SHIFTED},
    code="EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{out}', use_eagle3=False)",
    note="It reads the embedding from a target in several files (with an index), and fails for a single file.",
    bias="fc.bias",
)
