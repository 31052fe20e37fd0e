"""Known mistakes in serving an EAGLE head, each planted in our own loop to see what it does to acceptance.

Serving with one of them raises no error: tokens stay right, and drafts are accepted less often. A mistake is a function
that takes a drafter and returns a copy with the mistake in it, or None where it would change nothing. It drafts chains.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from drafters.config import SHIFTED, UNSHIFTED
from drafters.learned import LearnedDrafter
from drafters.loop.state import DecodeState, padded
from drafters.methods.dflash import DFlashDrafter
from drafters.methods.eagle import EagleDrafter
from drafters.methods.eagle3 import Eagle3Drafter
from drafters.model.draft_head import D2T, DraftHead
from drafters.model.layers import layer_kind
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import Part, Rotary
from drafters.model.target import FeatureOutput

DrafterT = TypeVar("DrafterT", bound=LearnedDrafter)
READS_STATES = (Eagle3Drafter, DFlashDrafter)  # of several of the target's layers
PLAIN_THETA = 10_000.0  # rope_theta of a config that does not state it


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        name: the convention that is wrong.
        check: where to look for it in an engine: keys of the exported config, or steps of the engine.
        fix: what to change in a checkpoint that accepts more with the mistake than without.
        plant: returns the drafter with it; None if that drafter has no such convention.
    """

    name: str
    check: str
    fix: str
    plant: Callable[[Any], Any]


class _Wrong(EagleDrafter):
    """Base of the mixins: every row of the head passes ``_extend``, and ``reading`` tells true features from drafts."""

    reading = False

    def _make_head(self, options: Any) -> Part:
        part = super()._make_head(options)
        self._one_call = None
        return part

    def _read(self, features: Tensor, following: list[list[int]], state: DecodeState) -> Tensor:
        self.reading = True
        predicted = super()._read(features, following, state)
        self.reading = False
        return predicted


def remade(drafter: DrafterT, head: nn.Module | None = None, mixin: type | None = None, **options: Any) -> DrafterT:
    """A drafter of the same kind with another head, with the methods of ``mixin``, or with other options."""
    kind: Any = type(drafter) if mixin is None else type(mixin.__name__, (mixin, type(drafter)), {})
    head = copy.deepcopy(drafter.module) if head is None else head
    made: DrafterT = kind(drafter.target, head, drafter.settings.model_copy(update=options))
    return made


def move_taps(drafter: EagleDrafter | DFlashDrafter, by: int) -> EagleDrafter | DFlashDrafter | None:
    """Read every state ``by`` layers further up."""
    taps = [tap + by for tap in drafter.taps]
    if not isinstance(drafter, READS_STATES) or min(taps) < 0 or max(taps) > drafter.target.num_layers:
        return None
    return remade(drafter, taps=taps)


def reverse_taps(drafter: EagleDrafter | DFlashDrafter) -> EagleDrafter | DFlashDrafter | None:
    """Concatenate the states from the last to the first."""
    if not isinstance(drafter, READS_STATES) or len(drafter.taps) < 2:
        return None
    return remade(drafter, taps=list(reversed(drafter.taps)))


def flip_feedback(drafter: EagleDrafter) -> EagleDrafter | None:
    """Feed back the output before the final norm instead of after it, or after it instead of before."""
    if not isinstance(drafter, Eagle3Drafter):
        return None
    head: Any = copy.deepcopy(drafter.module)
    head.norm_output = not head.norm_output
    return remade(drafter, head, norm_output=head.norm_output)


def flip_residual(drafter: EagleDrafter) -> EagleDrafter | None:
    """Take the residual of the first layer on the other side of ``hidden_norm``."""
    if not isinstance(drafter, Eagle3Drafter):
        return None
    head: Any = copy.deepcopy(drafter.module)
    head.layers[0].norm_before_residual = not head.layers[0].norm_before_residual
    return remade(drafter, head)


def leave_out_norm(drafter: EagleDrafter, name: str) -> EagleDrafter | None:
    """Leave out a norm of the head, or of its first layer (``layers.0.``)."""
    if not isinstance(drafter, Eagle3Drafter):
        return None
    head: Any = copy.deepcopy(drafter.module)
    *_, last = name.split(".")
    owner = head.layers[0] if name.startswith("layers.0.") else head
    norm = getattr(owner, last)
    if norm is None or (isinstance(norm, nn.ModuleList) and not len(norm)):
        return None
    if isinstance(norm, nn.ModuleList):
        setattr(owner, last, nn.ModuleList(nn.Identity() for _ in norm))
    else:
        setattr(owner, last, nn.Identity())
    return remade(drafter, head)


def swap_inputs(drafter: EagleDrafter) -> EagleDrafter | None:
    """Concatenate (feature, embedding) instead of (embedding, feature): swap the columns of what reads both."""
    head: Any = copy.deepcopy(drafter.module)
    if isinstance(drafter, Eagle3Drafter):
        attention = head.layers[0].self_attn
        readers = [attention.q_proj, attention.k_proj, attention.v_proj]
    elif hasattr(head, "fc"):
        readers = [head.fc]
    else:
        return None
    for linear in readers:
        embedding, feature = linear.weight.data.chunk(2, dim=1)
        linear.weight.data = torch.cat([feature, embedding], dim=1)
    return remade(drafter, head)


def leave_out_bias(drafter: EagleDrafter) -> EagleDrafter | None:
    """Leave out the bias of ``fc``, as vLLM does."""
    head: Any = copy.deepcopy(drafter.module)
    if getattr(getattr(head, "fc", None), "bias", None) is None:
        return None
    head.fc.bias.data.zero_()
    return remade(drafter, head)


def ignore_d2t(drafter: DrafterT) -> DrafterT | None:
    """Take draft ids for the target's ids."""
    head: Any = copy.deepcopy(drafter.module)
    if getattr(head, D2T, None) is None or not head.d2t.any():
        return None
    head.d2t.zero_()
    return remade(drafter, head)


class _OffsetsAsIds(_Wrong):
    def draft_head(self, options: Any, own: nn.Linear | None = None) -> DraftHead:
        head: Any = self.module
        return DraftHead(self.target, head.d2t, options.draft_dtype, own or head.lm_head)


def take_offsets_for_ids(drafter: EagleDrafter) -> EagleDrafter | None:
    """Take the offsets in ``d2t`` for the target's ids."""
    offsets = getattr(drafter.module, D2T, None)
    if offsets is None or int(offsets.min()) < 0:
        return None
    return remade(drafter, mixin=_OffsetsAsIds)


class _Positions(_Wrong):
    by = 0

    def _extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        if not self.reading:
            depths = torch.arange(rows.offset + tokens.shape[1], device=tokens.device)[None] + self.by
            rows = rows._replace(depths=depths)
        return super()._extend(features, tokens, rows)


class _OneBehind(_Positions):
    by = -1


class _OneAhead(_Positions):
    by = 1


class _OwnTokens(_Wrong):
    """``latest``: the newest token of each row, ``[B, 1]``, which the next row of the draft reads."""

    latest: Tensor

    def _read(self, features: Tensor, following: list[list[int]], state: DecodeState) -> Tensor:
        self.latest = padded([row[-1:] or [0] for row in following], self.target.device)
        rows = zip(state.tokens, self._cache.lengths, following, strict=True)
        own = [tokens[start : start + len(new)] for tokens, start, new in rows]
        return super()._read(features, own, state)

    def _extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        if not self.reading:
            tokens, self.latest = torch.cat([self.latest, tokens[:, :-1]], dim=1), tokens[:, -1:]
        return super()._extend(features, tokens, rows)


def read_own_tokens(drafter: EagleDrafter) -> EagleDrafter | None:
    """Read the embedding of token i beside feature i, not that of token i + 1."""
    return remade(drafter, mixin=_OwnTokens) if drafter.inputs == SHIFTED else None


def move_positions(drafter: EagleDrafter, mixin: type[_Positions]) -> EagleDrafter | None:
    """Draft one position off, behind a prompt with the right positions.

    Moving the prompt's positions too would change nothing: RoPE turns by differences of positions.
    """
    return remade(drafter, mixin=mixin)


def _rotary_of(drafter: EagleDrafter) -> tuple[Any, Any]:
    """The class of the head's RoPE, and a copy of the configuration of its layers."""
    head: Any = drafter.module
    kind = layer_kind(drafter.target.config, head.layer)
    return kind.rotary, copy.deepcopy(getattr(head, "config", kind.config))


class _Turned(_Wrong):
    def _make_head(self, options: Any) -> Part:
        part, (rotary, config) = super()._make_head(options), _rotary_of(self)
        config.rope_parameters = self.turned(config.rope_parameters)
        turned = self.target.runner.part(cast(Any, self.module).layers, rotary=Rotary(rotary(config), config))
        part.rope = turned.rope
        return part

    @staticmethod
    def turned(parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the wrong parameters."""
        return parameters | {"rope_theta": PLAIN_THETA}


class _Unscaled(_Turned):
    @staticmethod
    def turned(parameters: dict[str, Any]) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": parameters["rope_theta"]}


def turn_otherwise(drafter: EagleDrafter, mixin: type[_Turned]) -> EagleDrafter | None:
    """Rotate with the default ``rope_theta``, or without the scaling."""
    parameters = getattr(_rotary_of(drafter)[1], "rope_parameters", None) or {}
    if "rope_theta" not in parameters or mixin.turned(parameters) == parameters:  # some have one for each kind of layer
        return None
    return remade(drafter, mixin=mixin)


class _BeforeNorm(_Wrong):
    def __init__(self, target: Any, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        self.taps = (target.num_layers,)

    def true_features(self, output: FeatureOutput) -> Tensor:
        return output.taps[self.taps[0]]


def read_before_norm(drafter: EagleDrafter) -> EagleDrafter | None:
    """Give an EAGLE-1 head the target's last state before the final norm, not after it."""
    return None if isinstance(drafter, Eagle3Drafter) else remade(drafter, mixin=_BeforeNorm)


_LAYER_IDS = "eagle_aux_hidden_state_layer_ids: EAGLE-3's id i is the input of layer i, hidden_states[i]"
_TAPS = "taps by one: import it again with other --taps, or edit its config.json"
RETRAIN = "no key of the checkpoint says so; correct its trainer and train it again"
_SHAPE = 'of "shape": {"rope_parameters": {...}} in its config.json; an EAGLE head has the RoPE of its target'
# Norms: prefix of their names, and the key that says that the head has none.
_NORMS: dict[str, tuple[str, str | None]] = {
    "fc_norm": ("", "fc_norm"),
    "input_norm": ("", "norm_before_fc"),
    "hidden_norm": ("layers.0.", None),
    "input_layernorm": ("layers.0.", None),
    "norm": ("", None),
}


def of_taps(check: str) -> tuple[Mistake, ...]:
    """Return the mistakes in the numbers of the target's states; ``check``: their key in an exported config."""
    order = "order of the hidden states before fc"
    return (
        Mistake("layer ids one too high", check, f"raise each number of {_TAPS}", partial(move_taps, by=1)),
        Mistake("layer ids one too low", check, f"lower each number of {_TAPS}", partial(move_taps, by=-1)),
        Mistake("layer ids in reverse order", order, "reverse the order of taps in its config.json", reverse_taps),
    )


def _leaves_out(name: str) -> Mistake:
    prefix, key = _NORMS[name]
    fix = RETRAIN if key is None else f'set "{key}": false in its config.json, and remove {name} from its weights'
    return Mistake(
        f"{name} left out",
        f"{prefix}{name} and its key in the config",
        fix,
        partial(leave_out_norm, name=prefix + name),
    )


MISTAKES = (
    *of_taps(_LAYER_IDS),
    Mistake(
        "feedback on the wrong side of the final norm",
        "norm_output",
        "set norm_output to its other value in its config.json",
        flip_feedback,
    ),
    Mistake(
        "residual on the wrong side of hidden_norm",
        "norm_before_residual",
        "set norm_before_residual to its other value in its config.json",
        flip_residual,
    ),
    *map(_leaves_out, _NORMS),
    Mistake(
        "embedding and feature swapped",
        "the first H columns read the embedding",
        "swap the first H and the last H columns of q_proj, k_proj and v_proj of layers.0 (EAGLE: of fc)",
        swap_inputs,
    ),
    Mistake(
        "embedding of token i, not i + 1",
        "the tokens that the head reads, shifted by one",
        f'set "inputs": "{UNSHIFTED}" in its config.json; an EAGLE-3 head has to be trained again',
        read_own_tokens,
    ),
    Mistake(
        "draft positions one too low",
        "the position of the first draft token",
        RETRAIN,
        partial(move_positions, mixin=_OneBehind),
    ),
    Mistake(
        "draft positions one too high",
        "the position of the first draft token",
        RETRAIN,
        partial(move_positions, mixin=_OneAhead),
    ),
    Mistake(
        "rope_theta 10000",
        "rope_theta, rope_parameters",
        f"set rope_theta to 10000 {_SHAPE}",
        partial(turn_otherwise, mixin=_Turned),
    ),
    Mistake(
        "RoPE without its scaling",
        "rope_scaling, rope_parameters",
        f'set rope_type to "default" and remove the scaling {_SHAPE}',
        partial(turn_otherwise, mixin=_Unscaled),
    ),
    Mistake("d2t ignored", "d2t: target id - draft id", "write zeros into d2t of its weights", ignore_d2t),
    Mistake(
        "d2t taken for ids",
        "d2t: target id - draft id",
        "subtract 0, 1, 2, ... from d2t of its weights, which holds ids",
        take_offsets_for_ids,
    ),
    Mistake(
        "feature before the target's final norm", "the hidden states that reach the head", RETRAIN, read_before_norm
    ),
    Mistake(
        "fc.bias left out",
        "a bias of fc, which vLLM does not have",
        "remove fc.bias from its weights, and fc_bias from its config.json",
        leave_out_bias,
    ),
)
