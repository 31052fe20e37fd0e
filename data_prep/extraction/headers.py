"""Check a config against the target's configuration and the data, and make the initial manifests of its stores."""

import itertools
from pathlib import Path

import torch
from transformers import PretrainedConfig

from data_prep.answers.finished import whose
from data_prep.common.target import dtype_here
from data_prep.configs import FeatureKeys
from data_prep.dialogues.encoding import template_hash, tokenizer_hash
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import dataset_parts, source_digest
from data_prep.store.manifest import StoreManifest
from drafters.common.paths import hub_names
from drafters.common.provenance import git_commit, library_versions
from drafters.common.states import named_states
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.methods import taps_for
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only, resolve_device
from drafters.model.layers import default_layer


def make_headers(
    config: FeatureKeys,
    chat: ChatTokenizer,
    dtype: str | None = None,
    store_dtype: str | None = None,
    heads: list[str] | None = None,
    download: bool = False,
) -> dict[str, StoreManifest]:
    """One manifest without counts per split.

    Args:
        dtype: dtype that the target runs in (default: ``config.dtype``, resolved on this machine).
        store_dtype: dtype of stored features (default: the target's, or bfloat16 if ``config.dtype`` is auto).
        heads: methods whose head must fit the target; default: the config's ``for``, else Kangaroo with exit layers and
            EAGLE without.
        download: download all weights of a target on the Hub, so that its fingerprint covers all of them.

    Raises:
        ValueError: a missing file, one file given for two splits, a layer that the target does not have, a target too
            shallow for a method, a ``max_length`` above its context, or a tokenizer with more tokens than the target.
    """
    digests = {split: source_digest(source) for split, source in config.splits.items()}
    for (one, first), (other, second) in itertools.combinations(digests.items(), 2):
        if first == second:
            raise ValueError(f"splits {one!r} and {other!r} are the same data ({config.splits[one]}); give two files")
    model = load_config_only(config.target, config.revision)
    check_target(config, model, len(chat.tokenizer))
    taps = taps_for(config.methods, model.num_hidden_layers, config.exit_layers)
    check_heads(heads or config.methods or ["kangaroo" if config.exit_layers else "eagle"], model)
    ends = load_frozen_ends(config.target, device="meta", revision=config.revision, download=download)
    dtype = dtype or dtype_here(config)
    headers = {
        split: StoreManifest(
            target_name=config.target,
            target_revision=config.revision,
            target_fingerprint=ends.fingerprint,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            target_dtype=dtype,
            taps=taps,
            states=named_states(taps),
            dtype=store_dtype or ("bfloat16" if config.dtype == "auto" else dtype),
            tokenizer_hash=tokenizer_hash(chat.tokenizer),
            template_hash=template_hash(chat.template),
            template_date=chat.date,
            chat_template=config.chat_template,
            max_length=config.max_length,
            limit=config.limit,
            source=source,
            source_digest=digests[split],
            hub_names=hub_names(config.target) + ([source] if hub_names(dataset_parts(source)[0]) else []),
            versions=library_versions("torch", "transformers", "tokenizers", "safetensors"),
            commit=git_commit(Path(__file__).parent),
        )
        for split, source in config.splits.items()
    }
    for header in headers.values():
        header.answers = whose(header)
    return headers


def check_target(config: FeatureKeys, model: PretrainedConfig, tokens: int) -> None:
    """Raise ValueError if the config or the tokenizer (of ``tokens`` entries) does not fit the target."""
    layers, context = model.num_hidden_layers, getattr(model, "max_position_embeddings", None)
    wrong = [layer for layer in config.exit_layers if not 1 <= layer <= layers]
    if wrong:
        raise ValueError(f"exit_layers {wrong}: {config.target} has {layers} layers; choose from 1 to {layers}")
    if context is not None and config.max_length > context:
        raise ValueError(
            f"max_length is {config.max_length}, but {config.target} was made for {context} tokens; set "
            f"max_length={context}"
        )
    if tokens > model.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.target} has {tokens} tokens, the model {model.vocab_size}: one of them belongs "
            "to another model; put the right tokenizer beside the weights"
        )
    resolve_device(config.device)


def check_heads(methods: list[str], model: PretrainedConfig) -> None:
    """Raise ValueError if a method's head is made of the target's own layers, and cannot be made of this family's."""
    with torch.device("meta"):
        if "kangaroo" in methods:
            KangarooAdapter(model, KangarooShape(exit_layer=1))
        if "eagle" in methods:
            EagleHead(model, EagleShape(layer=default_layer(model)))
