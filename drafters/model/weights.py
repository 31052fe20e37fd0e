"""The weights of a model: which files hold them, and whether they are those that its config.json describes.

Decoding, capture, training and export open a model's files here (``open_weights``), so that all of them read the same
tensors, tie the same ends and compute the same fingerprint. transformers fills a missing tensor with random numbers and
drops an unexpected one; here both are errors, found from the headers of the files.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HTTPError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from drafters.common.paths import readable
from drafters.common.wording import shortened
from drafters.model.files import meta_model, not_loaded, quiet, refuse_integers, weight_map
from drafters.model.fingerprint import digest, former_fingerprint, former_names, samples_of, stored_shapes
from drafters.model.quantised import options, quantisation

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DISTRIBUTED = "shard-*-model-*-of-*.safetensors"  # transformers 5.23 and newer read these before any other file
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHOWN = 4  # tensors that a message names
MOST_ANSWERS = 16  # models whose tensors were compared with their configurations, more than a program uses


# How files of multimodal models name the tensors of their text model, and the names there.
VISION = "visual."  # beside Llama's names, in Qwen2-VL's and Qwen2.5-VL's files
TEXT_NAMES = {r"^(language_model\.model|model\.language_model)\.": "model.", r"^language_model\.lm_head\.": "lm_head."}


class Stored(NamedTuple):
    """A tensor's place: the file that holds it, its dtype as safetensors names it ("BF16"), its shape, its name
    there."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    key: str


@dataclass
class Weights:
    """The tensors in a model's safetensors files, by name; none is read before it is asked for."""

    name: str
    revision: str | None
    config: PretrainedConfig
    stored: dict[str, Stored]

    @property
    def multimodal(self) -> bool:
        """Whether its files hold other modalities, too."""
        return any(name != place.key for name, place in self.stored.items())

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the embedding and the LM head. Tied ends are one tensor, under either name."""
        embedding, head = EMBEDDING, LM_HEAD
        tied, named = getattr(self.config, "tie_word_embeddings", False), {EMBEDDING, LM_HEAD} & self.stored.keys()
        if len(named) < (1 if tied else 2):  # a family with other names than Llama's
            embedding, head = self._ends_of_its_class()
        if not tied:
            return embedding, head
        one = embedding if embedding in self.stored or head not in self.stored else head
        return one, one

    def _ends_of_its_class(self) -> tuple[str, str]:
        """The names in the files of what transformers' class of the model calls its ends."""
        model = meta_model(self.config)
        names = {id(weights): name for name, weights in model.named_parameters(remove_duplicate=False)}
        embedding, head = (
            self.stored_name(model, names[id(end.weight)])
            for end in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        return embedding, head

    def stored_name(self, model: PreTrainedModel, name: str) -> str:
        """The name in the files of the parameter that transformers' class, ``model``, calls ``name``."""
        if name in self.stored:
            return name
        # Imported here: an engine's process may import this module with transformers 4, which lacks it.
        from transformers.core_model_loading import revert_weight_conversion

        (before,) = revert_weight_conversion(model, {name: model.get_parameter(name)})
        bare = name.removeprefix(f"{model.base_model_prefix}.")  # files of the model without its LM head
        return next((one for one in (before, bare) if one in self.stored), name)

    def path(self, key: str) -> str:
        """The file that holds a floating-point tensor, downloaded if it is on the Hub.

        Raises:
            ValueError: the tensor is stored as whole numbers, or as FP8, whose scales are another tensor.
        """
        path, dtype = fetch(self.name, self.stored[key].file, self.revision), self.stored[key].dtype
        refuse_integers(path, key, dtype)
        if dtype.startswith("F8"):
            raise ValueError(f"{path}: {key} is stored as {dtype}; give a model whose {key} is F32, BF16 or F16")
        return path

    def read(self, key: str) -> Tensor:
        """A floating-point tensor, in its own dtype; raises as ``path`` does."""
        with safe_open(self.path(key), framework="pt") as file:
            return file.get_tensor(self.stored[key].key)

    def fingerprint(self, download: bool = False) -> str:
        """Return the fingerprint of these files, which is that of the model loaded from them, in any dtype.

        Only its first half if files of the Hub that it covers were not downloaded yet.

        Args:
            download: download all files first.
        """
        norm_and_row = former_names(self.config, self.stored)
        former = former_fingerprint(self.config, *(part for _, part in self._tensors(norm_and_row)))
        keys = self._used()
        files = {self.stored[key].file for key in keys}
        if not download and not all(local_path(self.name, file, self.revision) for file in files):
            return former
        samples = samples_of(self.stored[key].shape for key in keys)
        return f"{former}-{digest(((keys[key], part) for key, part in self._tensors(keys)), samples)}"

    def _used(self) -> dict[str, str]:
        """The stored tensors that the model uses, and how a fingerprint names them; of a quantised one all."""
        if quantisation(self.config) is not None:
            return {key: key for key in self.stored}
        empty = meta_model(self.config)
        bare = {key.removeprefix(f"{empty.base_model_prefix}."): key for key in self.stored}
        names = {bare[name]: name for name in stored_shapes(empty) if name in bare}
        embedding, head = self.ends
        if embedding == head == LM_HEAD:  # tied, and stored under the other name
            names[LM_HEAD] = EMBEDDING.removeprefix(f"{empty.base_model_prefix}.")
        return names

    def _tensors(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they are stored, by name, in the order of ``keys``."""
        for file, some in itertools.groupby(keys, key=lambda key: self.stored[key].file):
            path = local_path(self.name, file, self.revision) or fetch(self.name, file, self.revision)
            with safe_open(path, framework="pt") as opened:
                yield from ((key, opened.get_tensor(self.stored[key].key)) for key in some)


def open_weights(name: str, revision: str | None, config: PretrainedConfig) -> Weights:
    """A model's weights, checked against its configuration.

    Raises:
        ValueError: no such files, or two sets of them; tensors that are missing, unexpected or of another shape than
            ``config`` says; whole numbers; tied ends that differ.
    """
    if (elsewhere := getattr(config, "transformers_weights", None)) is not None:
        raise ValueError(
            f"{name}: config.json names {shortened(elsewhere)} as transformers_weights, and the weights are read from "
            f"{SINGLE} or {INDEX}; take the key out, and give the file one of these names"
        )
    weights = Weights(name, revision, config, stored_tensors(name, revision))
    method = quantisation(config)
    if method is None:
        for key, (file, dtype, *_) in weights.stored.items():
            if key.endswith((".weight", ".bias")):  # a buffer may hold positions
                refuse_integers(Path(name) / file, key, dtype)
    if method in (None, "fp8"):  # others need their packages' own modules; ``load_model`` checks them
        refuse_differences(name, config, _differences(name, weights))
    both = getattr(config, "tie_word_embeddings", False) and {EMBEDDING, LM_HEAD} <= weights.stored.keys()
    if both and not torch.equal(weights.read(EMBEDDING), weights.read(LM_HEAD)):
        raise ValueError(
            f"{name}: tie_word_embeddings is true (in config.json, or by default), but {LM_HEAD} differs from "
            f"{EMBEDDING} in its files; set tie_word_embeddings: false to use {LM_HEAD}, or remove that tensor"
        )
    return weights


def stored_tensors(name: str, revision: str | None) -> dict[str, Stored]:
    """Every tensor in the files of a model, from their headers; of a multimodal model those of its text model.

    Raises:
        ValueError: no such files, damaged ones, two sets of them, or a tensor that two of them hold.
    """
    tensors: dict[str, Stored] = {}
    for file in weight_files(name, revision):
        for key, (dtype, shape) in _header(name, file, revision).items():
            if key in tensors:
                first = tensors[key].file
                raise ValueError(f"{name}: {key} is in {first} and in {file}; remove the file that is stale")
            tensors[key] = Stored(file, dtype, shape, key)
    renamed = {key: key for key in tensors}
    for pattern, name in TEXT_NAMES.items():
        renamed = {key: re.sub(pattern, name, new) for key, new in renamed.items()}
    if renamed == {key: key for key in tensors}:
        return {key: place for key, place in tensors.items() if not key.startswith(VISION)}
    text = [key for key in tensors if renamed[key] != key or key.startswith(("lm_head.", "mtp."))]
    return {renamed[key]: tensors[key] for key in text}


def quantised_bytes(name: str, revision: str | None, config: PretrainedConfig) -> int | None:
    """Bytes of a model's weights in its files; None unless they stay as small in memory (``quantised.to_load``)."""
    if quantisation(config) in (None, "compressed-tensors") or options(config).get("dequantize"):
        return None
    stored = stored_tensors(name, revision).values()
    bits = {place.dtype: int(re.sub(r"^\D+(\d*).*", r"\1", place.dtype) or 8) for place in stored}  # "F8_E4M3", "BOOL"
    return sum(prod(place.shape) * bits[place.dtype] // 8 for place in stored)


def weight_files(name: str, revision: str | None = None) -> list[str]:
    """Names of the safetensors files that hold a model: ``model.safetensors``, or what the index names.

    Raises:
        ValueError: the index is damaged; or the folder holds two sets of weights, and transformers and engines would
            read different ones.
    """
    try:
        shards = sorted(set(weight_map(Path(fetch(name, INDEX, revision))).values()))
    except EntryNotFoundError:
        shards = [SINGLE]
    except (RepositoryNotFoundError, HfHubHTTPError) as error:
        raise _no_files(name, error) from error
    second = SINGLE if shards != [SINGLE] and _exists(name, SINGLE, revision) else None
    if Path(name).is_dir():
        second = next((path.name for path in sorted(Path(name).glob(DISTRIBUTED)) if path.name not in shards), second)
    if second:
        raise ValueError(
            f"{name} holds two sets of weights, {second} and {_listed(shards)}: programs differ in which "
            "they read; remove the one that is stale"
        )
    return shards


def local_path(name: str, file: str, revision: str | None) -> str | None:
    """Return the path of one file of a model, without a request to the Hub; None if it was not downloaded yet."""
    if Path(name).is_dir():
        return fetch(name, file, revision)
    path = try_to_load_from_cache(name, file, revision=revision)
    return path if isinstance(path, str) else None


def fetch(name: str, file: str, revision: str | None) -> str:
    """The local path of one file of a model, downloaded if it is on the Hub."""
    if Path(name).is_dir():
        path = Path(name) / file
        if not path.is_file():
            raise EntryNotFoundError(f"{path} does not exist")
        return str(readable(path))
    return hf_hub_download(name, file, revision=revision)


def refuse_differences(name: str, config: PretrainedConfig, info: dict[str, Any]) -> None:
    """Raise ValueError where transformers' ``output_loading_info`` lists tensors that are not as ``config`` says."""
    unexpected = set(info["unexpected_keys"]) - mtp_tensors(info["unexpected_keys"])
    if quantisation(config) is not None:  # scales are the quantiser's own affair
        unexpected = {key for key in unexpected if key.endswith((".bias", ".weight"))}
    differences = {
        "missing": set(info["missing_keys"]),
        "unexpected": unexpected,
        "of another shape": {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]},
    }
    if wrong := [f"{what}: {_listed(keys)}" for what, keys in differences.items() if keys]:
        layers = getattr(config, "num_hidden_layers", "no")
        raise ValueError(
            f"{name}: its tensors are not those that its config.json describes ({layers} layers of "
            f"{config.model_type}): {'; '.join(wrong)}. Download it again, or correct config.json"
        )


def mtp_tensors(names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that belong to layers of next-token prediction (MTP), which drafters read."""
    begins = ["mtp.", "model.mtp_layers."]
    begins += [name.removesuffix("eh_proj.weight") for name in names if name.endswith(".eh_proj.weight")]
    return {name for name in names if name.startswith(tuple(begins))}


def _differences(name: str, weights: Weights) -> dict[str, Any]:
    """transformers' loading info for these tensors: it loads them without contents, so nothing is read.

    Answers are kept, because a program opens the weights of one model several times.
    """
    tensors = [(key, place.dtype, place.shape) for key, place in weights.stored.items()]
    asked = repr((weights.config.to_dict(), tensors))
    if asked not in _answers:
        if len(_answers) == MOST_ANSWERS:
            _answers.clear()
        _answers[asked] = _loading_info(name, weights)
    return _answers[asked]


_answers: dict[str, dict[str, Any]] = {}


def _loading_info(name: str, weights: Weights) -> dict[str, Any]:
    """``_differences``, computed: transformers builds the model twice."""
    fp8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    tensors = {
        key: torch.empty(shape, dtype=fp8.get(dtype, torch.float32), device="meta")
        for key, (_, dtype, shape, _) in weights.stored.items()
    }
    empty, config = meta_model(weights.config), copy.deepcopy(weights.config)
    if quantisation(config) is not None:  # else which names are expected would depend on whether a GPU is here
        config.quantization_config = {**options(config), "dequantize": True}
    with quiet():
        try:
            _, info = type(empty).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except RuntimeError as error:  # some of the tensors that it joins, an expert of a layer say, are missing
            # Imported here: an engine's process may import this module with transformers 4, which lacks it.
            from transformers.core_model_loading import revert_weight_conversion

            missing = revert_weight_conversion(empty, empty.state_dict()).keys() - weights.stored.keys()
            if not missing:
                raise not_loaded(error, name, "model", "tensors that belong together") from error
            info = {"missing_keys": missing, "unexpected_keys": (), "mismatched_keys": ()}
    return dict(info)


def _listed(keys: Iterable[str]) -> str:
    """Some of the names, and how many more there are."""
    names = sorted(keys)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _header(name: str, file: str, revision: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of one file; of one that was not downloaded yet, only its header is."""
    path: Any = None
    try:
        path = local_path(name, file, revision)
        if path is None:
            online = HfApi().parse_safetensors_file_metadata(name, file, revision=revision)
            return {key: (str(info.dtype), tuple(info.shape)) for key, info in online.tensors.items()}
        with safe_open(path, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
            return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    except SafetensorError as error:
        raise not_loaded(error, str(path), "model", "whole safetensors files") from error
    except (EntryNotFoundError, RepositoryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
        raise _no_files(name, error) from error


def _no_files(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name}: no {SINGLE} (nor its index and the files that it names) found there: {error}")


def _exists(name: str, file: str, revision: str | None) -> bool:
    if Path(name).is_dir():
        return (Path(name) / file).is_file()
    if isinstance(try_to_load_from_cache(name, file, revision=revision), str):
        return True
    with contextlib.suppress(OSError, HfHubHTTPError, HTTPError):  # offline: what is not in the cache is not read
        return HfApi().file_exists(name, file, revision=revision)
    return False
