"""Adapters of trained drafters: a LoRA that peft saved, for one domain, beside a ``config.json`` that names its base.

It is merged when it is loaded, so that drafting costs what it did; its base stays as it is for other domains.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drafters.common.paths import ADAPTER_CONFIG_FILE
from drafters.hub.checkpoint import load_checkpoint
from drafters.model.candidates import without_pair
from drafters.model.draft_head import DRAFT_IDS
from drafters.model.loading import adapter_config, merge_adapter


def load_head(
    path: str, revision: str | None = None, adapter: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``load_checkpoint``, with an adapter merged into its base, in float32.

    Args:
        path: a drafter, or an adapter, which names the drafter that it is for.
        revision: revision of ``path``.
        adapter: an adapter for the drafter ``path``; the base that the adapter names is ignored.

    Raises:
        ValueError: as ``load_checkpoint`` does; or an adapter where a drafter belongs and the reverse, one of another
            drafter, or one that is no plain LoRA.
    """
    config, weights = load_checkpoint(path, revision=revision)
    if adapter is None:
        if "base" not in config:
            return config, weights
        name, base = path, config["base"]["name"]
        try:
            base_config, weights = load_checkpoint(base)
        except ValueError as error:
            raise ValueError(
                f"{path} is an adapter of the drafter {base!r}, which is not there ({error}); give its folder or Hub "
                f"repository as the checkpoint, and adapter: {path}"
            ) from None
    else:
        name, base, base_config, revision = adapter, path, config, None
        config, _ = load_checkpoint(adapter)
        if "base" not in config:
            raise ValueError(f"adapter: {adapter} is a whole drafter; give it as the checkpoint, and no adapter")
    _check_base(name, config["base"], base, base_config, weights)
    lora = adapter_config(name, revision)
    if lora is None:
        raise ValueError(f"{name} holds no {ADAPTER_CONFIG_FILE}, which tells LoRA's scale; save the adapter again")
    merged = config | {"drafter": base_config["drafter"] | config["drafter"]}
    del merged["base"]
    return merged, _merged(weights, name, lora, revision)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A hash of a drafter's weights as they are saved; which tokens it drafts with is not part of it."""
    digest = hashlib.sha256()
    for name, value in sorted(without_pair(weights).items()):
        if name != DRAFT_IDS:
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_base(
    name: str, wanted: Mapping[str, str], base: str, base_config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Raise ValueError unless ``base`` is the drafter that the adapter ``name`` was trained on."""
    if "base" in base_config:
        raise ValueError(f"{base} is an adapter itself, and {name} is for the drafter {wanted['name']!r}; give that")
    if (actual := fingerprint(weights)) != wanted["fingerprint"]:
        raise ValueError(
            f"the adapter {name} was trained on the drafter {wanted['name']!r} (fingerprint {wanted['fingerprint']}), "
            f"and {base} is another (fingerprint {actual}); give the one it was trained on as the checkpoint, or train "
            f"an adapter on {base} (lora and init_from in the training's config)"
        )


def _merged(weights: dict[str, Tensor], name: str, config: dict[str, Any], revision: str | None) -> dict[str, Tensor]:
    """``weights`` by name with the LoRA in them: of matrices, which alone it changes, in float32."""
    matrices = {key: value for key, value in weights.items() if key.endswith(".weight") and value.dim() == 2}
    head = nn.Module()
    for key, value in matrices.items():
        *path, last, _ = key.split(".")
        place = head
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        linear = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(value.float(), requires_grad=False)
        place.add_module(last, linear)
    return weights | merge_adapter(head, name, config, revision).state_dict()
