"""The steps of train.start: their commands and configs, with the time, memory and disk that each is estimated to take.

tokens/s are measured on this machine, tokens are counted in the dialogues, memory and disk are those of ``--dry-run``.
"""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.common.disk import source_bytes
from data_prep.store.manifest import token_bytes
from drafters.common.wording import size_text
from drafters.config import validate
from drafters.hub.declared import Recipe
from drafters.methods import drafter_class
from train.configs import StartConfig, schema_of
from train.core.config import TrainConfig
from train.plan import configs
from train.plan.configs import FORWARD, Noted, Page
from train.plan.facts import Data, Machine, Model, Rates
from train.plan.shares import share_out
from train.preflight.estimate import check_memory, measured_rate, meta_task, rank_memory
from train.run.files import check_run_disk, run_folder_bytes

ENOUGH = 1000  # dialogues; fewer give a warning
LOST = 2.0  # minutes of training that a kill may cost
SPARE_DISK = 0.8  # share of the free disk to use: other processes write, too
FREQUENT = 2048  # tokens that are drafted, of a large vocabulary: docs/smollm2-training.md
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Step:
    """One step of the script."""

    name: str
    done: str  # the folder that gets ``.done`` at its end
    commands: list[str]
    seconds: float  # an estimate, as memory and disk are
    how: str  # the source of the estimate
    memory: float  # bytes
    disk: float = 0.0  # bytes


@dataclass
class Plan:
    """``files``: configs by name. ``notes``: warnings."""

    files: dict[str, Page] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    report: str = ""


class Planner:
    """Makes a ``Plan`` from the facts.

    Raises:
        ValueError: too few minutes, too little memory or disk, or no such head for this model.
    """

    def __init__(self, model: Model, data: Data, machine: Machine, rates: Rates, settings: StartConfig) -> None:
        self.model, self.data, self.machine, self.rates = model, data, machine, rates
        self.settings, self.method, self.hub = settings, settings.method, settings.hub
        self.out, self.plan = str(settings.out), Plan()
        folder = f"{self.out}/split" if data.own else f"{self.out}/answers"
        self.files = {split: f"{folder}/{split}.jsonl" for split in ("train", "heldout")}
        self.gpus = max(1, machine.gpus)
        self.measured = "measured" if self.gpus == 1 else f"from one of {self.gpus} GPUs, measured"
        kind: Any = drafter_class(self.method)
        self.recipe: Recipe = kind.recipe
        # The trained drafter as an entry of eval's configs, and the rows of the report.
        self.entry: dict[str, Any] = {"drafter": self.method, "checkpoint": f"{self.out}/{self.method}"}
        if not (configs.small_vocabulary(model) or schema_of(self.method).sizes_lm_head):
            self.entry["draft_vocab"] = FREQUENT
        if machine.device.type == "cpu" and machine.dtype == "bfloat16":
            self.entry["draft_dtype"] = "int8"  # half the LM head's bytes
        self.rows: list[dict[str, Any]] = [{"drafter": "autoregressive"}, {"drafter": "prompt_lookup"}]
        self.rows += [{"label": label, **self.entry, **options} for label, options in self.recipe.rows.items()]
        if kind.follows:
            label, options = next(iter(self.recipe.rows.items()))
            name = f"hybrid of lookup and {label.split(',')[0]}"
            self.rows.append({"label": name, "drafter": "hybrid", "head": {**self.entry, **options}})

    def make(self) -> Plan:
        """The whole plan."""
        trial, _ = self.training(1.0, online=False)
        self.rate = self.training_rate(trial)
        self.shares = share_out(self.settings, self.model, self.data, self.rates, self.rate)
        hidden, taps = self.model.config.hidden_size, list(trial.taps)
        sizes = {kind: self.shares.tokens * token_bytes(hidden, len(taps), kind) for kind in ("bfloat16", "int8")}
        store = next((kind for kind, size in sizes.items() if size <= SPARE_DISK * self.machine.disk), None)
        if self.data.asking is not None:
            self.ask(self.data.asking)
        self.split()
        if not self.data.own:
            self.answers()
        if store is None:
            self.plan.notes.append(
                f"features would take {size_text(sizes['int8'])} in int8, and {size_text(self.machine.disk)} are free: "
                "they are computed during training, which makes its steps slower"
            )
        else:
            self.features(taps, store, sizes[store])
        self.train(online=store is None)
        self.measure()
        return self.plan

    def training(self, minutes: float, online: bool) -> tuple[TrainConfig, Page]:
        """The training's config, validated, and its file's contents."""
        source: Page = {"features": f"{self.out}/features"}
        if online:
            why = "computed while it trains: the disk is too small for them"
            data = {**self.files, "max_length": self.model.longest, "target_batch_tokens": FORWARD}
            source = {"features": Noted("online", why), "data": data | self.limit()}
        given = self.method, self.recipe, self.model, self.data, self.machine, self.out, source, max(minutes, 0.01)
        page = configs.training(*given)
        config = validate(schema_of(self.method), configs.values_of(page), f"{self.method}.yaml")
        return config.settled(lambda: self.model.config.num_hidden_layers), page

    def training_rate(self, config: TrainConfig) -> float:
        """Tokens/s of training, measured in a few steps on random numbers."""
        length = min(self.model.longest, max(2, round(self.data.tokens / self.data.dialogues)))
        lengths = [length] * max(1, config.batch_tokens // self.gpus // length)  # the ranks share a batch
        try:
            meta_task(config, self.model.config)
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"--method {self.method}: no such head for {self.model.name}: {error}") from error
        return measured_rate(config, self.model.config, lengths, self.data.answers / self.data.tokens) * self.gpus

    def needed(self, config: TrainConfig) -> tuple[float, float]:
        """Bytes of memory and disk of the training; raises ValueError if there are fewer."""
        task = meta_task(config, self.model.config)
        lengths = [self.model.longest] * -(-config.batch_tokens // (self.gpus * self.model.longest))
        parts, _ = rank_memory(config, task, lengths, self.gpus, self.machine.gpus > 0)
        check_memory(sum(parts.values()))
        check_run_disk(config, task.module)
        return sum(parts.values()), run_folder_bytes(config, task.module)

    # ------------------------------------------------------------------------------------------- steps

    def add(self, name: str, done: str, commands: list[str], seconds: float, how: str, **more: float) -> None:
        """Add a step; ``memory`` is that of the target's weights by default."""
        more.setdefault("memory", self.rates.weights)
        self.plan.steps.append(Step(name, f"{self.out}/{done}", commands, seconds, how, **more))

    def run(self, program: str, *words: object, launcher: str = "python") -> str:
        """A command."""
        return f"{launcher} {program} {shlex.join([str(word) for word in words])}"

    def on_all(self, program: str, *words: object) -> str:
        """A command that uses all GPUs."""
        ranks = f"torchrun --standalone --nproc-per-node {self.gpus}"
        return self.run(program, *words, launcher="python" if self.gpus == 1 else ranks)

    def config(self, file: str, page: Page) -> list[str]:
        """Add a config to the plan; return the arguments that name it."""
        self.plan.files[file] = page
        return ["--config", f"{self.out}/configs/{file}"]

    def ask(self, asking: float) -> None:
        """Let the target ask; ``asking``: seconds per question."""
        shares, rows = self.shares, self.rates.rows
        count = round(1.1 * self.data.dialogues * shares.tokens / self.data.tokens)  # with the held-out ones
        shares.heldout = min(shares.heldout, max(8, count // 11))
        shares.prompts, shares.begun = (min(n, shares.heldout // 2) for n in (shares.prompts, shares.begun))
        minutes = max(round(count * asking / 40, 2), 0.1)
        page = {**configs.magpie(self.model, rows, self.data.source, count), "minutes": minutes}
        line = self.on_all("-m data_prep.magpie", *self.config("magpie.yaml", page))
        how = f"{1 / asking:,.1f} questions/s {self.measured}; {count:,}, up to 1.5 times the time allowed"
        memory = self.rates.weights + rows * configs.ASKED * self.model.cache_bytes
        self.add("ask", "asked", [line], count * asking + self.rates.start, how, memory=memory, disk=500 * count)
        self.plan.notes.append(f"no --data: read some of {self.data.source} before you trust the drafter")

    def split(self) -> None:
        """Hold dialogues out."""
        text, given = source_bytes(self.data.source), self.data.asking is None
        words = [self.data.source, "--out", f"{self.out}/split", "--heldout", self.shares.heldout]
        line = self.run("-m data_prep.split", *words, *([] if given else ["--unanswered"]))
        how = f"{self.data.dialogues:,} dialogues, read as long before" if given else "what was asked"
        self.add("split", "split", [line], 2 * self.data.seconds, how, memory=2 * text, disk=text)

    def answers(self) -> None:
        """Let the target answer."""
        rows, tokens, seconds = self.rates.rows, self.shares.tokens, self.shares.answering
        whole = tokens == self.data.tokens
        # A batch is always answered to its end, so it must not take more than a third of the time.
        row = self.gpus * self.model.answer / self.rates.many  # seconds, of one GPU
        while rows > 1 and 3 * rows * row > seconds and not whole:
            rows //= 2
        # If there is time for all dialogues, the limit only guards against a slower machine.
        minutes = max(2 * seconds / 60, 1.0) if whole else seconds / 60
        best = "the target's own answers: acceptance is 28% higher at the first token, docs/smollm2-training.md"
        page = {
            "source": f"{self.out}/split/train.jsonl",
            "out": Noted(f"{self.out}/answers/train.jsonl", best),
            "target": self.model.name,
            "batch": Noted(rows, "keys and values fill a quarter of the free memory, at most 64 dialogues"),
            "minutes": Noted(round(minutes, 2), "questions not answered by then are left out"),
            "max_new_tokens": Noted(self.model.answer, "longer answers would be fewer, and new dialogues help most"),
            "max_context": self.model.longest,
            "temperature": 0.0,
            "seed": 0,
        }
        config = self.config("regenerate.yaml", page)
        held = [f"source={self.out}/split/heldout.jsonl", f"out={self.out}/answers/heldout.jsonl"]
        held.append(f"minutes={max(0.1 * minutes, 0.5):.2f}")
        lines = [self.on_all("-m data_prep.regenerate", *config, *more) for more in (held, [])]
        answered = self.data.dialogues * tokens / self.data.tokens
        how = f"{self.rates.many:,.0f} tokens/s {self.measured}, {rows} at once: about {answered:,.0f} dialogues"
        if answered < ENOUGH and not whole:
            self.plan.notes.append(
                f"only about {answered:,.0f} dialogues will be answered, and a head learns little from so few "
                "(docs/smollm2-training.md: 3,185 in its smallest training): give more --minutes, or leave this "
                "machine alone"
            )
        memory = self.rates.weights + rows * self.model.longest * self.model.cache_bytes
        total = 1.1 * seconds + 2 * self.rates.start
        self.add("answers", "answers", lines, total, how, memory=memory, disk=5 * tokens)

    def limit(self) -> dict[str, int]:
        """The number of dialogues that there is time for, if their answers are the target's own."""
        share = self.shares.tokens / self.data.tokens
        return {"limit": max(1, int(share * self.data.dialogues))} if self.data.own and share < 1 else {}

    def features(self, taps: list[int], dtype: str, size: float) -> None:
        """Compute ``size`` bytes of features."""
        page: Page = {"target": self.model.name, "splits": self.files, "out": f"{self.out}/features"}
        if dtype == "int8":
            page = {**page, "store_dtype": Noted(dtype, "half the disk of bf16, which would be full")}
        page = {**page, **({"exit_layers": Noted(taps, "that the drafter reads")} if taps else {})}
        page = {**page, "max_length": self.model.longest, "batch_tokens": FORWARD, **self.limit()}
        line = self.on_all("-m data_prep.features", *self.config("features.yaml", page))
        tokens, rate = self.shares.tokens, self.rates.prefill
        how = f"{rate:,.0f} tokens/s {self.measured}, {tokens / 1e6:,.2f}M tokens"
        self.add("features", "features", [line], self.rates.start + tokens / rate, how, disk=size)

    def train(self, online: bool) -> None:
        """Train the drafter."""
        seconds = self.shares.training
        config, page = self.training(seconds / 60, online)
        every = max(20, round(LOST * 60 * self.rate / config.batch_tokens))
        why = f"about {LOST:g} minutes here, which a kill may cost"
        page = {**page, "save_every": Noted(every, why), "export_every": every}
        memory, disk = self.needed(config)
        script = os.path.relpath(ROOT / "train" / f"{self.method}.py")
        latest = shlex.quote(f"{self.out}/{self.method}/state/latest")
        words = self.config(f"{self.method}.yaml", page)
        line = self.run(script, *words, launcher="python" if self.gpus == 1 else "deepspeed")
        line += f" $([ -e {latest} ] && echo --resume || true)"
        how = (
            f"{self.rate:,.0f} tokens/s {self.measured}, {seconds * self.rate / max(self.shares.tokens, 1):.1f} passes"
        )
        self.add("train", self.method, [line], seconds + self.rates.start, how, memory=memory, disk=disk)

    def prompts(self, split: str, count: int) -> Page:
        """The first keys of eval's configs."""
        longest = self.model.longest - self.model.answer
        prompts = {"file": self.files[split], "count": count, "seed": 0, "max_prompt_tokens": longest}
        why = "not those of the report" if split == "train" else "held out: nothing was trained on them"
        return {"target": {"path": self.model.name}, "prompts": Noted(prompts, why)}

    def measure(self) -> None:
        """The report, after a search if the method needs one, the lossless test, and the card or the push."""
        shares, out, folder = self.shares, self.out, f"{self.out}/{self.method}"
        self.plan.report = f"{out}/speed/report.md; the drafter: {folder}"
        decoding = {"max_new_tokens": min(96, self.model.answer), "temperatures": [0.0], "rounds": 1, "warmup": 1}
        choose = []
        if self.recipe.knobs:
            page = {**self.prompts("train", shares.prompts), **decoding, "out": f"{out}/tune"}
            page["drafters"] = [{"label": next(iter(self.recipe.rows)), **self.entry}]
            page |= {"knobs": dict(self.recipe.knobs), "start": dict(self.recipe.start)}
            line = self.run("-m eval.tune", *self.config("tune.yaml", page))
            how = f"{', then '.join(self.recipe.knobs)}, on dialogues of the training"
            self.add("tune", "tune", [line], shares.tune, how)
            best = shlex.quote(f"{out}/tune/best.yaml")
            choose = [f"\"drafters=$(echo '- drafter: prompt_lookup'; cat {best})\""]
        why = "no other figure depends on its speed; true shows it, too"
        page = {**self.prompts("heldout", shares.prompts), **decoding, "out": f"{out}/speed"}
        page |= {"stock_generate": Noted(False, why), "drafters": self.rows}
        line = self.run("-m eval.speed", *self.config("speed.yaml", page))
        how = f"{self.rates.one:,.0f} tokens/s measured; {len(self.rows)} methods on {shares.prompts} held-out prompts"
        self.add("speed", "speed", [" ".join([line, *choose])], shares.report, how)
        shown = ["--report", f"{out}/speed"]
        if self.rates.exact is None:
            self.plan.notes.append("no lossless test: the target in float32 does not fit into memory")
        else:
            self.certify(self.rates.exact)
            shown += ["--certificate", f"{out}/lossless"]
        card = [] if self.hub else ["--card", f"{out}/card/README.md"]
        line = self.run("-m drafters.hub", "push", folder, self.hub or f"you/{Path(out).name}", *shown, *card)
        lines = [f"mkdir -p {shlex.quote(out)}/card", line]
        how = f"to {self.hub}" if self.hub else "only the model card: no --hub"
        self.add("push" if self.hub else "card", "card", lines, self.rates.start / 2, how, memory=0.0)

    def certify(self, exact: float) -> None:
        """The lossless test; ``exact``: its tokens/s."""
        shares, out = self.shares, f"{self.out}/lossless"
        entry = {key: value for key, value in self.entry.items() if key != "draft_dtype"}
        page = {
            **self.prompts("heldout", shares.begun),
            "drafter": Noted(entry | dict(self.recipe.certified), "always drafts, so that every step is a test"),
            "greedy_tokens": min(64, self.model.answer),
            "texts": Noted(shares.texts, "sampled; more texts reveal smaller differences"),
            "new_tokens": min(32, self.model.answer),
            "out": out,
        }
        line = self.run("-m eval.lossless", *self.config("lossless.yaml", page))
        how = f"{exact:,.0f} tokens/s in float32 measured; {shares.texts} sampled texts, {shares.begun} greedy"
        # A drafter that is not lossless ends the script; the card says if too little was tested.
        line += f' || grep -q \'"verdict": "not shown\' {shlex.quote(out + "/lossless.json")}'
        memory = 2 * self.rates.weights * (2 if self.machine.dtype == "bfloat16" else 1)
        self.add("lossless", "lossless", [line], shares.certificate, how, memory=memory)
