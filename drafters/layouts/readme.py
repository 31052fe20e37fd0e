"""README.md of an exported head: what it is, and how it is served."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from drafters.common.wording import dtype_name
from drafters.heads.forms import STEPS, HeadForms
from drafters.heads.keys import MADE_FROM
from drafters.heads.one_layer import HOT_TOKENS
from drafters.hub.checkpoint import CONFIDENCE_FILE

NUMBERED = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")


class Exported(NamedTuple):
    """What was exported: ``checkpoint``, for ``target``, for the reader ``to``, into ``out``.

    ``hot``: the draft vocabulary; None if the drafter has none. ``readers``: all programs that load this folder.
    ``steps``: tokens of a draft in the commands shown. ``calibrated``: the folder has ``CONFIDENCE_FILE``.
    """

    checkpoint: str
    target: str
    to: str
    out: Path
    hot: Tensor | None
    method: str
    forms: HeadForms
    readers: tuple[str, ...] = ()
    steps: int = STEPS
    calibrated: bool = False

    @property
    def name(self) -> str:
        """The method's name in engines."""
        return self.forms.served_as or self.method


def readme(config: Mapping[str, Any], weights: Mapping[str, Tensor], given: Exported) -> str:
    """The text for a head with this ``config.json`` and these ``weights``."""
    made, count = config[MADE_FROM], sum(value.numel() for value in weights.values())
    revision = f" at revision `{made['target_revision']}`" if made["target_revision"] else ""
    sections = [
        f"# {made['drafter']}: {given.forms.noun} for {made['target']}",
        f"{count:,} weights in {dtype_name(next(iter(weights.values())).dtype)}, made by\n\n```sh\n"
        f"python -m drafters.export {given.checkpoint} --to {given.to} --out {given.out}\n"
        f"python -m drafters.export --check {given.out} --target {given.target}   # before it is served\n```\n\n"
        f"It works only with the target `{given.target}`{revision} (fingerprint `{made['target_fingerprint']}`). With "
        "another target no draft is accepted, and no program says so.",
    ]
    if given.hot is not None and given.to != "sglang":
        sections[-1] += (
            f"\n\nThe drafter drafts with the {len(given.hot):,} most frequent tokens. That list is left out here: the "
            "programs that read this folder know none, and draft with the whole vocabulary, which takes longer."
        )
    official = f"## The official code\n\n```\n{given.forms.code}\n```\n\n{given.forms.note}".format(
        target=given.target, out=given.out, exit_layer=made.get("exit_layer")
    )
    if "states" in made:
        sections.append(_reads(made))
    how = {"vllm": vllm(given), "sglang": sglang(given), "official": official}
    how |= {"speculators": _speculators(given), "llama.cpp": _llama_cpp(given)}
    return "\n\n".join([*sections, *(text for reader, text in how.items() if reader in given.readers)]) + "\n"


def _reads(made: Mapping[str, Any]) -> str:
    """What a head of several states reads, and feeds back or predicts."""
    states = "\n".join(f"- {state}" for state in made["states"])
    ids = next(key for key in NUMBERED if key in made)
    then = (
        f"The next step reads {made['fed_back']}."
        if "fed_back" in made
        else f"Layout {made['layout']}: {made['slot']}."
    )
    return (
        f"## What it reads\n\nfc takes these states of the target, in this order:\n\n{states}\n\n"
        f"`{ids}` in config.json counts {made[ids]}. {then}"
    )


def _speculators(given: Exported) -> str:
    return (
        "## speculators\n\n```python\nfrom speculators import SpeculatorModel\n\n"
        f'model = SpeculatorModel.from_pretrained("{given.out}")  # to train it further there\n```'
    )


def _llama_cpp(given: Exported) -> str:
    lines = [
        f"python convert_hf_to_gguf.py {given.target} --outfile target.gguf",
        f"python convert_hf_to_gguf.py {given.out} --target-model-dir {given.target} --outfile draft.gguf",
        f"llama-server -m target.gguf -md draft.gguf --spec-type draft-{given.name} --spec-draft-n-max {given.steps}",
    ]
    return "## llama.cpp\n\n```sh\n" + "\n".join(lines) + "\n```"


def vllm(given: Exported) -> str:
    """How vLLM serves it."""
    options = {"method": given.name, "model": str(given.out), "num_speculative_tokens": given.steps}
    options |= given.forms.vllm_options
    return (
        f"## vLLM\n\n```sh\nvllm serve {given.target} --speculative-config '{json.dumps(options)}'\n```\n\n"
        "vLLM drafts chains, not trees."
    )


def sglang(given: Exported) -> str:
    """How SGLang serves it."""
    if given.forms.drafts_blocks:
        draft = f"--speculative-num-draft-tokens {given.steps + 1}"  # with the anchor
    else:
        draft = f"--speculative-num-steps {STEPS} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    lines = [
        f"python -m sglang.launch_server --model-path {given.target}",
        f"    --speculative-algorithm {given.name.upper()} --speculative-draft-model-path {given.out}",
        f"    {draft}",
    ]
    lines += [] if given.hot is None else [f"    --speculative-token-map {given.out / HOT_TOKENS}"]
    confidence = given.out / CONFIDENCE_FILE
    lines += [f"    --speculative-dspark-confidence-sts-path {confidence}"] if given.calibrated else []
    text = "## SGLang\n\n```sh\n" + " \\\n".join(lines) + "\n```"
    if given.hot is not None:
        text += f"\n\n`{HOT_TOKENS}` lists the {len(given.hot):,} tokens that it drafts with."
    if given.calibrated:
        text += (
            f"\n\n`{CONFIDENCE_FILE}` has the calibrated temperatures of the confidence head. SGLang reads them where "
            "it shortens drafts by confidence (`SGLANG_RAGGED_VERIFY_MODE=compact`)."
        )
    return text
