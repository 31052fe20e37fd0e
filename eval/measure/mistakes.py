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
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.heads.shape import HeadShape, split
from drafters.learned import LearnedDrafter
from drafters.loop.state import DecodeState, padded
from drafters.methods.eagle import EagleDrafter, FeatureHead
from drafters.model.draft_head import D2T, DraftHead
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import Rotary
from drafters.model.target import TargetModel

DrafterT = TypeVar("DrafterT", bound=LearnedDrafter)
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


def remade(drafter: DrafterT, module: nn.Module | None = None, wrong: type | None = None, **keys: Any) -> DrafterT:
    """Return a drafter of the same kind with another module, with other keys of its shape, or whose head has the
    methods of the class ``wrong``."""
    old: Any = drafter.module
    changed, options = split(type(old.shape), keys)
    if changed:
        shape = old.shape.model_copy(update=changed)
        module = type(old)(drafter.target.config, shape)
        module.load_state_dict(old.state_dict())
    module = copy.deepcopy(old) if module is None else module
    variant = type(drafter)(drafter.target, module, drafter.settings.model_copy(update=options))
    if wrong is not None:
        head: Any = type(wrong.__name__, (wrong, type(variant.head)), {})(
            variant.target, variant.module, variant.settings
        )
        head.one_call = None  # it would skip ``extend``
        variant.hold(head, variant.shaper, variant.max_draft)
    return variant


class _Wrong(FeatureHead):
    """Base of the mixins: every row passes ``extend``, and ``reading`` tells true features from drafts."""

    reading = False

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> Tensor:
        self.reading = True
        predicted = super().read(features, counts, state)
        self.reading = False
        return predicted


def reads_states(drafter: LearnedDrafter) -> bool:
    """True if the head names the target's states that it reads."""
    return "taps" in type(drafter).shape.model_fields


def move_taps(drafter: LearnedDrafter, by: int) -> LearnedDrafter | None:
    """Read every state ``by`` layers further up."""
    taps = [tap + by for tap in drafter.taps]
    if not reads_states(drafter) or min(taps) < 0 or max(taps) > drafter.target.num_layers:
        return None
    return remade(drafter, taps=taps)


def reverse_taps(drafter: LearnedDrafter) -> LearnedDrafter | None:
    """Concatenate the states from the last to the first."""
    if not reads_states(drafter) or len(drafter.taps) < 2:
        return None
    return remade(drafter, taps=list(reversed(drafter.taps)))


def flip(drafter: LearnedDrafter, key: str) -> LearnedDrafter | None:
    """Give a key of the shape that is true or false its other value."""
    shape: Any = cast(Any, drafter.module).shape
    if key not in type(shape).mistakes:
        return None
    keys: dict[str, Any] = {key: not getattr(shape, key)}
    return remade(drafter, **keys)


def leave_out_norm(drafter: EagleDrafter, name: str) -> EagleDrafter | None:
    """Leave out a norm of the head, or of its first layer (``layers.0.``)."""
    head: Any = copy.deepcopy(drafter.module)
    *_, last = name.split(".")
    owner = head.layers[0] if name.startswith("layers.0.") else head
    norm = getattr(owner, last, None)
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
    if not head.reads_both:
        return None
    for linear in head.reads_both:
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
    def __init__(self, target: TargetModel, module: Any, options: Any) -> None:
        super().__init__(target, module, options)  # type: ignore[call-arg]
        right = self.lm_head
        self.lm_heads = [DraftHead(target, module.d2t, options.draft_dtype, module.lm_head)]
        self.lm_head.enter = right.enter


def take_offsets_for_ids(drafter: EagleDrafter) -> EagleDrafter | None:
    """Take the offsets in ``d2t`` for the target's ids."""
    offsets = getattr(drafter.module, D2T, None)
    if offsets is None or int(offsets.min()) < 0:
        return None
    return remade(drafter, wrong=_OffsetsAsIds)


class _Positions(_Wrong):
    by = 0

    def extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        if not self.reading:
            depths = torch.arange(rows.offset + tokens.shape[1], device=tokens.device)[None] + self.by
            rows = rows._replace(depths=depths)
        return super().extend(features, tokens, rows)


class _OneBehind(_Positions):
    by = -1


class _OneAhead(_Positions):
    by = 1


class _OwnTokens(_Wrong):
    """``latest``: the newest token of each sequence, ``[B, 1]``, which the draft's next token reads."""

    latest: Tensor

    def following(self, counts: list[int], state: DecodeState) -> list[list[int]]:
        right = super().following(counts, state)
        self.latest = padded([row[-1:] or [0] for row in right], self.target.device)
        rows = zip(state.tokens, self.cache.lengths, counts, strict=True)
        return [tokens[start : start + count] for tokens, start, count in rows]

    def extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        if not self.reading:
            tokens, self.latest = torch.cat([self.latest, tokens[:, :-1]], dim=1), tokens[:, -1:]
        return super().extend(features, tokens, rows)


def read_own_tokens(drafter: EagleDrafter) -> EagleDrafter | None:
    """Read the embedding of token i beside feature i, not that of token i + 1."""
    return (
        remade(drafter, wrong=_OwnTokens)
        if getattr(cast(Any, drafter.module).shape, "inputs", SHIFTED) == SHIFTED
        else None
    )


def move_positions(drafter: EagleDrafter, wrong: type[_Positions]) -> EagleDrafter | None:
    """Draft one position off, behind a prompt with the right positions.

    Moving the prompt's positions too would change nothing: RoPE turns by differences of positions.
    """
    return remade(drafter, wrong=wrong)


def _without_theta(parameters: dict[str, Any]) -> dict[str, Any]:
    return parameters | {"rope_theta": PLAIN_THETA}


def _without_scaling(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": parameters["rope_theta"]}


def turn_otherwise(drafter: EagleDrafter, turned: Callable[[dict[str, Any]], dict[str, Any]]) -> EagleDrafter | None:
    """Rotate with the default ``rope_theta``, or without the scaling."""
    module: Any = drafter.module
    config = copy.deepcopy(module.config)
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters or turned(parameters) == parameters:  # some have one for each kind of layer
        return None
    config.rope_parameters = turned(parameters)
    variant = remade(drafter)
    head: Any = variant.head
    rotary = Rotary(type(module.rotary_emb)(config), config)
    head.part.rope, head.one_call = variant.target.runner.part(list(module.layers), rotary=rotary).rope, None
    return variant


class _BeforeNorm(_Wrong):
    def __init__(self, target: TargetModel, module: Any, options: Any) -> None:
        super().__init__(target, module, options)  # type: ignore[call-arg]
        self.taps = (target.num_layers,)


def read_before_norm(drafter: EagleDrafter) -> EagleDrafter | None:
    """Give an EAGLE-1 head the target's last state before the final norm, not after it."""
    return None if reads_states(drafter) else remade(drafter, wrong=_BeforeNorm)


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


def take_other_mask(drafter: LearnedDrafter) -> LearnedDrafter | None:
    """Read token 0 at masked places, as for a config without the mask token."""
    return remade(drafter, mask_token_id=0) if cast(Any, drafter.module).shape.mask_token_id else None


WRONG_MASK = Mistake(
    "wrong mask token",
    "mask_token_id, which this reading takes for 0, as where the key is absent",
    "set mask_token_id to 0 in its config.json",
    take_other_mask,
)


def read_across_norm(drafter: LearnedDrafter) -> LearnedDrafter:
    """Read the state before the target's final norm in place of the feature, or the feature in place of a state."""
    return remade(drafter, state=None if drafter.taps else drafter.target.num_layers)


WRONG_STATE = Mistake(
    "state on the wrong side of the target's final norm",
    "the hidden states that reach the layer",
    "set state in its config.json: the target's number of layers before the norm, null after it",
    read_across_norm,
)


def declared(shape: type[HeadShape]) -> tuple[Mistake, ...]:
    """Return the mistakes that follow from the keys of a shape: states, a mask token, and those that it declares."""
    keys = shape.model_fields
    taps = of_taps("the numbers of the target's states") if "taps" in keys else ()
    one, masks = (WRONG_STATE,) if "state" in keys else (), (WRONG_MASK,) if "mask_token_id" in keys else ()
    return (*taps, *one, *flips(shape), *masks)


def flips(shape: type[HeadShape], check: str = "{key}") -> tuple[Mistake, ...]:
    """Return the mistakes that the shape declares, each the other value of a key; ``check``: keys of an export."""
    return tuple(
        Mistake(name, check.format(key=key), f"set {key} to its other value in its config.json", partial(flip, key=key))
        for key, name in shape.mistakes.items()
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
    *flips(Eagle3Shape),
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
        partial(move_positions, wrong=_OneBehind),
    ),
    Mistake(
        "draft positions one too high",
        "the position of the first draft token",
        RETRAIN,
        partial(move_positions, wrong=_OneAhead),
    ),
    Mistake(
        "rope_theta 10000",
        "rope_theta, rope_parameters",
        f"set rope_theta to 10000 {_SHAPE}",
        partial(turn_otherwise, turned=_without_theta),
    ),
    Mistake(
        "RoPE without its scaling",
        "rope_scaling, rope_parameters",
        f'set rope_type to "default" and remove the scaling {_SHAPE}',
        partial(turn_otherwise, turned=_without_scaling),
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
