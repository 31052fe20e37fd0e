"""Block heads in the forms of their trainers and engines; ``reading`` has what their keys mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.common.states import to_inputs, to_outputs
from drafters.config import validate
from drafters.heads.block.dspark import DSparkHead
from drafters.heads.block.module import BlockBackbone
from drafters.heads.block.reading import (
    ANCHOR,
    AUX_IDS,
    CLASSES,
    CONVS,
    DEEPSPEC,
    DSPARK_HEADS,
    IDS,
    NON_CAUSAL,
    SELECTOR,
    SPECFORGE,
    SPECULATORS,
    ZLAB,
    ZLAB2,
    BlockKeys,
    flattened,
    layout_of,
    markov_of,
    number,
    own_weights,
    refuse_variants,
    taps_of,
    windows_of,
)
from drafters.heads.block.shape import ANCHOR_FIRST, FILL_IN, BlockShape, DSparkShape
from drafters.heads.forms import CERTAIN, Reading, Stated, Stored
from drafters.heads.keys import MADE_FROM, READERS, check_said
from drafters.heads.mask_embedding import MASK_EMBEDDING, MASK_FILE, with_mask_embedding
from drafters.heads.state_forms import StateForms
from drafters.heads.states import (
    architecture_of,
    check_sizes,
    layer_of,
    own_rows,
    shape_of,
    speculators_keys,
    states_of_fc,
    too_short,
)
from drafters.model.layers import layer_kind

# Programs that load a folder of this form.
_LOADED_BY = {ZLAB: ("official", "vllm", "sglang", "llama.cpp"), DEEPSPEC: ("vllm", "sglang", "llama.cpp")}
_LOADED_BY |= {SPECULATORS: ("vllm", "speculators"), ZLAB2: ("official", "vllm", "sglang")}
# Families of targets, by model_type, whose classes in SGLang 0.5.23 hand over states for block drafters.
_SGLANG_TARGETS = {"deepseek_v2", "deepseek_v3", "gemma4", "gemma4_text", "glm4_moe_lite", "gpt_oss", "lfm2"}
_SGLANG_TARGETS |= {"lfm2_moe", "llama", "mistral", "nemotron_h", "qwen3", "qwen3_moe", "qwen3_next"}
_SLOTS = {
    FILL_IN: "slot k predicts the token k after the anchor, slot 0 nothing",
    ANCHOR_FIRST: "slot k predicts the token k + 1 after the anchor",
}


@dataclass(frozen=True, kw_only=True)
class BlockForms(StateForms):
    """Forms of DFlash or DSpark heads, and base of DFlash2's. ``method``: the name that speculators' and our
    config.json have."""

    method: str
    noun: str
    readers: tuple[str, ...]
    shape: type[BlockShape]
    backbone: type[BlockBackbone]
    code: str = ""
    note: str = ""
    keys: ClassVar = BlockKeys
    loaded_by: ClassVar = _LOADED_BY
    targets: ClassVar = {"sglang": _SGLANG_TARGETS}
    positions = 32768  # Qwen3's configuration
    has_lm_head_copy = True  # DeepSpec's trainer
    drafts_blocks = True

    def match(self, config: Mapping[str, Any], names: set[str]) -> int:
        """Block heads have a norm of the features outside of their layers; DSpark's have two further heads, DFlash2's
        convolutions in their layers and a selector."""
        bare, method = {name.removeprefix("model.") for name in names}, "dflash"
        if any(name.startswith(DSPARK_HEADS) for name in bare):
            method = "dspark"
        elif any(name.startswith(SELECTOR) or any(part in name for part in CONVS) for name in bare):
            method = "dflash2"
        return CERTAIN if "hidden_norm.weight" in bare and method == self.method else 0

    def module(self, target: PretrainedConfig, shape: Any) -> nn.Module:
        return self.backbone(target, shape)

    def form_of(self, config: Mapping[str, Any]) -> str:
        return SPECULATORS if config.get(SPECULATORS) is not None else architecture_of(config)

    # What DFlash2's overrides.

    def own_part(
        self, flat: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str
    ) -> dict[str, Any]:
        """Keys of the shape that this method has beside DFlash's; raises ValueError where tensors do not agree."""
        if self.method == "dspark":
            return markov_of(flat, weights, source)
        fix = "the file is incomplete, or markov_rank must be 0"
        check_said(flat, "markov_rank", 0, f"there is no markov_head.markov_w1.weight; {fix}", source)
        return {}

    def own_keys(self, shape: Any) -> dict[str, Any]:
        """The same as keys of ``config.json``."""
        return _markov_keys(shape) if isinstance(shape, DSparkShape) else {}

    # ------------------------------------------------------------------------------------------- reading

    def flattened(self, config: Mapping[str, Any], source: str) -> dict[str, Any]:
        return flattened(config, self.method, self.noun, source)

    def read(self, stored: Stored, target: PretrainedConfig, stated: Stated) -> Reading:
        config, source, method = stored.config, stored.source, self.method
        flat = self.flattened(config, source)
        weights = with_mask_embedding(stored, flat)
        refuse_variants(config, flat, method, source)
        check_sizes(flat, stored, target, DSPARK_HEADS)
        depth, fix = target.num_hidden_layers, "give the model that it was trained for: --target MODEL"
        check_said(flat, "num_target_layers", depth, f"the target has {depth} layers; {fix}", source)
        count, notes = states_of_fc(weights, flat["hidden_size"], source, self.noun), list[str]()
        options: dict[str, Any] = {
            "layout": layout_of(config, flat, method, source, stated.layout),
            "block_size": number(flat, "block_size", 2, source),
            "mask_token_id": number(flat, "mask_token_id", 0, source),
            "taps": taps_of(config, flat, count, target.num_hidden_layers, source, notes, stated.taps),
            "layer": layer_of(flat, weights, source, notes),
            "layers": number(flat, "num_hidden_layers", 1, source),
            "draft_vocab_size": own_rows(flat, weights, target.vocab_size, source),
            "mask_embedding": MASK_EMBEDDING in weights,
        }
        options |= windows_of(config, flat, options["layers"], source, method == "dflash2")
        if options.get("window_edge") == "anchor":
            notes.append(
                "its windows end at the anchor, as in speculators' training (window_edge: anchor); vLLM's move with "
                f"the rows of a block, so that there a row sees up to {options['block_size']} of the oldest tokens less"
            )
        options |= self.own_part(flat, weights, target, source)
        options["shape"] = shape_of(flat, weights, layer_kind(target, options["layer"]).config, source)
        options = validate(self.shape, options, source).model_dump(exclude_defaults=True, exclude_none=True)
        return Reading(options, own_weights(weights, options), notes + too_short(flat, target), [])

    # ------------------------------------------------------------------------------------------- writing

    def config(
        self, to: str, shape: Any, layer: Mapping[str, Any], target: PretrainedConfig, origin: Mapping[str, Any]
    ) -> dict[str, Any]:
        method, taps = self.method, list(shape.reads)
        layer = dict(layer) | {
            "layer_types": ["sliding_attention" if one else "full_attention" for one in shape.sliding]
        }
        if shape.sliding_window is not None:
            layer |= {"sliding_window": shape.sliding_window, "use_sliding_window": True}
        made = {"layout": shape.layout, "slot": _SLOTS[shape.layout]}
        head: dict[str, Any] = {"block_size": shape.rows, "tie_word_embeddings": False}
        block: dict[str, Any] = {"mask_token_id": shape.mask_token_id, ANCHOR: shape.layout == ANCHOR_FIRST}
        block |= self.own_keys(shape)
        if to == "speculators":
            made[AUX_IDS] = "inputs of layers: hidden states"
            # transformers saves the names of its classes.
            architecture = SPECFORGE if method == "dspark" else CLASSES[method][0]
            keys = speculators_keys(method, architecture, shape.slots, layer, target, origin["target"])
            return head | block | keys | {AUX_IDS: to_inputs(taps), NON_CAUSAL: not shape.causal, MADE_FROM: made}
        made[IDS] = "outputs of layers: hidden states - 1"
        config = layer | head | {"num_target_layers": target.num_hidden_layers, "bias": False, MADE_FROM: made}
        # Absent, it is true in sliding layers and false in others.
        stated = shape.causal != "sliding"
        config, block[IDS] = config | ({"is_causal": shape.causal} if stated else {}), to_outputs(taps)
        if method == "dspark":
            return config | block | {"architectures": [DEEPSPEC]}
        block |= {"causal": shape.causal} if stated else {}
        return config | {"dflash_config": block, "architectures": [CLASSES[method][0]]}

    # ------------------------------------------------------------------------------------------- serving

    def limits(self, shape: Any, target: PretrainedConfig) -> dict[str, list[tuple[bool, str]]]:
        taps, rows, last = list(shape.reads), shape.draft_vocab_size, target.num_hidden_layers
        dflash, fill_in = self.method != "dspark", shape.layout == FILL_IN
        markov = shape.markov_head if isinstance(shape, DSparkShape) else "vanilla"
        only_fill_in = (dflash and not fill_in, f"its DFlash predicts no token at the anchor (layout {FILL_IN})")
        only_vanilla = (markov != "vanilla", f"it has no Markov head of the kind {markov!r}; train one with vanilla")
        targets_head = "it drafts with the target's LM head; train one without draft_vocab"
        whole = (rows == target.vocab_size, f"of all tokens {targets_head}")
        windows, both_ways = shape.sliding_window is not None, "its blocks attend in both directions (causal: false)"
        only_both_ways = (shape.causal is True, both_ways)
        full_both_ways = (shape.causal is True and not all(shape.sliding), both_ways)
        slot = (shape.window_edge != "slot", "its windows move with the rows of a block (window_edge: slot)")
        anchor = (windows and shape.window_edge != "anchor", "its windows end at the anchor (window_edge: anchor)")
        by_layer = "its sliding layers are causal, its full ones not (causal: sliding)"
        only_by_layer = (not dflash and windows and not _by_layer(shape), by_layer)  # of DFlash it reads is_causal
        no_window = (windows, "its layers attend to all tokens (sliding_window: null)")
        norms = "its draft layers have norms of queries and keys (layer: qwen3); train one with layer=qwen3"
        only_qwen3 = (shape.layer != "qwen3", norms)
        own_mask = (shape.mask_embedding, "it embeds the mask token as the target does (mask_embedding: false)")
        return {
            "official": [
                only_qwen3,
                own_mask,
                slot,
                only_fill_in,
                (rows is not None, targets_head),
                (taps[-1] == last, "transformers norms the state after the last layer, and the head reads it before"),
            ],
            "vllm": [only_qwen3, own_mask if not dflash else (False, ""), slot, only_fill_in, only_vanilla],
            "sglang": [
                only_qwen3,
                own_mask,
                slot,
                only_by_layer,
                only_fill_in,
                (not dflash and fill_in, f"it takes block_size for the tokens of a draft, as in layout {ANCHOR_FIRST}"),
                (rows is not None, targets_head),
                (taps[0] == 0, "it hands over no embeddings"),
                (taps[-1] == last, "it hands over no state after the target's last layer"),
            ],
            "speculators": [only_qwen3, own_mask, anchor, full_both_ways, whole],
            "llama.cpp": [
                only_qwen3, own_mask, only_fill_in, only_vanilla, only_both_ways, no_window, whole,
                (dflash and rows is not None, targets_head),
            ],
        }  # fmt: skip

    def refusals(self, config: Mapping[str, Any], shape: Any, layers: int) -> dict[str, str]:
        if self.form_of(config) != SPECULATORS:
            return {}
        if self.method == "dspark":
            wrong, reading = not _by_layer(shape), "its sliding layers would be causal, and its full ones not"
        else:  # an absent key is true there, and false to speculators
            causal, said = not config.get(NON_CAUSAL, True), str(config.get(NON_CAUSAL, "absent")).lower()
            wrong = any(shape.is_causal(layer) is not causal for layer in range(shape.layers))
            rows = "see earlier rows only" if causal else "see one another"
            reading = f"{NON_CAUSAL} is {said}, so that the rows of a block would {rows} in all layers"
        return {"vllm": f"{reading}; in training it was otherwise"} if wrong else {}

    def as_served(self, to: str, config: Mapping[str, Any], shape: Any) -> Any:
        near = to == "vllm" and self.form_of(config) == SPECULATORS  # ``read`` notes the edge
        return shape.model_copy(update={"window_edge": "slot"}) if near else shape

    def notices(self, to: str, shape: Any, target: PretrainedConfig) -> list[str]:
        return [f"vLLM reads {MASK_FILE} of a local folder only"] if shape.mask_embedding else []

    def temperatures(self, shape: Any, drafting: Any) -> list[float] | None:
        # Those of max q are of no use to SGLang, which does not read them.
        return drafting.confidence_temperatures if getattr(shape, "confidence_head", False) else None


def _by_layer(shape: BlockShape) -> bool:
    """Whether the rows of a block see no later one in sliding layers, and one another in full ones."""
    return all(shape.is_causal(layer) is sliding for layer, sliding in enumerate(shape.sliding))


def _markov_keys(options: DSparkShape) -> dict[str, Any]:
    return {
        "markov_rank": options.markov_rank,
        "markov_head_type": options.markov_head,
        "enable_confidence_head": options.confidence_head,
        "confidence_head_with_markov": options.confidence_head,
    }


DFLASH_FORMS = BlockForms(
    method="dflash",
    noun="a DFlash head",
    readers=tuple(READERS),
    shape=BlockShape,
    backbone=BlockBackbone,
    code="DFlashDraftModel.from_pretrained('{out}').spec_generate(target, input_ids, new_tokens, stop_token_ids)",
    note="`from dflash.model import DFlashDraftModel` (z-lab). The target is a model of transformers.",
)
DSPARK_FORMS = BlockForms(
    method="dspark",
    noun="a DSpark head",
    readers=tuple(one for one in READERS if one != "official"),
    shape=DSparkShape,
    backbone=DSparkHead,
)
