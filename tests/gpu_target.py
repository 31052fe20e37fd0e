"""A target of random weights in the shape of a published model, as a folder: to rehearse a recipe without its weights.

    python tests/gpu_target.py --shape configs/shapes/qwen3-8b.json --out runs/gpu/qwen3-8b [hidden_size=64 ...]

Tokenizer and chat template are the shipped target's, so its tokens are the first ones of the vocabulary.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints" / "stdlib-target"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_target(shape: Path, out: Path, changes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the folder, unless it is complete; ``changes``: keys of the configuration, for example of a test."""
    if (out / "done").is_file():
        return
    keys = json.loads(shape.read_text()) | changes
    config = AutoConfig.for_model(**keys)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.save_pretrained(out, max_shard_size="64GB")  # one file, which quantised_folders.py rewrites
    for name in TOKENIZER:
        shutil.copy(SHIPPED / name, out)
    (out / "done").touch()


def main(argv: list[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="other sizes")
    given = parser.parse_args(argv)
    changes = {key: int(value) for key, _, value in (each.partition("=") for each in given.changes)}
    write_target(given.shape, given.out, changes)


if __name__ == "__main__":
    main()
