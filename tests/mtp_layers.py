"""MTP layers to test with: a drafter with a random one, and tiny targets with one in their files."""

import json
from pathlib import Path
from typing import Any

import families
import torch
from by_keys import new_drafter, new_head
from rigged import Oracle, with_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel
from drafters.heads.mtp.own import stored_names
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import identity


def mtp(target: TargetModel, tree: str, noise: float | None = None, **keys: Any) -> Any:
    """A drafter with a random layer; ``noise`` makes it an oracle, None leaves it as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = new_head("mtp", target.config, **keys)
        for parts in (head, *head.others):
            for norm in (parts.embed_norm, parts.hidden_norm, parts.norm):
                norm.weight.data.uniform_(0.5, 1.5)
    drafter = new_drafter("mtp", target, head, tree=tree, **keys)
    if noise is not None:
        drafter = with_head(drafter, LayeredOracle if head.shape.layers > 1 else Oracle, noise)
        drafter.lm_head.enter, drafter.head.norms = identity, [identity] * head.shape.layers
    return drafter


class LayeredOracle(Oracle):
    """As ``Oracle``, for several layers. Each one runs over all nodes so far."""

    def run(self, number: int, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        outputs: Tensor = super().run(number, features, tokens, rows)  # type: ignore[misc]
        if rows.see is None:
            return outputs
        texts = []
        for ids, nodes, mask in zip(self._committed, tokens.tolist(), rows.see.tolist(), strict=True):
            paths = [[node for node, visible in zip(nodes, row, strict=True) if visible] for row in mask]
            texts.append([ids + path for path in paths])
        longest = max(len(text) for row in texts for text in row)
        truths = torch.zeros_like(outputs)
        for length in range(longest + 1):
            places = [n for n, text in enumerate(texts[0]) if len(text) - len(self._committed[0]) == length]
            if places:
                truths[:, places] = self._truths([[row[n] for n in places] for row in texts])
        return truths


def with_layer(
    folder: Path, kind: str, family: str = "llama", shards: int = 1, joined: bool = False, layers: int = 1, **more: Any
) -> Any:
    """Save a tiny target with MTP layers in its files; return their module."""
    model = families.saved(family, families.DECODED[family] | more, folder)
    torch.manual_seed(3)
    head = new_head("mtp", model.config, kind=kind, layers=layers)
    for weights in head.parameters():
        if weights.dim() == 1:
            weights.data.uniform_(0.5, 1.5)
    extra = stored_names(head.state_dict(), kind, model.config, joined)  # type: ignore[arg-type]
    file = folder / "model.safetensors"
    if shards == 1:
        save_file(load_file(file) | extra, file, {"format": "pt"})
        return head
    whole = load_file(file)
    parts = {"model-1.safetensors": whole, "model-2.safetensors": extra}
    for name, part in parts.items():
        save_file(part, folder / name, {"format": "pt"})
    names = {key: name for name, part in parts.items() for key in part}
    (folder / f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    file.unlink()
    return head


def add_copies(folder: Path, layers: int = 1) -> None:
    """Write copies of embedding and LM head beside each MTP layer of a target with three layers."""
    file = folder / "model.safetensors"
    whole = load_file(file)
    ends = {"embed_tokens": whole["model.embed_tokens.weight"], "shared_head.head": whole["lm_head.weight"]}
    copies = {f"model.layers.{3 + k}.{name}.weight": end.clone() for k in range(layers) for name, end in ends.items()}
    save_file(whole | copies, file, {"format": "pt"})


def glm(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a tiny GLM-4.5 whose MTP layer is a copy of its last layer; return the model."""
    model: Any = families.build("glm4_moe", {}).to(dtype)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = 5 + torch.randn(4)  # float32, as in released files
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    whole = load_file(file)
    begins = "model.layers.2."
    last = {key.removeprefix(begins): value for key, value in whole.items() if key.startswith(begins)}
    last |= {name: torch.ones(48) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    last["eh_proj.weight"] = torch.randn(48, 96)
    added = {f"model.layers.3.{key}": value.clone() for key, value in last.items()}
    save_file(whole | {key: value if "bias" in key else value.to(dtype) for key, value in added.items()}, file)
    return model
