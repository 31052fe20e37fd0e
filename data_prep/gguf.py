"""A GGUF file (llama.cpp's) -> a folder of safetensors that every program here takes as a target.

    python -m data_prep.gguf SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smollm2/target [--dtype bfloat16]

The weights are those that transformers reads from the file, unpacked to float32 and rounded once, to --dtype; float32
keeps them exactly. Written is what a drafter can be made for: a model whose layers this library runs, with a tokenizer
that has a chat template. gguf.json says what it was made from.
"""

import argparse
import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from data_prep.common.disk import check_room
from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_new_folder, keep_mode, replace_json, sync_folder
from drafters.common.provenance import library_versions
from drafters.config import StoredDtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FACTS = "gguf.json"
LIBRARIES = ("torch", "transformers", "gguf")
MAGIC = b"GGUF"


def check(file: Path, out: Path) -> None:
    """Check what can be checked without reading the weights.

    Raises:
        ValueError: no such file, a file of another kind or cut short at its beginning, a folder that is in use, or a
            library that is missing.
    """
    if not file.is_file():
        raise ValueError(f"no file at {file}; give a .gguf file")
    with file.open("rb") as opened:
        found = opened.read(4)
    if found != MAGIC:
        raise ValueError(f"{file} is no GGUF file: it begins with {found!r}, not with {MAGIC!r}")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(f"reading GGUF files needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    check_new_folder(out, "--out")


def convert(file: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Read, check and write the model; returns what gguf.json holds.

    Raises:
        ValueError: damaged, of a family that transformers cannot read from GGUF or whose layers this library does not
            run, weights that are not finite, no chat template, or too little memory or disk.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from data_prep.store.reader import file_sha256
    from drafters import TargetModel
    from drafters.model.files import resolve_dtype
    from drafters.model.loading import check_memory, weight_bytes

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving a model imports DeepSpeed, which would say what it found
    with _alone(file) as folder, _said_of(file):
        _tensors(file)  # its words on a damaged file are better than those of transformers
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
        TargetModel(model, name=str(file), engine="eager")  # refuses layers that it would not run as the model does
        formats = Counter(tensor.tensor_type.name for tensor in _tensors(file))
    facts = {"source": file.name, "sha256": file_sha256(file), "tensors": formats, "dtype": dtype}
    model = model.to(resolve_dtype(dtype))
    with _whole(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        replace_json(folder / FACTS, facts | {"command": command(), "versions": library_versions(*LIBRARIES)})
        for weights in folder.glob("*.safetensors"):  # which only their owner may read as safetensors writes them
            keep_mode(weights, (folder / FACTS).stat().st_mode)
    return facts


def _read(folder: str, file: Path, config: "PretrainedConfig") -> "PreTrainedModel":
    """The model in float32; newer versions of transformers keep the blocks packed unless told otherwise."""
    import torch
    import transformers

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
    if there != used:  # as with Llama 3's rotary frequencies, which transformers does not read
        raise ValueError(f"it holds {there:,} numbers, and the model that transformers makes of it has {used:,}")
    for owner in (model, model.config):  # what is saved is a plain model
        vars(owner).pop("hf_quantizer", None)
        vars(owner).pop("quantization_config", None)
    return model


def _tensors(file: Path) -> list[Any]:
    """What the file says of its tensors."""
    from gguf import GGUFReader

    return list(GGUFReader(file).tensors)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[str]:
    """A folder with nothing else in it: transformers would read a tokenizer or template that lies beside the file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.absolute())
        yield folder


@contextlib.contextmanager
def _said_of(file: Path) -> Iterator[None]:
    """Let errors name the file; those of the libraries that read it are of any kind."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; transformers raises others
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{file} cannot be converted: {said}") from error


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``out`` at the end."""
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if out.is_dir():
            out.rmdir()  # empty
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(out.parent)


def main(arguments: list[str] | None = None) -> None:
    """Write the folder."""
    parser = CommandLine("data_prep.gguf", __doc__)
    parser.add_argument("file", type=Path, help="a .gguf file")
    parser.add_argument("--out", required=True, type=Path, help="folder of the model; must be new or empty")
    parser.add_argument(
        "--dtype", choices=get_args(StoredDtype), default="bfloat16", help="of the weights (default bfloat16)"
    )
    parsed: argparse.Namespace = parser.parse(arguments)
    check(parsed.file, parsed.out)
    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        facts = convert(parsed.file, parsed.out, parsed.dtype)
    formats = ", ".join(f"{count} {kind}" for kind, count in facts["tensors"].items())
    print(f"{parsed.file} ({formats}) -> {parsed.out} in {parsed.dtype}")


if __name__ == "__main__":
    run_program(main)
