"""Convert a GGUF file (llama.cpp's) to a folder of safetensors that all programs here accept as a target.

    python -m data_prep.gguf SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smollm2/target [--dtype bfloat16]

transformers unpacks the weights to float32; they are rounded once, to --dtype (float32 keeps them exactly). Only models
for which a drafter can be made are written: with layers that this library runs and a tokenizer with a chat template.
gguf.json records the source.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_new_folder
from drafters.config import StoredDtype

MAGIC = b"GGUF"


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.gguf", __doc__)
    parser.add_argument("file", type=Path, help="a .gguf file")
    parser.add_argument("--out", required=True, type=Path, help="folder of the model; must be new or empty")
    parser.add_argument(
        "--dtype", choices=get_args(StoredDtype), default="bfloat16", help="of the weights (default bfloat16)"
    )
    parsed = parser.parse(arguments)
    check(parsed.file, parsed.out)

    from data_prep.common.gguf import convert

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        facts = convert(parsed.file, parsed.out, parsed.dtype)
    formats = ", ".join(f"{count} {kind}" for kind, count in facts["tensors"].items())
    print(f"{parsed.file} ({formats}) -> {parsed.out} in {parsed.dtype}")


def check(file: Path, out: Path) -> None:
    """Raise ValueError for a missing file, another kind of file, a folder in use, or a missing library."""
    if not file.is_file():
        raise ValueError(f"no file at {file}; give a .gguf file")
    with file.open("rb") as opened:
        magic = opened.read(4)
    if magic != MAGIC:
        raise ValueError(f"{file} is no GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(f"reading GGUF files needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    check_new_folder(out, "--out")


if __name__ == "__main__":
    run_program(main)
