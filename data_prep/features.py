"""Dialogues -> token ids and loss mask -> the frozen target -> a feature store for each split.

    python -m data_prep.features --config configs/features/stdlib.yaml [--verify] [key=value ...]
    torchrun --nproc-per-node 8 -m data_prep.features --config ...     or deepspeed --module, or srun python -m
    python -m data_prep.features --config ... --rank 0 --ranks 4       on each of four machines that share `out`

Final features (EAGLE) and exit-layer states (Kangaroo) come from one pass over the target. A run that was killed goes
on at its next shard when it is started again, with any number of processes; a finished split is skipped. --verify reads
finished stores again and compares their checksums. With ``engine: vllm`` vLLM runs the target.
"""

import difflib
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from data_prep.common.ranks import TargetKeys, add_rank_arguments, find_rank
from data_prep.dialogues.reader import check_source
from drafters.cli.program import CommandLine, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import Amount, Config, Layers, Length, load_config

READ_BY_TRAINING = ("train", "heldout")
StoreDtype = Literal["bfloat16", "float16", "float32", "int8", "float8"]
OURS = {  # options of vllm.LLM that have another place in the config, or none
    "model": "give target", "revision": "give revision", "dtype": "give dtype", "max_model_len": "give max_length",
    "max_num_batched_tokens": "give batch_tokens", "quantization": "features must be the target's own",
    "enable_lora": "features must be the target's own: merge the adapter into it first",
    "speculative_config": "states are read by it", "kv_transfer_config": "states are read by it",
    "kv_cache_dtype": "features must be the target's own", "seed": "nothing is drawn",
}  # fmt: skip


class VLLMKeys(Config):
    """Of ``engine: vllm``."""

    python: Path = Path(".venv-vllm/bin/python")  # of its environment; default: that of make engines
    options: dict[str, Any] = {}  # of vllm.LLM: tensor_parallel_size, pipeline_parallel_size, max_num_seqs, ...

    @field_validator("options")
    @classmethod
    def _not_set_here(cls, options: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(OURS.keys() & options):
            told = "; ".join(f"{key}: {OURS[key]}" for key in ours)
            raise ValueError(f"these are not for options ({told})")
        return options


class FeaturesConfig(TargetKeys):
    """Schema of ``configs/features/*.yaml``, with the keys of ``TargetKeys``."""

    target: str = Field(min_length=1)  # folder or Hub repository of the target
    # own: here, on the device. vllm: in vLLM's own process, for targets that one process or machine cannot hold.
    engine: Literal["own", "vllm"] = "own"
    vllm: VLLMKeys = VLLMKeys()
    store_dtype: StoreDtype | None = None  # of features and taps on disk; int8 and float8: with a scale per token
    splits: dict[str, str] = Field(min_length=1)  # {train: ShareGPT file or Hub dataset, heldout: ...}
    out: str = Field(min_length=1)  # each split's store is made in <out>/<split>
    exit_layers: list[Layers] = []  # also store the hidden states after this many decoder layers (Kangaroo)
    max_length: Length = Field(2048, ge=2)  # tokens of a dialogue; the rest is cut off
    batch_tokens: Amount = Field(8192, ge=1)  # tokens of one forward, padding included
    shard_tokens: Amount = Field(65_536, ge=1)  # tokens of a shard: what a kill can cost, and what is held in memory
    limit: Amount | None = Field(None, ge=1)  # dialogues of each split, the first ones; default: all
    # own: the answers of the split `heldout` are replaced by the target's own greedy ones, so that what training shows
    # is what decoding gives. A file that data_prep.regenerate wrote with this target holds them already.
    heldout_answers: Literal["own", "given"] = "own"
    heldout_dialogues: Amount = Field(100, ge=1)  # the target answers this many, the first ones
    heldout_new_tokens: Length = Field(256, ge=1)  # of one such answer; at most half the target's context

    @field_validator("splits")
    @classmethod
    def _names_are_folders(cls, splits: dict[str, str]) -> dict[str, str]:
        bad = [name for name in splits if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)]
        if bad:
            raise ValueError(f"a split's name becomes a folder: letters, digits, '_', '.' and '-', found {bad}")
        for name in splits:
            near = difflib.get_close_matches(name.lower(), READ_BY_TRAINING, n=1, cutoff=0.75)
            if near and name != near[0] and not name.startswith(near[0]):
                raise ValueError(
                    f"training reads splits named {' and '.join(READ_BY_TRAINING)}, found {name}; rename it"
                )
        return splits

    @model_validator(mode="after")
    def _vllm_has_its_own_devices(self) -> Self:
        if self.engine == "vllm" and (self.device is not None or self.device_map is not None):
            key = "device" if self.device is not None else "device_map"
            raise ValueError(
                f"{key} is {getattr(self, key)!r}, and vLLM takes the GPUs that it sees: leave {key} out, and set "
                "vllm.options.tensor_parallel_size or pipeline_parallel_size"
            )
        return self

    @field_validator("exit_layers")
    @classmethod
    def _layers_once(cls, layers: list[int]) -> list[int]:
        if len(set(layers)) != len(layers):
            raise ValueError("each layer at most once")
        return sorted(layers)


def main(arguments: list[str] | None = None) -> None:
    """Make the feature stores that a config asks for, or this rank's share of them."""
    parser = CommandLine("data_prep.features", __doc__, "YAML file, see configs/features/", "limit=1000 device=cuda")
    parser.add_argument("--verify", action="store_true", help="only check the finished stores against their checksums")
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load_config(FeaturesConfig, parsed.config, parsed.overrides)
    rank = find_rank(parsed.rank, parsed.ranks)
    check(config)

    from data_prep.features_run import kept, run, verify_stores

    with keeping(lambda: kept(config)):
        if not parsed.verify:
            run(config, rank)
        elif rank.index == 0:
            verify_stores(config)


def check(config: FeaturesConfig) -> None:
    """Raise ValueError where a file or the target's folder is not there, or a file stands where ``out`` should be."""
    for source in config.splits.values():
        check_source(source)
    check_folder(Path(config.out))
    check_model(config.target, "target", config.revision)
    if config.engine == "vllm" and not config.vllm.python.exists():
        raise ValueError(
            f"vLLM is not installed: there is no {config.vllm.python}; run make .venv-vllm/.installed, or give the "
            "Python of an environment that has it as vllm.python"
        )
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise ValueError(f"chat_template {config.chat_template} is no readable text file: it is not there")


if __name__ == "__main__":
    run_program(main)
