"""Fingerprints of models: they tell targets apart, and are the same for every dtype that a model is loaded in.

The first half is a hash of the shape, of the final norm and of one row of the last layer's attention: the whole
fingerprint of former versions (``drafters/common/fingerprints.py``). The second half covers names, shapes and values of
all weights. Names and shapes are those of the files, where transformers joins experts, say. dtypes are not covered, and
values count as bf16 with tiny ones as zero, so that files and models in any dtype agree. Models of up to ``WHOLE``
values are read whole; of larger ones, samples of every tensor. Packed weights of quantised models count as they are.
"""

import copy
import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from drafters.model.quantised import quantisation

WHOLE = 1 << 28  # values of a model that are all read: a core takes about a second
SAMPLE = 1 << 10  # consecutive values of a sample
TENSOR_SAMPLES, MODEL_SAMPLES = 16, 8192  # most of one tensor and of a model: a cold disk takes some seconds
TINY = 0x3900  # the bits of 2^-13 in bf16: float16 flushes weights not far below it to zero
CHUNK = 1 << 18  # values that are rounded at once, in the processor's cache
ROUNDED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


def of_model(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model in memory."""
    state = weights_of(model)
    names = former_names(model.config, state)
    former = former_fingerprint(model.config, *(state[name] for name in names))
    if quantisation(model.config):
        return f"{former}-{digest(state.items(), samples_of(part.shape for part in state.values()))}"
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # ``save_pretrained`` leaves a text
    with torch.device("meta"):
        empty = type(model)(config)
    return f"{former}-{digest(_as_stored(empty, state), samples_of(stored_shapes(empty).values()))}"


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and stored buffers by name; a tied one only once."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, part in model.state_dict(keep_vars=True).items():
        weights.setdefault(id(part), (name, part))
    return dict(weights.values())


def stored_shapes(empty: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the files of a model like ``empty``, which has no contents.

    Names are without the prefix that files of a model without its LM head lack (``model.``).
    """
    return {name: tuple(part.shape) for name, part in _reverted(empty, weights_of(empty)).items()}


def _as_stored(empty: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``state`` as its files have them, layer by layer: joined experts are split, which copies them."""
    layers = itertools.groupby(state, key=lambda name: re.sub(r"(\.\d+)\..*", r"\1", name))
    for _, names in layers:
        yield from _reverted(empty, {name: state[name] for name in names}).items()


def _reverted(empty: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    # Imported here: an engine's process may import this module with transformers 4, which lacks it.
    from transformers.core_model_loading import revert_weight_conversion

    prefix = f"{empty.base_model_prefix}."
    return {name.removeprefix(prefix): part for name, part in revert_weight_conversion(empty, state).items()}


def samples_of(shapes: Iterable[tuple[int, ...]]) -> int | None:
    """Return the number of samples of each tensor; None: tensors are read whole."""
    sizes = [prod(shape) for shape in shapes]
    return None if sum(sizes) <= WHOLE else max(1, min(TENSOR_SAMPLES, MODEL_SAMPLES // len(sizes)))


def digest(tensors: Iterable[tuple[str, Tensor]], samples: int | None) -> str:
    """Return the second half of a fingerprint; the order of ``tensors`` does not matter."""
    parts = sorted(f"{name} {list(part.shape)} {_hash(part, samples)}" for name, part in tensors)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@torch.no_grad()
def _hash(tensor: Tensor, samples: int | None) -> str:
    """A hash of the values of one tensor, or of ``samples`` evenly spaced samples."""
    values, sha = tensor.detach().reshape(-1), hashlib.sha256()
    if samples is not None and samples * SAMPLE < values.numel():
        room = values.numel() - SAMPLE
        starts = [room * (2 * index + 1) // (2 * samples) for index in range(samples)]
        values = torch.cat([values[start : start + SAMPLE] for start in starts])
    for chunk in values.split(CHUNK):
        sha.update(_bytes(chunk))
    return sha.hexdigest()


def _bytes(values: Tensor) -> bytes:
    """Values rounded to bf16, tiny ones as zero; packed ones as they are."""
    if values.dtype not in ROUNDED:
        return values.cpu().view(torch.uint8).numpy().tobytes()
    # bfloat16 rounds and float16 flushes tiny weights to zero: round, then flush, so that all loads agree. (In that
    # order: a float32 weight just below the bound may be rounded up to it.)
    bits = values.cpu().to(torch.bfloat16).view(torch.int16)
    return torch.where((bits & 0x7FFF) < TINY, 0, bits).numpy().tobytes()


def former_fingerprint(config: PretrainedConfig, norm: Tensor | None = None, projection: Tensor | None = None) -> str:
    """Return the first half: of the shape, the final norm and the first row of the last layer's attention weight."""
    sha = hashlib.sha256(",".join(f"{name}={getattr(config, name, None)}" for name in SHAPE).encode())
    if norm is not None and projection is not None:
        for values in (norm, projection[0]):
            sha.update(_bytes(values.detach().reshape(-1).float()))
    return sha.hexdigest()[:16]


def former_names(config: PretrainedConfig, names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the final norm and of an attention weight of the last layer; none if it has no attention."""
    last, norm = f".{config.num_hidden_layers - 1}.", "model.norm.weight"
    for kind in ("weight", "qweight", "weight_packed"):  # of Llama's name: plain, of AWQ and GPTQ, packed
        if {norm, projection := f"model.layers{last}self_attn.o_proj.{kind}"} <= set(names):
            return norm, projection
    inner = sorted(name for name in names if last in name and "att" in name and name.endswith(".weight"))
    outer = sorted(name for name in names if ("norm" in name or "ln_f" in name) and not any(map(str.isdigit, name)))
    return ((outer or inner)[-1], inner[-1]) if inner else ()
