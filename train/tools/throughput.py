"""Measure training throughput against a plain formulation (train/bench/reference.py), alternating in one run.

    python -m train.tools.throughput --config configs/eagle/stdlib.yaml [key=value ...] [--out throughput.json]
    python -m train.tools.throughput --shape hidden=4096,vocab=128256,heads=32,kv_heads=8 --tokens 8192

With ``--config``: DeepSpeed's optimizer and a run's store, which our side reads as in training and the plain side from
one file per dialogue. With ``--shape``: AdamW on float32 masters and random features, in memory, of dialogues of
``--dialogue-lengths`` (``realistic``, or a store's folder). Both sides share module, optimizer and dialogues. tokens/s
does not count padding. EAGLE-3, P-EAGLE, MTP and block drafters have no plain formulation, and are measured alone.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

from drafters.cli.program import CommandLine, above_zero, command, keeping, leave, positive, run_program
from drafters.common.files import check_file
from drafters.config import from_overrides, load_config
from train.configs import schema_of, trained_methods
from train.core.config import TrainConfig
from train.preflight.command import check

SHAPE = {"hidden": 4096, "vocab": 128256, "heads": 32, "kv_heads": 8, "intermediate": 14336}
METHOD = "eagle"  # the default
FILLED = {"exit_layer": 2, "mask_token_id": 2}  # required keys whose value does not change the work of a step


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandLine("train.tools.throughput", __doc__, overrides="batch_tokens=8192")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--config", help="YAML of a training run with a feature store")
    group.add_argument("--shape", help="hidden=4096,vocab=128256,heads=32,kv_heads=8,intermediate=14336 (the defaults)")
    parser.add_argument("--method", choices=trained_methods(), help="default: by the config's keys, or eagle")
    parser.add_argument("--tokens", type=positive, default=8192, help="with --shape: tokens of an optimiser step")
    parser.add_argument("--dialogue-lengths", default="realistic", help="with --shape: realistic, or a store's folder")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds counted, after one of warm-up")
    parser.add_argument("--steps", type=positive, default=4, help="optimiser steps of a side in a round")
    parser.add_argument("--workers", type=int, default=0, help="the plain DataLoader's processes, with --config")
    parser.add_argument("--peak-tflops", type=above_zero, help="the device's bf16 peak, for MFU; known for common GPUs")
    parser.add_argument("--out", type=Path, help="JSON with every round")
    return parser.parse(argv)


def parse_shape(text: str) -> dict[str, int]:
    """``hidden=4096,vocab=128256,...`` over the defaults of a Llama-3.1-8B.

    Raises:
        ValueError: a key that is not one of a shape, a value that is no positive integer, or heads that divide neither
            the hidden size into even parts nor among the key-value heads.
    """
    shape = dict(SHAPE)
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in shape or not value.isdecimal() or not int(value):
            raise ValueError(f"--shape {part!r}: give {', '.join(f'{name}=N' for name in SHAPE)}, N a positive integer")
        shape[key] = int(value)
    hidden, heads, kv_heads = shape["hidden"], shape["heads"], shape["kv_heads"]
    if heads % kv_heads:
        raise ValueError(f"--shape: {heads} heads cannot share {kv_heads} kv_heads; heads must be a multiple of those")
    if hidden % (2 * heads):  # rotary embeddings turn pairs
        raise ValueError(f"--shape: hidden={hidden} must be an even multiple of heads={heads}")
    return shape


def read_config(arguments: argparse.Namespace) -> TrainConfig:
    """The run's config; for ``--shape``, a config of the paper's numbers and the overrides.

    Raises:
        ValueError: the overrides lack a key without a default.
    """
    if arguments.config:
        schema = schema_of(arguments.method or _method_of(Path(arguments.config)))
        return load_config(schema, arguments.config, arguments.overrides)
    method = arguments.method or METHOD
    schema = schema_of(method)
    values: dict[str, Any] = dict.fromkeys(("target", "features", "out"), "none")  # it uses no files
    values |= {"steps": 1, "batch_tokens": arguments.tokens, "learning_rate": 3e-5}
    needed = {name for name, field in _fields(schema).items() if field.is_required()}
    values |= {name: value for name, value in FILLED.items() if name in needed}
    given = {override.partition("=")[0].removeprefix("head.") for override in arguments.overrides}
    if missing := sorted(needed - values.keys() - given):
        keys = " ".join(f"{name}=N" for name in missing)
        raise ValueError(f"--method {method} has no default for {', '.join(missing)}: add {keys} (configs/{method})")
    overrides = [f"{key}={value}" for key, value in values.items()] + arguments.overrides
    return from_overrides(schema, overrides)


def _fields(schema: type[TrainConfig]) -> dict[str, Any]:
    """The fields of a run's config and, in place of ``head``, those of its shape."""
    shape: Any = schema.model_fields["head"].annotation
    return {name: field for name, field in schema.model_fields.items() if name != "head"} | shape.model_fields


def _method_of(config: Path) -> str:
    """The method of a run's config: the one that shares most of its own keys with it."""
    keys = yaml.safe_load(config.read_text()) if config.is_file() else None
    present = {*keys, *(keys.get("head") or ())} if isinstance(keys, dict) else set()
    fields = {name: _fields(schema_of(name)).keys() - TrainConfig.model_fields for name in trained_methods()}
    return max(fields, key=lambda name: (len(fields[name] & present), name == METHOD))


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON."""
    arguments = _parse(argv)
    shape = None if arguments.config else parse_shape(arguments.shape)
    config = read_config(arguments)
    if arguments.out is not None:
        check_file(arguments.out, "--out")
    if shape is None:
        check(config)

    from train.bench.report import measure

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        measure(config, shape, arguments)
    return 0


if __name__ == "__main__":
    run_program(lambda: leave(main()))
