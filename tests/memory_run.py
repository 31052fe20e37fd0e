"""Measures what a training run holds at most, in a process of its own."""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import psutil
import tiny
import tiny_run
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import TargetModel
from train.run import loop

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
# A small model of 160,000 tokens, most of whose memory is the LM heads and rows of logits.
WIDE = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 160_000}
SHAPES = {"eagle": SHAPE, "eagle3": WIDE}
CHANGES: dict[str, dict[str, Any]] = {
    "eagle": {"loss_chunk_rows": 1024},
    "eagle3": {"tap_layers": [tiny_run.TAP], "ttt_steps": 2, "loss_chunk_rows": 128},
}
LENGTHS = {"eagle": [512] * 8, "eagle3": [128] * 2}


class Peak(threading.Thread):
    """Samples the resident memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.highest = psutil.Process().memory_info().rss
        self.done = threading.Event()

    def run(self) -> None:
        process = psutil.Process()
        while not self.done.wait(0.002):
            self.highest = max(self.highest, process.memory_info().rss)


def settings(method: str, folder: Path) -> dict[str, Any]:
    """Of the run that is measured."""
    changes = {"batch_tokens": sum(LENGTHS[method]), "steps": 2, "heldout_tokens": 1} | CHANGES[method]
    return tiny_run.settings(str(folder / "target"), folder / "features", folder / "run", **changes)


def measure(given: str) -> int:
    """One small run to have all libraries loaded, then the one that counts; ``given``: [method, folder] as JSON."""
    method, name = json.loads(given)
    folder, shape = Path(name), SHAPES[method]
    torch.set_num_threads(1)
    features = tiny_run.write_stores(folder / "small-features", tiny_run.save_target(folder / "small"))
    small = tiny_run.settings(str(folder / "small"), features, folder / "small-run", steps=1)
    tiny_run.train_here(method, small | {key: value for key, value in CHANGES[method].items() if key == "tap_layers"})
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder / "target")
    target = TargetModel(model, name=str(folder / "target"))
    tiny.VOCAB_SIZE = shape["vocab_size"]
    with torch.no_grad():
        tiny_run.write_stores(folder / "features", target, {"train": LENGTHS[method], "heldout": [16]})
    del model, target
    loop.TrainRun._evaluate = lambda *given, **named: None  # type: ignore[method-assign]  # its memory is another's
    gc.collect()  # what is freed only later would be used again, and not be counted
    peak = Peak()
    peak.start()
    tiny_run.train_here(method, settings(method, folder))
    peak.done.set()
    state = sum(file.stat().st_size for file in (folder / "run" / "state").glob("step-*/*"))
    print(json.dumps({"memory": peak.highest - peak.before, "state": state}))
    return 0
