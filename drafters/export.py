"""A trained drafter in the form that another engine loads.

    python -m drafters.export CHECKPOINT --engine vllm --out FOLDER [--target MODEL]

For vLLM: EAGLE heads of Llamas. The tensors stay as they are, config.json becomes that of a Llama with one layer, and
embedding and LM head are the target's (`speculative_config={"method": "eagle", "model": FOLDER, ...}`). The official
EAGLE code reads the same folder.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.files import replace_json, save_tensors
from drafters.paths import check_model
from drafters.program import CommandLine, command, keeping, run_program

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ENGINES = ("vllm",)
ONLY_EAGLE = "vLLM loads EAGLE heads with Llama's layer"


def export(checkpoint: str, engine: str, out: Path, target: str | None = None) -> None:
    """Write the checkpoint's head for ``engine`` into ``out``, a new folder or an empty one.

    Args:
        target: a folder or Hub repository of the target, where it is not at the place that the checkpoint names.

    Raises:
        ValueError: an unknown engine, a checkpoint that it cannot load, another target, or a folder that holds files.
        OSError: the disk is full, say.
    """
    from drafters.checkpoint import WEIGHTS_FILE, load_state
    from drafters.choices import SHIFTED
    from drafters.eagle import EagleHead
    from drafters.head_adapter import load_head
    from drafters.model.draft_head import DRAFT_IDS
    from drafters.model.ends import load_frozen_ends
    from drafters.model.files import load_config_only

    check(engine, out)
    config, weights = load_head(checkpoint)
    trained = config["target"]
    if config["drafter_type"] != "eagle":
        raise ValueError(
            f"{checkpoint} is of the method {config['drafter_type']!r}; {ONLY_EAGLE}, and no other of ours"
        )
    if (inputs := config["drafter"].get("inputs", SHIFTED)) != SHIFTED:
        raise ValueError(
            f"{checkpoint} reads {inputs!r}, and vLLM and the official EAGLE code give a head {SHIFTED!r} alone; train "
            f"one with inputs={SHIFTED}, the default"
        )
    name, revision = target or trained["name"], None if target else trained["revision"]
    family = load_config_only(name, revision)
    _check_family(family, checkpoint)
    # A head that is served beside another target loads as well, and nothing that it drafts is accepted.
    fingerprint = load_frozen_ends(name, device="meta", revision=revision).fingerprint
    if fingerprint != trained["fingerprint"]:
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']!r} (fingerprint {trained['fingerprint']}), and {name} is "
            f"another model (fingerprint {fingerprint}); give the one it was trained for: --target MODEL"
        )
    weights.pop(DRAFT_IDS, None)  # there, the head drafts with the whole vocabulary
    load_state(EagleHead(family), weights, checkpoint)  # vLLM would leave a missing weight random, and not say so
    there = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        save_tensors(weights, out / WEIGHTS_FILE, {"format": "pt"})
        replace_json(out / "config.json", llama_config(family))
    except BaseException:
        shutil.rmtree(out) if not there else (out / WEIGHTS_FILE).unlink(missing_ok=True)
        raise


def llama_config(target: "PretrainedConfig") -> dict[str, Any]:
    """``config.json`` of a Llama with one layer as wide as the target's."""
    # Without the name that transformers keeps of it, and without what would lead to code beside the target.
    left_out = ("_name_or_path", "auto_map")
    found = {key: value for key, value in target.to_dict().items() if key not in left_out}
    found |= {
        "architectures": ["LlamaForCausalLM"],  # vLLM puts Eagle in front of it
        "num_hidden_layers": 1,
        # Of fc. vLLM reads it as biases of the attention: with true it expects some, drafts nonsense and says nothing.
        "bias": False,
    }
    if found.get("layer_types"):
        found["layer_types"] = ["full_attention"]
    rope = found.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default":  # as readers older than transformers 5 look for it
        found |= {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": None}
    return found


def check(engine: str, out: Path) -> None:
    """Check what can be checked before anything is read.

    Raises:
        ValueError: an engine that nothing is written for, or a folder that holds files.
    """
    if engine not in ENGINES:
        raise ValueError(f"nothing is written for the engine {engine!r}; known: {', '.join(ENGINES)}")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--out {out} is {'a file' if out.is_file() else 'not empty'}; give a new folder")


def _check_family(config: "PretrainedConfig", checkpoint: str) -> None:
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if config.model_type != "llama" or biases:
        of = f"the family {config.model_type!r}" + (f" with {' and '.join(biases)}" if biases else "")
        raise ValueError(f"{checkpoint} is a head for {of}; {ONLY_EAGLE}, without biases")


def main(arguments: list[str] | None = None) -> None:
    """Export a checkpoint."""
    parser = CommandLine("drafters.export", __doc__)
    parser.add_argument("checkpoint", help="folder or Hub repository of a drafter")
    parser.add_argument("--engine", required=True, choices=ENGINES, help="what is to load it")
    parser.add_argument("--out", required=True, type=Path, help="new folder")
    parser.add_argument("--target", help="its target, where that is not at the place that the checkpoint names")
    given = parser.parse(arguments)
    check(given.engine, given.out)
    check_model(given.checkpoint, "checkpoint")
    check_model(given.target, "--target")
    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        export(given.checkpoint, given.engine, given.out, given.target)
    print(given.out)


if __name__ == "__main__":
    run_program(main)
