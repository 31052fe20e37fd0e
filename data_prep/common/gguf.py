"""Convert a GGUF file to a folder of safetensors, for data_prep.gguf."""

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from data_prep.common.disk import check_room, file_sha256
from drafters import TargetModel
from drafters.cli.program import command
from drafters.common.files import replace_json, replacing_files
from drafters.common.provenance import library_versions
from drafters.model.files import resolve_dtype
from drafters.model.loading import check_memory, weight_bytes

FACTS = "gguf.json"
LIBRARIES = ("torch", "transformers", "gguf")


def convert(file: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Read, check and write the model; returns the content of gguf.json.

    Raises:
        ValueError: a damaged file, a family that transformers cannot read from GGUF or whose layers this library does
            not run, weights that are not finite, no chat template, or too little memory or disk.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving imports DeepSpeed, which would print its accelerator
    with tempfile.TemporaryDirectory() as folder, _naming(file):
        (Path(folder) / file.name).symlink_to(file.absolute())  # transformers would read a template beside the file
        _tensors(file)  # for a damaged file, its error is clearer than transformers'
        config = AutoConfig.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)
        check_memory(str(file), config, torch.float32, [torch.device("cpu")], 1, 1)
        room = weight_bytes(config, resolve_dtype(dtype))
        check_room(out, 1.02 * room, f"--out {out}", "give a folder on another disk, or --dtype bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)
        if tokenizer.chat_template is None:
            raise ValueError("it has no chat template, so it cannot be asked anything; give an instruct model")
        model = _read(folder, file, config)
        wrong = [name for name, weights in model.named_parameters() if not weights.isfinite().all()]
        if wrong:
            raise ValueError(f"{len(wrong)} weights hold NaN or infinity, first {wrong[0]}: the file is damaged")
        if len(tokenizer) > config.vocab_size:
            raise ValueError(f"its tokenizer has {len(tokenizer):,} tokens, its model {config.vocab_size:,}")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        TargetModel(model, name=str(file), engine="stock")  # refuses layers that it would compute differently
        formats = Counter(tensor.tensor_type.name for tensor in _tensors(file))
    facts = {"source": file.name, "sha256": file_sha256(file), "tensors": formats, "dtype": dtype}
    model = model.to(resolve_dtype(dtype))
    with replacing_files(out, last=(FACTS, "config.json")) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        replace_json(folder / FACTS, facts | {"command": command(), "versions": library_versions(*LIBRARIES)})
    return facts


def _read(folder: str, file: Path, config: PretrainedConfig) -> PreTrainedModel:
    """The model in float32; newer versions of transformers keep the blocks packed unless told otherwise."""
    whole: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, trust_remote_code=False, **whole
    )
    if unread := [*loaded["missing_keys"], *loaded["mismatched_keys"]]:
        raise ValueError(f"{len(unread)} weights of the model are not in it, first {unread[0]}")
    there = sum(int(tensor.n_elements) for tensor in _tensors(file))
    used = sum(weights.numel() for weights in model.parameters())
    if there != used:  # for example Llama 3's rotary frequencies, which transformers does not read
        raise ValueError(f"it holds {there:,} numbers, and the model that transformers makes of it has {used:,}")
    for owner in (model, model.config):  # save a plain model
        vars(owner).pop("hf_quantizer", None)
        vars(owner).pop("quantization_config", None)
    return model


def _tensors(file: Path) -> list[Any]:
    """Descriptions of the file's tensors."""
    from gguf import GGUFReader  # optional

    return list(GGUFReader(file).tensors)


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn errors, which libraries raise in all types, into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of transformers
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{file} cannot be converted: {said}") from error
