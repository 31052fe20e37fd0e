"""Base of the forms of heads that read the target's states: writing, checking, and what programs refuse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.common.states import state_name
from drafters.common.wording import dtype_name
from drafters.config import validate
from drafters.heads.forms import (
    EMBEDDING,
    T2D,
    HeadForms,
    Stated,
    Stored,
    Trained,
    Written,
    another_form,
    another_target,
    in_one_dtype,
    no_target_notes,
    rope_problems,
    served_by,
    tensor_problems,
    weights_text,
)
from drafters.heads.keys import MADE_FROM, READERS, made_from, older_keys, rope
from drafters.heads.states import architecture_of
from drafters.hub.checkpoint import load_state
from drafters.model.draft_head import D2T, draft_ids
from drafters.model.files import load_config_only
from drafters.model.layers import layer_kind

_LEFT_OUT = ("verifier_norm.weight", "verifier_lm_head.weight")  # speculators': the target's, not read again
_LAYER = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
_LAYER += "max_position_embeddings initializer_range rms_norm_eps bos_token_id eos_token_id pad_token_id"


class StateForms(HeadForms):
    """Base of the forms of such heads.

    Attributes:
        loaded_by: programs by the form of a folder (``form_of``).
        names: parts of tensors' names in some forms, and ours for them.
        positions: what engines take an absent ``max_position_embeddings`` for.
    """

    loaded_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    names: ClassVar[Mapping[str, str]] = {}
    positions = 2048

    # What each head defines.

    def module(self, target: PretrainedConfig, shape: Any) -> nn.Module:
        """The head's module."""
        raise NotImplementedError

    def flattened(self, config: Mapping[str, Any], source: str) -> dict[str, Any]:
        """``config.json`` with the keys of its groups and of the layer at the top.

        Raises:
            ValueError: a key has two values, or the form is another method's.
        """
        raise NotImplementedError

    def form_of(self, config: Mapping[str, Any]) -> str:
        """The key of a folder's form in ``loaded_by``."""
        return architecture_of(config)

    def limits(self, shape: Any, target: PretrainedConfig) -> dict[str, list[tuple[bool, str]]]:
        """For each program: what keeps it from serving a head of this shape, if it is so, and the reason."""
        raise NotImplementedError

    def config(
        self, to: str, shape: Any, layer: Mapping[str, Any], target: PretrainedConfig, origin: Mapping[str, Any]
    ) -> dict[str, Any]:
        """``config.json`` for ``to``; ``layer``: the keys of its layers. ``made_from`` has the head's own part only."""
        raise NotImplementedError

    def refusals(self, config: Mapping[str, Any], shape: Any, layers: int) -> dict[str, str]:
        """Why programs that load the form of this ``config.json`` would read another head in it."""
        return {}

    def as_served(self, to: str, config: Mapping[str, Any], shape: Any) -> Any:
        """The head that ``to`` serves of a folder, where its difference from ``shape`` is a note and no refusal."""
        return shape

    def more_problems(self, config: Mapping[str, Any]) -> list[str]:
        """What else engines would load without a word, in words."""
        return []

    def notices(self, to: str, shape: Any, target: PretrainedConfig) -> list[str]:
        """What a user of an export for ``to`` has to know."""
        return []

    def theirs(self, to: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names of ``to``."""
        return weights

    # What all share.

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ours: dict[str, Tensor] = {}
        for stored, value in weights.items():
            name = stored.removeprefix("model.")
            for old, new in self.names.items():
                name = name.replace(old, new)
            if name in ours:
                raise ValueError(f"two tensors of the file are {name} (one is called {stored}); remove one of them")
            if name not in _LEFT_OUT:
                ours[name] = value
        return ours

    def why_not(self, to: str, shape: Any, target: PretrainedConfig) -> str | None:
        if (taps := list(shape.reads)) != (ordered := sorted({*taps})):
            return f"it hands states over in the order of the layers, and taps are {taps}; train one with {ordered}"
        return next((reason for wrong, reason in self.limits(shape, target)[to] if wrong), None)

    def write(self, to: str, head: Trained, target: PretrainedConfig, origin: dict[str, Any]) -> Written:
        shape, module = head.shape, self.module(target, head.shape)
        load_state(module, head.weights, head.source)
        weights = self.theirs(to, with_draft_vocabulary(in_one_dtype(head.weights), target.vocab_size))
        dtype = dtype_name(weights["fc.weight"].dtype)
        own: Any = layer_kind(target, shape.layer, shape.shape).config
        keys = {"draft_vocab_size": shape.draft_vocab_size or target.vocab_size, "dtype": dtype, "torch_dtype": dtype}
        made = {
            "layer": shape.layer,
            "taps": list(shape.reads),
            "states": [told_state(tap, target.num_hidden_layers) for tap in shape.reads],
            "rope": rope(own.to_dict()),
            "target_layers": target.num_hidden_layers,
        }
        config = keys | self.config(to, shape, layer_keys(own, shape.layer, shape.layers), target, origin)
        config[MADE_FROM] = {**origin, **made, **config[MADE_FROM]}
        stored = Stored(Path(head.source), head.source, config, self.renamed(weights))
        refused, _ = self.refused(stored, target)
        without = {one: self.no_target(one, target.model_type) for one in READERS}
        able = tuple(one for one in READERS if refused[one] is None and (one == to or without[one] is None))
        return Written(config, weights, able, no_target_notes(to, without[to]) + self.notices(to, shape, target))

    def check(self, stored: Stored, to: str | None, target: str | None) -> str:
        folder, weights = stored.folder, stored.weights
        if target is None:
            raise ValueError(f"{folder} is {self.noun}, which is checked against its target; add --target MODEL")
        stored = stored._replace(weights=self.renamed(weights))
        refused, notes = self.refused(stored, load_config_only(target))
        if another := another_target(stored.config, target):
            raise ValueError(f"{folder}: {another}")
        text = f"{served_by(folder, self.noun, refused, [*READERS], to)}, {weights_text(weights)}, for {target}"
        return "\n".join([text, *(f"note: {note}" for note in notes)])

    def refused(self, stored: Stored, target: PretrainedConfig) -> tuple[dict[str, str | None], list[str]]:
        """For each program: None if it serves this head as it was trained, or why not. And notes for the user.

        Raises:
            ValueError: everything that is wrong with the head, whichever program loads it.
        """
        reading = self.read(stored, target, Stated())
        shape: Any = validate(self.shape, reading.options, source=stored.source)
        if wrong := reading.doubts + self.problems(stored, reading.weights, shape, target):
            raise ValueError(f"{stored.source} is not {self.noun} that would be served as it is: {'; '.join(wrong)}")
        loaded = self.loaded_by.get(self.form_of(stored.config), ())
        otherwise = self.refusals(stored.config, shape, target.num_hidden_layers)
        refused = {
            to: (self.why_not(to, self.as_served(to, stored.config, shape), target) or otherwise.get(to))
            if to in loaded and to in self.readers
            else another_form(to)
            for to in READERS
        }
        return refused, reading.notes

    def problems(
        self, stored: Stored, weights: Mapping[str, Tensor], shape: Any, target: PretrainedConfig
    ) -> list[str]:
        """What engines would load without a word, in words: RoPE, positions, and tensors that are not the module's."""
        config, flat = stored.config, self.flattened(stored.config, stored.source)
        layer = config.get("transformer_layer_config", config)
        found = rope_problems(layer)
        if (trained := made_from(config).get("rope")) not in (None, rope(layer)):
            found.append(f"RoPE is {rope(layer)}, and was {trained} in training")
        if (longest := flat.get("max_position_embeddings") or self.positions) < target.max_position_embeddings:
            found.append(
                f"max_position_embeddings is {longest:,}, and {target.max_position_embeddings:,} in the target: "
                "acceptance falls to nothing there"
            )
        with torch.device("meta"):
            wanted = {name: list(value.shape) for name, value in self.module(target, shape).state_dict().items()}
        said = flat.get("dtype") or flat.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        return found + tensor_problems(weights, wanted, (EMBEDDING, T2D), said) + self.more_problems(config)


def told_state(tap: int, layers: int) -> str:
    """The target's hidden state ``tap`` in all numberings; the last one is no ``hidden_states`` of transformers, which
    norms it."""
    if tap == layers:
        return f"output of layer {tap - 1}, before the target's final norm"
    return f"input of layer {tap} = {state_name(tap)}"


def with_draft_vocabulary(weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors of an export: t2d beside the d2t of a part of the vocabulary, no d2t for all of it."""
    found = dict(weights)
    if (offsets := found.pop(D2T, None)) is not None and len(offsets) < vocab_size:
        chosen = torch.zeros(vocab_size, dtype=torch.bool)
        chosen[draft_ids(offsets, vocab_size)] = True
        found |= {D2T: offsets, T2D: chosen}
    return found


def layer_keys(shape: Any, kind: str, layers: int) -> dict[str, Any]:
    """Keys of ``config.json`` that describe the decoder layers; ``shape``: their configuration."""
    turning = rope(shape.to_dict())
    found = {key: getattr(shape, key) for key in _LAYER.split()} | {"model_type": kind}
    found |= {"num_hidden_layers": layers, "attention_bias": False, "mlp_bias": False}
    return found | {"tie_word_embeddings": False, "rope_parameters": turning, **older_keys(turning)}
