"""Form of Kangaroo adapters, which only their official code loads."""

from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.heads.one_layer import OneLayerForms

KANGAROO_FORMS = OneLayerForms(
    noun="a Kangaroo adapter",
    readers=("official",),
    shape=KangarooShape,
    module=KangarooAdapter,
    made_as=KangarooShape(exit_layer=1),
    fixed={"ffn": False, "own_lm_head": False},
    code="python -m evaluation.inference_kangaroo --model-path {target} --adapter-path {out} "
    "--exitlayer {exit_layer} --threshold 0.6 --steps 6 --dtype float16 --bench-name Kangaroo --model-id kangaroo",
    note="With another --exitlayer than {exit_layer} it drafts nonsense. The code reads only `pytorch_model.bin` "
    "(plain tensors here), and the LM head of a target whose weights are in several such files.",
    pickled=True,
    rope_theta=10000.0,
)
