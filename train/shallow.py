"""A draft model of a few of the target's own layers, where there is no small model of its family.

    python -m train.shallow TARGET --layers 0-2,29 --out runs/shallow
    deepspeed train/draft_model.py --config configs/real/shallow.yaml   # align it: before, it is right by chance

The embedding, the norm and the LM head are the target's, too. Only what is taken is read from the target's files: four
layers of a Llama of 70B need 11 GB of memory.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_new_folder, replace_json, replacing_files, save_tensors
from drafters.common.paths import check_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FACTS = "shallow.json"
LAYERS = "model.layers."
OF_EACH = ("layer_types", "no_rope_layers")  # keys of configurations with a value for each layer
LIBRARIES = ("torch", "transformers")


def layer_numbers(text: str) -> list[int]:
    """``"0-2,29"`` -> ``[0, 1, 2, 29]``.

    Raises:
        ValueError: no numbers, or not rising.
    """
    try:
        parts = [[int(number) for number in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers is {text!r}; give numbers from 0 on, for example 0-2,29") from None
    found = [number for part in parts for number in range(part[0], part[-1] + 1)]
    if not found or found != sorted(set(found)):
        raise ValueError(f"--layers {text} gives {found}; name layers once, in their order, for example 0-2,29")
    return found


def shallow_config(config: "PretrainedConfig", layers: list[int], name: str) -> "PretrainedConfig":
    """The target's configuration with ``layers`` alone.

    Raises:
        ValueError: layers that it does not have, or all of them; or what they are hangs on their numbers.
    """
    count = config.num_hidden_layers
    if layers[-1] >= count or len(layers) == count:
        raise ValueError(
            f"--layers has {len(layers)} up to {layers[-1]}, and {name} {count}, 0 to {count - 1}; take a few of them"
        )
    values: dict[str, Any] = config.to_dict()
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"{name}: its layers are dense or mixtures of experts by their numbers, which a part of them "
            "cannot keep; take another model"
        )
    kept = {key: [values[key][number] for number in layers] for key in OF_EACH if values.get(key)}
    return type(config).from_dict(values | kept | {"num_hidden_layers": len(layers)})


def shorten(target: str, revision: str | None, layers: list[int], out: Path) -> int:
    """Write the model, in the target's dtype; returns how many weights it has.

    Raises:
        ValueError: no such target or layers, a family that drafts cannot be made of, or quantised weights.
    """
    from drafters.common.provenance import library_versions
    from drafters.model.ends import read_tensors
    from drafters.model.files import load_bare_tokenizer, load_config_only
    from drafters.model.layers import layer_kind
    from drafters.model.weights import LM_HEAD

    whole = load_config_only(target, revision)
    layer_kind(whole)  # refuses what could not be trained
    if getattr(whole, "quantization_config", None):
        raise ValueError(f"{target} is quantised, and a draft model is trained; give the model that it was made from")
    config = shallow_config(whole, layers, target)
    tokenizer = load_bare_tokenizer(target, revision)
    places = {f"{LAYERS}{number}.": f"{LAYERS}{place}." for place, number in enumerate(layers)}

    def renamed(name: str) -> str:
        if not name.startswith(LAYERS):
            return "" if name == LM_HEAD and config.tie_word_embeddings else name
        return next((new + name.removeprefix(old) for old, new in places.items() if name.startswith(old)), "")

    found = read_tensors(target, revision, lambda name: bool(renamed(name)))
    weights = {renamed(name): value for name, value in found}
    with replacing_files(out, last=("config.json",)) as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
        facts = {"target": target, "revision": revision, "layers": layers, "command": command()}
        replace_json(folder / FACTS, facts | {"versions": library_versions(*LIBRARIES)})
    return sum(value.numel() for value in weights.values())


def main(arguments: list[str] | None = None) -> None:
    """Write the folder."""
    parser = CommandLine("train.shallow", __doc__)
    parser.add_argument("target", help="folder or Hub name of the target")
    parser.add_argument("--layers", required=True, help="which to take, counted from 0, for example 0-2,29")
    parser.add_argument("--out", required=True, type=Path, help="folder of the draft model; must be new or empty")
    parser.add_argument("--revision", help="the target's Hub revision")
    parsed: argparse.Namespace = parser.parse(arguments)
    layers = layer_numbers(parsed.layers)
    check_model(parsed.target, "target", parsed.revision)
    check_new_folder(parsed.out, "--out")
    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        size = shorten(parsed.target, parsed.revision, layers, parsed.out)
    print(f"{parsed.out}: {len(layers)} layers of {parsed.target}, {size:,} weights; align it before it drafts")


if __name__ == "__main__":
    run_program(main)
