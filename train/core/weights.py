"""The weights of a drafter's training: begin with a trained drafter, merge an adapter, write the checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.config import validate
from drafters.heads.shape import HeadShape
from drafters.hub.checkpoint import (
    FORMAT_VERSION,
    BaseHead,
    TargetIdentity,
    config_of,
    load_checkpoint,
    load_state,
    save_checkpoint,
)
from drafters.methods import drafter_class
from drafters.model.candidates import AGAIN, TENSORS, CandidateOptions, head_fingerprint, without_pair
from drafters.model.draft_head import DRAFT_IDS, DraftHeadOptions
from drafters.model.head_adapter import fingerprint, load_head
from train.core.config import TrainConfig
from train.core.lora import copy_weights, load_base, save_adapter, with_lora

if TYPE_CHECKING:
    from train.core.task import Task

# Keys of a shape that may differ from those of init_from: sizes, which the weights' shapes show, and records.
SHOWN = {"draft_vocab_size", "trained_steps", "shape"}
# Options of init_from's checkpoint that the new one keeps: those about draft tokens and candidates.
ROWS = DraftHeadOptions.model_fields.keys() | CandidateOptions.model_fields.keys()


def shape_of(config: TrainConfig) -> HeadShape:
    """The shape of the trained head; with heads, MLP and RoPE of ``init_from``, if these are not the target's.

    Raises:
        ValueError: no drafter in ``init_from``.
    """
    if config.init_from is None or "shape" not in type(config.shape).model_fields:
        return config.shape
    try:
        sizes = config_of(config.init_from).drafter.get("shape")
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None
    return validate(type(config.shape), config.shape.model_dump() | ({"shape": sizes} if sizes else {}), "init_from")


def init_from(task: Task, checkpoint: str) -> None:
    """Replace the new weights by those of a trained drafter of the same target, or of one that it was tuned from (only
    the shapes have to fit). A head that this method ``extends`` leaves the other parts new. With ``lora`` it is the
    base of the adapter.

    Raises:
        ValueError: nothing loadable there, another method's drafter, other shapes, or an adapter of an adapter.
    """
    config = task.config
    stored, weights = (load_head if config.lora is None else load_checkpoint)(checkpoint)
    if "base" in stored:
        raise ValueError(f"init_from: {checkpoint} is an adapter itself, of {stored['base']['name']!r}; name that")
    known = (config.drafter, *config.extends)
    if stored["drafter_type"] not in known:
        raise ValueError(
            f"init_from: {checkpoint} holds a drafter of type {stored['drafter_type']!r}, and this trains "
            f"{config.drafter!r}; name one of type {' or '.join(map(repr, known))}"
        )
    kind: Any = drafter_class(stored["drafter_type"])
    shape, _ = kind.read_section(stored["drafter"], checkpoint)
    theirs, ours = shape.model_dump(), task.head.model_dump()
    for key in (key for key in ours if key in theirs):
        before, now = _typed(theirs[key]), _typed(ours[key])
        if key not in SHOWN and before != now:
            raise ValueError(
                f"init_from: the head in {checkpoint} has {key}: {before}, and this trains one with {key}: {now}; "
                f"set head.{key}={before}, or another init_from"
            )
    weights, source = _keep_rows(task, stored["drafter"], weights), f"init_from: {checkpoint}"
    if config.lora is None:
        if kind is not task.drafter:
            with torch.device("meta"):
                old = kind.build_module(task.ends.config, shape).state_dict()
            new = task.drafting_module.state_dict()
            weights = {name: value for name, value in new.items() if name not in old} | weights
        load_state(task.drafting_module, weights, source)
        return
    task.base = BaseHead(name=checkpoint, fingerprint=fingerprint(weights))
    plain = task.drafter.build_module(task.ends.config, task.head)
    load_state(plain, weights, source)
    load_base(task.module, plain.state_dict())


def _keep_rows(task: Task, section: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let the task draft with the draft tokens and the candidates of ``init_from``; return its other weights.

    Neither is kept if the config counts new draft tokens. Candidates are for one LM head: they are not kept if it is
    trained, or if the target has another.
    """
    pair, head = {name: weights[name] for name in TENSORS if name in weights}, task.ends.lm_head
    kept = {key: section[key] for key in ROWS & section.keys() & task.drafter.options.model_fields.keys()}
    if task.config.draft_vocab is not None and not task.config.sizes_lm_head:
        kept |= dict.fromkeys(kept.keys() & {"draft_vocab", "candidates"})
    if kept.get("candidates"):
        if len(pair) < len(TENSORS):
            raise ValueError(f"init_from: it has candidates={kept['candidates']} and no pair for them; {AGAIN}")
        if "lm_head.weight" in weights:  # its own
            fits = task.config.lora is not None
        else:
            fits = head.weight.is_meta or int(pair[TENSORS[-1]]) == int(head_fingerprint(head.weight, head.bias))
        task.pair = pair if fits else {}
        kept |= {} if fits else {"candidates": None}
    if kept.get("draft_vocab") and DRAFT_IDS in weights:
        task.draft_ids = weights[DRAFT_IDS][: kept["draft_vocab"]]
    task.rows_options = {key: value for key, value in kept.items() if value is not None}
    return {name: value for name, value in without_pair(weights).items() if name != DRAFT_IDS}


def _typed(value: object) -> str:
    """``value`` as ``key=value`` on a command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def draft_with(task: Task, ids: Tensor) -> None:
    """Let the task draft with the tokens ``ids``, int32 ``[N]``.

    An LM head of its own (``sizes_lm_head``) has one row for each, ascending, and ``d2t`` names it. Its rows begin
    as the target's, if the config says so. With ``init_from`` the trained head's tokens stay.
    """
    task.draft_ids = ids
    if not task.config.sizes_lm_head:
        return
    module: Any = task.module
    if task.config.init_from is None:
        ordered = ids.long().sort().values
        module.d2t.copy_(ordered - torch.arange(len(ids)))
        if getattr(task.config, "lm_head_start", "target") == "target":
            module.lm_head.weight.data.copy_(task.ends.lm_head.scaled[ordered])
    task.draft_ids = task.heads.ids = (module.d2t + torch.arange(len(module.d2t))).int()


def exported(task: Task, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint of ``weights``, and its ``drafter`` section; adapters are merged."""
    options = {**task.head.stored(), **task.rows_options}
    if task.config.lora is not None:
        exact = {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
        weights = _adapter(task, exact).merge_and_unload().state_dict()
    weights = {**weights, **task.pair}
    if task.draft_ids is None or task.config.sizes_lm_head:  # then d2t is among the weights
        return weights, options
    return weights | {DRAFT_IDS: task.draft_ids}, options | {"draft_vocab": len(task.draft_ids)}


def write_checkpoint(task: Task, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
    """Write ``weights`` as a drafter, or with ``lora`` as an adapter, into the top of the run folder."""
    config = {
        "drafter_type": task.config.drafter,
        "format_version": FORMAT_VERSION,
        "drafter": task.head.stored(),
        "target": target.model_dump(),
        "training": training,
    }
    if task.base is not None:
        save_adapter(_adapter(task, weights), config | {"base": task.base.model_dump()}, task.config.out)
        return
    whole, options = exported(task, weights)
    save_checkpoint(task.config.out, whole, config | {"drafter": options})


def _adapter(task: Task, weights: dict[str, Tensor]) -> Any:
    """peft's model with copies of ``weights``, around a new module."""
    assert task.config.lora is not None
    with torch.random.fork_rng(devices=[]):
        module = task.drafter.build_module(task.ends.config, task.head)
        model = with_lora(module, task.config.lora, task.config.init_from)
    copy_weights(model.get_base_model(), weights)
    return model.eval()
