"""Measures what a training run holds at most, in a process of its own."""

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
LENGTH, DIALOGUES = 512, 8


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


def settings(folder: Path) -> dict[str, Any]:
    """Of the run that is measured."""
    tokens = LENGTH * DIALOGUES
    changes = {"batch_tokens": tokens, "steps": 2, "loss_chunk_rows": 1024, "heldout_tokens": 1}
    return tiny_run.settings(str(folder / "target"), folder / "features", folder / "run", **changes)


def measure(given: str) -> int:
    """One small run to have all libraries loaded, then the one that counts, in the folder ``given``."""
    folder = Path(given)
    torch.set_num_threads(1)
    features = tiny_run.write_stores(folder / "small-features", tiny_run.save_target(folder / "small"))
    tiny_run.train_here("eagle", tiny_run.settings(str(folder / "small"), features, folder / "small-run", steps=1))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder / "target")
    target = TargetModel(model, name=str(folder / "target"))
    lengths = {"train": [LENGTH] * DIALOGUES, "heldout": [16]}
    tiny.VOCAB_SIZE = SHAPE["vocab_size"]
    with torch.no_grad():
        tiny_run.write_stores(folder / "features", target, lengths)
    del model, target
    loop.TrainRun._evaluate = lambda *given, **named: None  # type: ignore[method-assign]  # its memory is another's
    peak = Peak()
    peak.start()
    tiny_run.train_here("eagle", settings(folder))
    peak.done.set()
    state = sum(file.stat().st_size for file in (folder / "run" / "state").glob("step-*/*"))
    print(json.dumps({"memory": peak.highest - peak.before, "state": state}))
    return 0
