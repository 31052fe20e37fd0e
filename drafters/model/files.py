"""What is known of a model without its weights: dtype, device, configuration, files of weights."""

import contextlib
import copy
import gc
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from drafters.common.paths import check_loadable
from drafters.common.precision import fast_dtype
from drafters.common.wording import dtype_name, shortened
from drafters.config import Dtype, StoredDtype
from drafters.hub.client import look_up
from drafters.model.config_keys import check_values, reason_of, wrong_key
from drafters.model.text_lm import with_causal_lm

TIED = "tie_word_embeddings"
SUPPORTED = "Llama, Mistral, Mixtral, Qwen2, Qwen3, Olmo2, Phi3 and other models of that shape"


def resolve_dtype(dtype: str | torch.dtype, device: torch.device | None = None) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; ``"auto"`` -> what ``device`` (None: the default one) multiplies fast.

    Raises:
        ValueError: not one of auto, float32, bfloat16, float16.
    """
    if dtype == "auto":
        return fast_dtype(device or resolve_device())
    if (name := dtype_name(dtype)) not in get_args(StoredDtype):
        raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))}, found {dtype!r}")
    resolved: torch.dtype = getattr(torch, name)
    return resolved


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """A device by its name; None: a GPU where there is one, else the CPU.

    Raises:
        ValueError: there is no such device, or a GPU is named and there is none.
    """
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device is {str(device)!r}, which is none; give cpu, cuda or cuda:1, say") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but no GPU is visible here; leave it out or set device=cpu")
    return device


def load_config_only(name: str, revision: str | None = None, may_be_file: bool = False) -> PretrainedConfig:
    """The model's configuration without its weights, of a multimodal model that of its text model.

    Args:
        may_be_file: a config.json alone will do.

    Raises:
        ValueError: nothing loadable there, a model with code of its own, or no causal LM.
    """
    if not (may_be_file and Path(name).is_file()):
        check_loadable(name, revision)
    whole: Any = _from_pretrained(AutoConfig, name, revision, "model configuration", "config.json")
    config = whole if getattr(whole, "text_config", None) is None else _text_model(whole, str(name), revision)
    check_values(str(name), config)
    return config


def _text_model(whole: Any, name: str, revision: str | None) -> PretrainedConfig:
    """The configuration of a multimodal model's text model."""
    config = whole.text_config
    if not isinstance(config, PretrainedConfig):
        raise ValueError(f"{name}: text_config is {shortened(config)} in config.json, and {whole.model_type} has none")
    if not with_causal_lm(config):
        raise ValueError(
            f"{name} is a multimodal model ({whole.model_type}), and transformers has no causal LM for its text "
            f"model ({config.model_type}); give another target"
        )
    # What the file says of the whole model holds, then the text model's flag. The default of the whole model's class
    # is no statement of the file.
    written = PretrainedConfig.get_config_dict(name, revision=revision or "main")[0].get(TIED)
    config.tie_word_embeddings = getattr(config, TIED, whole.tie_word_embeddings) if written is None else written
    config.name_or_path = name
    return config


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this configuration without contents, for the names and shapes of its weights.

    Raises:
        ValueError: transformers has no causal LM of this kind, or a value of which none can be built; with its key.
    """
    try:
        return _empty(config)
    except Exception as error:
        kind, name = type(config), str(config.name_or_path)
        with quiet():
            key_error = wrong_key(name, error, config.to_dict(), lambda values: _empty(kind.from_dict(values)))
        raise key_error or not_loaded(error, name, "causal LM", "the config.json of one") from error


def _empty(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return model


def load_bare_tokenizer(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer in a model's folder or repository.

    Raises:
        ValueError: there is none, or one with code of its own.
    """
    check_loadable(name, revision)
    return _from_pretrained(AutoTokenizer, name, revision, "tokenizer", "tokenizer files")


def _from_pretrained(kind: Any, name: str, revision: str | None, what: str, needs: str) -> Any:
    """Load with transformers' class ``kind``; errors say ``what`` was wanted and which files it ``needs``."""
    try:
        look_up(name, revision)
        return kind.from_pretrained(str(name), revision=revision or "main", trust_remote_code=False)
    except OSError as error:
        raise not_loaded(error, name, what, needs) from error
    except Exception as error:
        if kind is AutoConfig and "trust_remote_code" not in str(error):
            values, _ = PretrainedConfig.get_config_dict(str(name), revision=revision or "main")
            values["model_type"] = values.pop("model_type", None)  # the last to be left out: any family would do
            with quiet():
                key_error = wrong_key(str(name), error, values, _config_of)
            if key_error is not None:
                raise key_error from error
        raise not_loaded(error, name, what, needs) from error


def _config_of(values: dict[str, Any]) -> PretrainedConfig:
    """The configuration with the content ``values`` of a config.json; without a family, one of any family."""
    assert isinstance(values.get("auto_map", {}), dict)  # AutoConfig looks into it
    config: PretrainedConfig = CONFIG_MAPPING[values.get("model_type", "llama")].from_dict(values)
    return config


def not_loaded(error: Exception, name: str, what: str, needs: str) -> ValueError:
    """The error to raise for one of transformers': with its first line, or saying that code would have to be run."""
    if "trust_remote_code" in str(error):  # transformers says to set it
        return ValueError(
            f"{str(name)!r} comes with code of its own (auto_map in its JSON files), and code that was downloaded is "
            f"never run; choose a model of a family that transformers has, as {SUPPORTED}"
        )
    if "tiktoken" in str(error) and find_spec("sentencepiece") is None:  # what transformers tries next
        return ValueError(
            f"{str(name)!r} has a tokenizer.model and no tokenizer.json, and reading it needs sentencepiece: "
            "pip install sentencepiece protobuf (part of .[train])"
        )
    return ValueError(
        f"no {what} could be loaded from {str(name)!r}: it must be a folder or a Hub repository with {needs} "
        f"({reason_of(error)})"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Which file beside it holds each tensor, as a ``model.safetensors.index.json`` says.

    Raises:
        ValueError: it is damaged, or without metadata, which transformers needs; or it names a file elsewhere or of
            another kind: transformers would open that, too, and unpickle what is no safetensors file.
    """
    try:
        whole = json.loads(index.read_text(encoding="utf-8"))
        files: dict[str, Any] = dict(whole["weight_map"])
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{index} is damaged ({error}); download it again") from None
    if not isinstance(metadata := whole.get("metadata"), dict):
        raise ValueError(
            f"{index}: metadata is {shortened(metadata)}, expected an object, which transformers needs; add "
            '"metadata": {}'
        )
    for shard in files.values():
        path = Path(str(shard))
        if path.suffix != ".safetensors" or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{index} names {shortened(shard)} as a file of weights; it must be a .safetensors beside it"
            )
    return files


def refuse_integers(path: str | Path, name: str, dtype: str) -> None:
    """Raise ValueError if a tensor's dtype in a safetensors file is not a floating point one."""
    if dtype[0] in "IU" or dtype == "BOOL":
        raise ValueError(
            f"{path}: {name} is stored as {dtype}, and weights must be floating point (F32, BF16 or F16); convert "
            "them, or say in config.json how they are quantised (quantization_config)"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # free within torch's own pool
    return torch.cuda.mem_get_info(device)[0] + free


def collect_memory() -> None:
    """Collect unreachable reference cycles (targets, their parts and graphs), then empty the CUDA cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """Each layer's sliding-window size, None for full attention."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layers of type {sorted(unknown)} have no tree attention; supported: {SUPPORTED}")
    return [window if kind == "sliding_attention" else None for kind in types]


def rope_depends_on_length(config: PretrainedConfig) -> bool:
    """Whether RoPE's angles at a position change with the length of the text."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default") in ("dynamic", "longrope")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' report and progress bar: the errors here say what is wrong."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
