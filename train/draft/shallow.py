"""The steps of train.tools.shallow: a target's configuration, tokenizer and some of its layers as a model."""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from drafters.cli.program import command
from drafters.common.files import replace_json, replacing_files, save_tensors
from drafters.common.provenance import library_versions
from drafters.model.ends import read_tensors
from drafters.model.files import load_bare_tokenizer, load_config_only
from drafters.model.layers import layer_kind
from drafters.model.weights import LM_HEAD

LAYERS = "model.layers."
OF_EACH = ("layer_types", "no_rope_layers")  # keys of configurations that list one value per layer


def shallow_config(config: PretrainedConfig, layers: list[int], name: str) -> PretrainedConfig:
    """The target's configuration with only ``layers``.

    Raises:
        ValueError: layers that it does not have, all of them, or layers whose kind depends on their number.
    """
    count = config.num_hidden_layers
    if layers[-1] >= count or len(layers) == count:
        raise ValueError(
            f"--layers has {len(layers)} up to {layers[-1]}, and {name} {count}, 0 to {count - 1}; take a few of them"
        )
    values: dict[str, Any] = config.to_dict()
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{name}: its layers are dense or mixtures of experts by their numbers; take another model")
    per_layer = {key: [values[key][number] for number in layers] for key in OF_EACH if values.get(key)}
    return type(config).from_dict(values | per_layer | {"num_hidden_layers": len(layers)})


def shorten(target: str, revision: str | None, layers: list[int], out: Path) -> int:
    """Write the model in the target's dtype; return its number of weights.

    Raises:
        ValueError: no such target or layers, an unsupported family, or quantised weights.
    """
    whole = load_config_only(target, revision)
    layer_kind(whole)  # refuses families that cannot be trained
    if getattr(whole, "quantization_config", None):
        raise ValueError(f"{target} is quantised, and a draft model is trained; give the model that it was made from")
    config = shallow_config(whole, layers, target)
    tokenizer = load_bare_tokenizer(target, revision)

    def renamed(name: str) -> str | None:
        """The name in the draft model; None for a tensor that it does not get."""
        if not name.startswith(LAYERS):
            return None if name == LM_HEAD and config.tie_word_embeddings else name
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{layers.index(int(number))}.{rest}" if int(number) in layers else None

    tensors = read_tensors(target, revision, lambda name: renamed(name) is not None)
    weights = {str(renamed(name)): value for name, value in tensors}
    with replacing_files(out, last=("config.json",)) as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
        facts = {"target": target, "revision": revision, "layers": layers, "command": command()}
        replace_json(folder / "shallow.json", facts | {"versions": library_versions("torch", "transformers")})
    return sum(value.numel() for value in weights.values())
