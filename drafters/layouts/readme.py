"""README.md of an exported head: what it is, and how it is served."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from drafters.common.wording import dtype_name
from drafters.layouts.released import HOT_TOKENS, MADE_FROM, PICKLED_FILE, is_eagle

STEPS = 5  # tokens a draft in what is shown


class Exported(NamedTuple):
    """What was exported: ``checkpoint``, for ``target``, for the reader ``to``, into ``out``.

    ``hot``: the draft vocabulary, where the drafter has one. ``readers``: all who read the same folder.
    """

    checkpoint: str
    target: str
    to: str
    out: Path
    hot: Tensor | None
    readers: tuple[str, ...] = ()


def readme(config: Mapping[str, Any], weights: Mapping[str, Tensor], given: Exported) -> str:
    """The text for a head with this ``config.json`` and these ``weights``."""
    made, eagle = config[MADE_FROM], is_eagle(weights)
    count, kind = sum(value.numel() for value in weights.values()), "an EAGLE head" if eagle else "a Kangaroo adapter"
    revision = f" at revision `{made['target_revision']}`" if made["target_revision"] else ""
    sections = [
        f"# {made['drafter']}: {kind} for {made['target']}",
        f"{count:,} weights in {dtype_name(next(iter(weights.values())).dtype)}, made by\n\n```sh\n"
        f"python -m drafters.export {given.checkpoint} --to {given.to} --out {given.out}\n"
        f"python -m drafters.export --check {given.out} --target {given.target}   # before it is served\n```\n\n"
        f"It is for the target `{given.target}`{revision} (fingerprint `{made['target_fingerprint']}`) alone: beside "
        "another, nothing that it drafts is accepted, and nobody says so.",
    ]
    if given.hot is not None and given.to != "sglang":
        sections[-1] += (
            f"\n\nThe drafter drafts with the {len(given.hot):,} most frequent tokens. That list is left out here: who "
            "reads this folder knows none, and drafts with the whole vocabulary, which takes longer."
        )
    if not eagle:
        return "\n\n".join([*sections, _kangaroo(given, made["exit_layer"])]) + "\n"
    how = {"vllm": vllm, "sglang": sglang, "official": _official}
    sections += [show(given) for reader, show in how.items() if reader in given.readers]
    return "\n\n".join(sections) + "\n"


def vllm(given: Exported) -> str:
    """How vLLM serves it."""
    said = json.dumps({"method": "eagle", "model": str(given.out), "num_speculative_tokens": STEPS})
    return (
        f"## vLLM\n\n```sh\nvllm serve {given.target} --speculative-config '{said}'\n```\n\n"
        "It drafts chains: a tree's gain is not to be had there."
    )


def sglang(given: Exported) -> str:
    """How SGLang serves it."""
    lines = [
        f"python -m sglang.launch_server --model-path {given.target}",
        f"    --speculative-algorithm EAGLE --speculative-draft-model-path {given.out}",
        f"    --speculative-num-steps {STEPS} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
    ]
    lines += [] if given.hot is None else [f"    --speculative-token-map {given.out / HOT_TOKENS}"]
    text = "## SGLang\n\n```sh\n" + " \\\n".join(lines) + "\n```"
    if given.hot is not None:
        text += f"\n\n`{HOT_TOKENS}` lists the {len(given.hot):,} tokens that it drafts with."
    return text


def _official(given: Exported) -> str:
    return (
        "## The official EAGLE code\n\n```python\nfrom eagle.model.ea_model import EaModel\n\n"
        f"model = EaModel.from_pretrained(\n    base_model_path={given.target!r}, ea_model_path={str(given.out)!r}, "
        "use_eagle3=False\n)\n```\n\nIt takes the embedding from a target whose weights are in several files (with an "
        "index), and fails for one of a single file."
    )


def _kangaroo(given: Exported, exit_layer: int) -> str:
    return (
        "## The official Kangaroo code\n\n```sh\npython -m evaluation.inference_kangaroo "
        f"--model-path {given.target} --adapter-path {given.out} \\\n    --exitlayer {exit_layer} --threshold 0.6 "
        "--steps 6 --dtype float16 --bench-name Kangaroo --model-id kangaroo\n```\n\n"
        f"The adapter was trained behind layer {exit_layer}: with another number it drafts nonsense. The code "
        f"reads `{PICKLED_FILE}` alone (here plain tensors, which load with `weights_only=True`), and the LM head of a "
        f"target whose weights are in several such files."
    )
