"""Write the configs and the script of train.adapt: ``templates/adapt`` filled with the head's own recipe."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from drafters.common.fingerprints import same_weights
from drafters.config import validate
from drafters.heads.shape import split
from drafters.hub.checkpoint import CheckpointConfig, config_of
from drafters.methods import drafter_class, head_shape
from drafters.model.ends import load_frozen_ends
from drafters.model.files import free_memory, resolve_device
from train.configs import START_SCRIPT, AdaptConfig, schema_of, trained_methods
from train.core.config import TrainConfig
from train.plan.write import SMALL, fill
from train.preflight.estimate import target_parameters

NEW_TOKENS = 128  # most tokens of an answer that is measured
# Learning rate: a share of the head's first one, if its checkpoint records that, else one of these.
# Tuned on the bundled target (docs/adapting.md): larger shares gain more on the traffic and lose still more elsewhere.
SHARE = 1 / 30
SMALL_RATE, LARGE_RATE = 1e-4, 1e-6  # for hidden sizes up to SMALL, and above
# Keys of a recorded training that the adaptation repeats, beside the method's own.
REPEATED = {"optimizer", "betas", "weight_decay", "gradient_clipping", "classification_loss", "lk_eta"}
REPEATED |= {"top_k_weight", "top_k", "loss_vocab", "loss_chunk_rows"}
# Of new weights, or of another target.
NOT_REPEATED = {"start", "lm_head_start", "joint", "init_from", "ttt_from", "unroll_from"}


def plan(adapt: AdaptConfig, command: list[str]) -> dict[str, str]:
    """Check that head and target fit, and return the texts of the configs and the script by name; print warnings.

    Args:
        command: the command line of train.adapt.

    Raises:
        ValueError: the head is of another target, an adapter, or of a method that is not trained here.
    """
    head = config_of(adapt.drafter)
    target = check_head(adapt, head)
    schema, kind = schema_of(head.drafter_type), drafter_class(head.drafter_type)
    longest = getattr(target, "max_position_embeddings", None) or adapt.max_length
    device, recorded = resolve_device(), recipe(head, schema)
    before = head.training.get("config", {})
    usual = SMALL_RATE if target.hidden_size <= SMALL else LARGE_RATE
    first = before.get("first_learning_rate") or before.get("learning_rate") or usual / SHARE
    if adapt.lora and recorded.get("optimizer") == "muon":
        del recorded["optimizer"]
    new_tokens = min(NEW_TOKENS, longest // 4)
    values = vars(adapt) | {
        "out": str(adapt.out), "name": adapt.out.name, "method": head.drafter_type, "recorded": recorded,
        "rate": float(f"{SHARE * first:.2g}"), "first": first,
        "cpu": device.type == "cpu", "max_length": min(adapt.max_length, longest),
        "tree": "tree" in kind.options.model_fields, "longest": longest - new_tokens, "new_tokens": new_tokens,
        "lossless": 4 * target_parameters(target)[0] < free_memory(device),
        "script": os.path.relpath(Path(__file__).parents[1] / f"{head.drafter_type}.py"), "here": str(Path.cwd()),
        "command": shlex.join(command), "bin": str(Path(sys.executable).parent),
    }  # fmt: skip
    training = fill("adapt/training.yaml", values)
    config = validate(schema, yaml.safe_load(training), f"--drafter {adapt.drafter}, its recorded training")
    values["taps"] = list(config.settled(lambda: int(target.num_hidden_layers)).taps)
    if adapt.guard is None:
        print("no --guard: nothing will be known of other prompts than the traffic")
    if not values["lossless"]:
        print("no lossless test: the target in float32 does not fit into memory")
    texts = {f"configs/{name}.yaml": fill(f"adapt/{name}.yaml", values) for name in ("features", "lossless")}
    texts[f"configs/{head.drafter_type}.yaml"] = training
    return {**texts, START_SCRIPT: fill("adapt/run.sh", values)}


def check_head(adapt: AdaptConfig, head: CheckpointConfig) -> PretrainedConfig:
    """Return the target's config; raises ValueError unless the head can be trained here and is this target's."""
    if head.drafter_type not in trained_methods():
        raise ValueError(f"--drafter {adapt.drafter} is of type {head.drafter_type!r}; give a trained head")
    if hasattr(head, "base"):
        raise ValueError(
            f"--drafter {adapt.drafter} is a LoRA of {head.base.name}; give that head, or merge them: "
            f"load_drafter({adapt.drafter!r}, target).save_pretrained(FOLDER)"
        )
    ends = load_frozen_ends(adapt.target, device="meta", download=True)
    ours, theirs = head.target.fingerprint, ends.fingerprint
    if not same_weights(ours, theirs, f"--drafter {adapt.drafter}"):
        raise ValueError(
            f"--drafter {adapt.drafter} was trained for {head.target.name!r} (fingerprint {ours}), and --target "
            f"{adapt.target} has fingerprint {theirs}; give that target, or another head"
        )
    return ends.config


def recipe(head: CheckpointConfig, schema: type[TrainConfig]) -> dict[str, Any]:
    """Return the shape of the head, and the keys of its recorded training that the adaptation repeats."""
    shape, _ = split(head_shape(head.drafter_type), head.drafter)
    rows = shape.pop("draft_vocab_size", None)  # of its own LM head; other draft tokens stay those of init_from
    shape = {key: value for key, value in shape.items() if key not in ("trained_steps", "shape")}
    before = head.training.get("config", {})
    own = (schema.model_fields.keys() - TrainConfig.model_fields.keys() | REPEATED) - NOT_REPEATED
    repeated = {key: value for key, value in before.items() if key in own & schema.model_fields.keys()}
    return repeated | ({"draft_vocab": rows} if rows else {}) | ({"head": shape} if shape else {})
