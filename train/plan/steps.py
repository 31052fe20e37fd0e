"""The plan of train.start: its configs and its script, with the time that each step is estimated to take.

tokens/s are measured on this machine, tokens are counted in the dialogues. What a method sets is its ``Recipe``.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token

from data_prep.common.disk import check_room
from data_prep.store.manifest import token_bytes
from drafters.common.wording import size_text
from drafters.config import validate
from drafters.hub.declared import Recipe
from drafters.methods import drafter_class
from train.configs import START_SCRIPT, StartConfig, schema_of
from train.core.config import TrainConfig
from train.plan.facts import Data, Machine, Model, Rates, mask_token
from train.plan.fill import fill
from train.plan.rates import FORWARD
from train.plan.shares import share_out
from train.preflight.estimate import measured_rate, meta_task
from train.preflight.memory import check_memory, rank_memory
from train.run.files import check_run_disk

ROOT = Path(__file__).resolve().parents[2]
SMALL = 1024  # hidden size up to which the learning rates measured here hold; the papers' targets begin at 4,096
LOSS_VOCAB, DRAFT_VOCAB = 8192, 16_384  # tokens, of SmolLM2's 49,152: docs/smollm2-training.md
OWN_VOCAB = 32_000  # tokens of a head's own LM head, as in EAGLE-3's released heads
FREQUENT = 2048  # tokens that are drafted, of a large vocabulary: docs/smollm2-training.md
SHORT = 30  # minutes of training below which small steps over the most frequent tokens learnt more
ASKED = 192  # most tokens of a question
ENOUGH = 1000  # dialogues; fewer give a warning
LOST = 2.0  # minutes of training that a kill may cost
SPARE_DISK = 0.8  # share of the free disk to use: other processes write, too


@dataclass
class Plan:
    """The texts of all files by name, estimated seconds by step, and warnings."""

    files: dict[str, str]
    seconds: dict[str, float]
    notes: list[str]


class Planner:
    """Makes a ``Plan`` from the facts.

    Raises:
        ValueError: too few minutes, too little memory or disk, or no such head for this model.
    """

    def __init__(self, start: StartConfig, model: Model, data: Data, machine: Machine, rates: Rates) -> None:
        self.start, self.model, self.data, self.machine, self.rates = start, model, data, machine, rates
        kind: Any = drafter_class(start.method)
        recipe: Recipe = kind.recipe
        self.recipe, self.follows = recipe, bool(kind.follows)
        self.gpus, self.cpu = max(1, machine.gpus), machine.device.type == "cpu"
        self.large = model.config.vocab_size > 2 * DRAFT_VOCAB  # frequent tokens are then a small part of all
        self.notes: list[str] = []

    def make(self, command: list[str]) -> Plan:
        """The whole plan; ``command``: the command line that asked for it."""
        start, model, data = self.start, self.model, self.data
        out = str(start.out)
        folder = f"{out}/{'split' if data.own else 'answers'}"
        values: dict[str, Any] = {
            "target": model.name, "out": out, "method": start.method, "longest": model.longest, "answer": model.answer,
            "files": {split: f"{folder}/{split}.jsonl" for split in ("train", "heldout")}, "forward": FORWARD,
            "rows": self.rates.rows, "source": data.source, "own": data.own, "asks": data.asking is not None,
            "question": max(2, min(ASKED, model.longest // 4)), "gpus": self.gpus, "hub": start.hub,
            "exact": self.rates.exact is not None, "name": start.out.name, "command": shlex.join(command),
            "here": str(Path.cwd()), "bin": str(Path(sys.executable).parent), "online": None, "every": 1,
            "script": os.path.relpath(ROOT / "train" / f"{start.method}.py"),
        }  # fmt: skip
        trial = self.training(values, 1.0)
        self.rate = self.training_rate(trial)
        self.shares = share_out(start, model, data, self.rates, self.rate)
        values |= self.answers()
        values |= self.features(list(trial.taps), values["files"])
        config = self.training(values, self.shares.training / 60)
        values["every"] = max(20, round(LOST * 60 * self.rate / config.batch_tokens))
        self.check(config)
        values |= self.report(out)
        values["seconds"] = seconds = self.seconds(values)
        names = {"ask": "magpie", "answers": "regenerate", "features": "features"}
        names |= {name: name for name in ("tune", "speed", "lossless")}
        files = {name: fill(f"{name}.yaml", values) for step, name in names.items() if step in seconds}
        texts = {f"configs/{name}.yaml": text for name, text in files.items()}
        texts[f"configs/{start.method}.yaml"] = fill("train.yaml", values)
        return Plan({**texts, START_SCRIPT: fill("run.sh", values)}, seconds, self.notes)

    def training(self, values: dict[str, Any], minutes: float) -> TrainConfig:
        """Add the training's keys to ``values``; return its config, validated."""
        schema, recipe, model = schema_of(self.start.method), self.recipe, self.model
        small, short = model.config.hidden_size <= SMALL, self.cpu and minutes < SHORT
        keys = {**recipe.keys, **(recipe.small if small else {})}
        head: Any = schema.model_fields["head"].annotation
        if "mask_token_id" in head.model_fields:
            keys["mask_token_id"] = mask_token(model, self.data)
        if "exit_layer" in head.model_fields:  # a tenth of the layers, at most three: docs/smollm2-training.md
            keys["exit_layer"] = max(1, min(3, int(model.config.num_hidden_layers) // 10))
        if self.large:
            own = {"draft_vocab": DRAFT_VOCAB if self.cpu else OWN_VOCAB}
            keys |= own if schema.sizes_lm_head else {"loss_vocab": LOSS_VOCAB, "draft_vocab": DRAFT_VOCAB}
            keys |= recipe.short if short else {}
        values |= {"keys": keys, "small": small, "minutes": round(max(minutes, 0.01), 2)}
        values["batch_tokens"] = (1024 if short else 2048) if self.cpu else 8192
        values["learning_rate"] = 2.0e-3 if small else recipe.learning_rate
        name = f"{self.start.method}.yaml"
        config = validate(schema, yaml.safe_load(fill("train.yaml", values)), name)
        return config.settled(lambda: model.config.num_hidden_layers)

    def training_rate(self, config: TrainConfig) -> float:
        """Tokens/s of training, measured in a few steps on random numbers."""
        length = min(self.model.longest, max(2, round(self.data.tokens / self.data.dialogues)))
        lengths = [length] * max(1, config.batch_tokens // self.gpus // length)  # the ranks share a batch
        try:
            meta_task(config, self.model.config)
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"--method {self.start.method}: no such head for {self.model.name}: {error}") from error
        return measured_rate(config, self.model.config, lengths, self.data.answers / self.data.tokens) * self.gpus

    def check(self, config: TrainConfig) -> None:
        """Raise ValueError if the training has too little memory or disk."""
        task = meta_task(config, self.model.config)
        lengths = [self.model.longest] * -(-config.batch_tokens // (self.gpus * self.model.longest))
        check_memory(sum(rank_memory(config, task, lengths, self.gpus, self.machine.gpus > 0)[0].values()))
        check_run_disk(config, task.module)

    def answers(self) -> dict[str, Any]:
        """The keys of questions and answers: what there is time for."""
        data, shares, rates = self.data, self.shares, self.rates
        whole, rows, count = shares.tokens == data.tokens, rates.rows, 0
        answered = data.dialogues * shares.tokens / data.tokens
        if data.asking is not None:
            count = round(1.1 * answered)  # with the held-out ones
            shares.heldout = min(shares.heldout, max(8, count // 11))
            shares.prompts, shares.begun = (min(n, shares.heldout // 2) for n in (shares.prompts, shares.begun))
            self.notes.append(f"no --data: read some of {data.source} before you trust the drafter")
        if answered < ENOUGH and not (whole or data.own):
            self.notes.append(
                f"only about {answered:,.0f} dialogues will be answered, and a head learns little from so few "
                "(docs/smollm2-training.md: 3,185 in its smallest training): give more --minutes"
            )
        # A batch is answered to its end, so it must not take more than a third of the time.
        row = self.gpus * self.model.answer / rates.many  # seconds, of one GPU
        while rows > 1 and 3 * rows * row > shares.answering and not whole:
            rows //= 2
        # If there is time for all dialogues, the limit only guards against a slower machine.
        minutes = max(2 * shares.answering / 60, 1.0) if whole else shares.answering / 60
        asking = max(count * (data.asking or 0.0) / 40, 0.1)  # 1.5 times the estimated time
        held = round(max(0.1 * minutes, 0.5), 2)
        more = {"count": count, "asking": round(asking, 2), "heldout": shares.heldout, "held_minutes": held}
        return {**more, "batch": rows, "answering": round(max(minutes, 0.01), 2)}

    def features(self, taps: list[int], files: dict[str, str]) -> dict[str, Any]:
        """The keys of the features, which are computed during training if the disk is too small for them."""
        data, tokens, width = self.data, self.shares.tokens, self.model.config.hidden_size
        sizes = {kind: tokens * token_bytes(width, len(taps), kind) for kind in ("bfloat16", "int8")}
        store = next((kind for kind, size in sizes.items() if size <= SPARE_DISK * self.machine.disk), None)
        limit = max(1, int(tokens / data.tokens * data.dialogues)) if data.own and tokens < data.tokens else None
        online: dict[str, Any] | None = None
        if store is None:
            online = {**files, "max_length": self.model.longest, "target_batch_tokens": FORWARD}
            online |= {"limit": limit} if limit else {}
            self.notes.append(
                f"features would take {size_text(sizes['int8'])} in int8, and {size_text(self.machine.disk)} are free: "
                "they are computed during training, which makes its steps slower"
            )
        else:
            check_room(self.start.out, sizes[store], f"--out {self.start.out}", "give a folder on another disk")
        return {"taps": taps, "store": store, "limit": limit, "online": online}

    def report(self, out: str) -> dict[str, Any]:
        """The keys of the report, of a search before it, and of the test of losslessness."""
        entry: dict[str, Any] = {"drafter": self.start.method, "checkpoint": f"{out}/{self.start.method}"}
        if self.large and not schema_of(self.start.method).sizes_lm_head:
            entry["draft_vocab"] = FREQUENT
        certified = entry | dict(self.recipe.certified)
        if self.cpu and self.machine.dtype == "bfloat16":
            entry["draft_dtype"] = "int8"  # half the LM head's bytes
        rows = [{"label": label, **entry, **options} for label, options in self.recipe.rows.items()]
        (label, options), *_ = self.recipe.rows.items()
        hybrid = {"drafter": "hybrid", "head": {**entry, **options}}
        named = {"label": f"hybrid of lookup and {label.split(',')[0]}"}
        rows = [{"drafter": "autoregressive"}, {"drafter": "prompt_lookup"}, *rows]
        rows += [named | hybrid] if self.follows else []
        if self.rates.exact is None:
            self.notes.append("no lossless test: the target in float32 does not fit into memory")
        if self.start.hub and not get_token():
            self.notes.append(f"no Hub token: run `hf auth login` before the push to {self.start.hub}, the last step")
        return {
            "drafters": rows,
            "certified": certified,
            "tuned": [{"label": label, **entry}],
            "knobs": dict(self.recipe.knobs),
            "start": dict(self.recipe.start),
            "prompts": self.shares.prompts,
            "begun": self.shares.begun,
            "texts": self.shares.texts,
            "new": min(96, self.model.answer),
        }

    def seconds(self, values: dict[str, Any]) -> dict[str, float]:
        """Estimated seconds of the steps that the script has, in their order."""
        data, shares, rates = self.data, self.shares, self.rates
        seconds = {
            "ask": values["count"] * data.asking + rates.start if data.asking is not None else None,
            "split": 2 * data.seconds,
            "answers": None if data.own else 1.1 * shares.answering + 2 * rates.start,
            "features": rates.start + shares.tokens / rates.prefill if values["store"] else None,
            "train": shares.training + rates.start,
            "tune": shares.tune if values["knobs"] else None,
            "speed": shares.report,
            "lossless": None if rates.exact is None else shares.certificate,
            "push" if self.start.hub else "card": rates.start / 2,
        }
        return {step: each for step, each in seconds.items() if each is not None}
