"""Share the minutes out over the steps, and estimate time, memory and disk of each.

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
from train.plan.facts import Data, Machine, Model, Rates
from train.plan.rates import CERTIFIED
from train.preflight.estimate import check_memory, measured_rate, meta_task, rank_memory
from train.run.files import check_run_disk, run_folder_bytes

# Passes over the dialogues. SmolLM2's head still gained at its fifth (docs/smollm2-training.md: 11.6M positions),
# but new dialogues helped most: so the rest of the time goes into new answers.
PASSES = 5
ENOUGH = 1000  # dialogues; fewer give a warning
REPORT, CERTIFICATE = 0.08, 0.12  # largest shares of the minutes
PROMPTS, TEXTS = (4, 20), (64, 512)  # fewest and most prompts of the report, sampled texts of the lossless test
LOST = 2.0  # minutes of training that a kill may cost
SPARE_DISK = 0.8  # share of the free disk to use: other processes write, too
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Step:
    """One step of the script. ``seconds``, ``disk`` and ``memory`` (bytes) are estimates, ``how`` their source.

    ``done``: the folder that gets ``.done`` at its end.
    """

    name: str
    done: str
    commands: list[str]
    seconds: float
    how: str
    memory: float
    disk: float = 0.0


@dataclass
class Plan:
    """``files``: configs by name, their values and reasons. ``notes``: warnings."""

    files: dict[str, tuple[dict[str, Any], configs.Reasons]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    report: str = ""


class Planner:
    """Makes a ``Plan`` from the facts.

    Attributes (after ``share_out``):
        answering, training_seconds: seconds of the target's answers and of training.
        tokens: of the dialogues to train on.

    Raises:
        ValueError: too few minutes, too little memory or disk, or no such head for this model.
    """

    def __init__(self, model: Model, data: Data, machine: Machine, rates: Rates, settings: StartConfig) -> None:
        self.model, self.data, self.machine, self.rates = model, data, machine, rates
        self.method, self.minutes, self.hub = settings.method, settings.minutes, settings.hub
        self.out, self.plan = str(settings.out), Plan()
        folder = f"{self.out}/split" if data.own else f"{self.out}/answers"
        self.files = {split: f"{folder}/{split}.jsonl" for split in ("train", "heldout")}
        self.entry = configs.drafting(self.method, model, machine, self.out)
        self.schema = schema_of(self.method)
        kind: Any = drafter_class(self.method)
        self.recipe: Recipe = kind.recipe
        self.rows = configs.methods(self.recipe, self.entry, kind.follows)
        self.heldout = max(8, min(200, data.dialogues // 10))
        self.gpus = max(1, machine.gpus)
        self.measured = "measured" if self.gpus == 1 else f"from one of {self.gpus} GPUs, measured"

    def make(self) -> Plan:
        """The whole plan."""
        trial, _ = self.training(1.0, online=False)
        self.rate = self.training_rate(trial)
        self.share_out()
        hidden, taps = self.model.config.hidden_size, list(trial.taps)
        sizes = {kind: self.tokens * token_bytes(hidden, len(taps), kind) for kind in ("int8", "bfloat16")}
        store = next((kind for kind in ("bfloat16", "int8") if sizes[kind] <= SPARE_DISK * self.machine.disk), None)
        if store is None:
            self.plan.notes.append(
                f"features would take {size_text(sizes['int8'])} in int8, and {size_text(self.machine.disk)} are free: "
                "they are computed during training, which makes its steps slower"
            )
        if self.data.asking is not None:
            self.ask()
        self.split()
        if not self.data.own:
            self.answers()
        if store is not None:
            self.features(taps, store == "int8", sizes[store])
        self.train(online=store is None)
        self.measure()
        return self.plan

    # ------------------------------------------------------------------------------------------- time

    def training(self, minutes: float, online: bool) -> tuple[TrainConfig, tuple[dict[str, Any], dict[str, str]]]:
        """The training's config, validated, and its file's contents."""
        minutes = max(minutes, 0.01)
        found = configs.training(
            self.method, self.recipe, self.model, self.machine, self.out, self.files, online, minutes
        )
        return validate(self.schema, found[0], f"{self.method}.yaml"), found

    def training_rate(self, config: TrainConfig) -> float:
        """Tokens/s of training, measured in a few steps on random numbers."""
        length = min(self.model.longest, max(2, round(self.data.tokens / self.data.dialogues)))
        lengths = [length] * max(1, config.batch_tokens // self.gpus // length)  # the ranks share a batch
        try:
            meta_task(config, self.model.config)
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"--method {self.method}: no such head for {self.model.name}: {error}") from error
        return measured_rate(config, self.model.config, lengths, self.data.answers / self.data.tokens) * self.gpus

    def share_out(self) -> None:
        """Set the minutes of the steps and the tokens to train on; raise ValueError if there are too few minutes."""
        rates, data, total = self.rates, self.data, 60 * self.minutes
        new, greedy, sampled = (min(most, self.model.answer) for most in (96, 64, 32))
        # The report, and a search before it if the method needs one.
        a_prompt = len(self.rows) * new / rates.one
        self.prompts = min(_within(REPORT * total / a_prompt, *PROMPTS), self.heldout // 2)
        self.report_seconds = rates.start + a_prompt * self.prompts
        tried = sum(map(len, self.recipe.knobs.values())) + 2
        self.tune_seconds = rates.start + tried * self.prompts * new / rates.one if self.recipe.knobs else 0.0
        # The lossless test: greedy answers in both precisions, and sampled texts.
        self.begun, exact = max(1, min(self.heldout // 2, 8)), rates.exact or 0.0
        self.texts = _within((CERTIFICATE * total * exact - 2 * self.begun * greedy) / sampled, *TEXTS)
        self.texts -= self.texts % CERTIFIED
        certified = 2 * self.begun * greedy + self.texts * sampled
        self.certificate_seconds = 2 * rates.start + certified / exact if exact else 0.0
        # The rest is for answers, features and training.
        fixed = self.report_seconds + self.tune_seconds + self.certificate_seconds + 2 * data.seconds
        fixed += (4 if data.asking is None else 5) * rates.start
        left = total - fixed
        if left < 0.2 * total:
            raise ValueError(
                f"--minutes {self.minutes:g}: starting programs and measuring take {fixed / 60:.1f} of them here, "
                f"which leaves too little for training; give at least {fixed / 0.8 / 60:.0f}"
            )
        later = 1 / rates.prefill + PASSES / self.rate  # seconds per token after answering
        asking = (data.asking or 0.0) * data.dialogues / data.tokens
        answering = 0.0 if data.own else data.answers / data.tokens / rates.many  # seconds per token of a dialogue
        # A tenth more for the held-out ones.
        self.tokens = min(left / (1.1 * (answering + asking) + later), float(data.tokens))
        self.answering = answering * self.tokens
        self.training_seconds = left - 1.1 * (self.answering + asking * self.tokens) - self.tokens / rates.prefill

    # ------------------------------------------------------------------------------------------- steps

    def add(self, name: str, done: str, commands: list[str], seconds: float, how: str, **more: float) -> None:
        """Add a step; ``memory`` is that of the target's weights by default."""
        more.setdefault("memory", self.rates.weights)
        self.plan.steps.append(Step(name, f"{self.out}/{done}", commands, seconds, how, **more))

    def python(self, program: str, *words: object) -> str:
        """A plain command."""
        return f"python {program} " + shlex.join([str(word) for word in words])

    def on_all(self, program: str, *words: object) -> str:
        """A command that uses all GPUs."""
        line = self.python(program, *words)
        launcher = f"torchrun --standalone --nproc-per-node {self.gpus} "
        return line if self.gpus == 1 else launcher + line.removeprefix("python ")

    def config(self, file: str, found: Any) -> list[str]:
        """Add a config to the plan; return the arguments that name it."""
        self.plan.files[file] = found
        return ["--config", f"{self.out}/configs/{file}"]

    def ask(self) -> None:
        assert self.data.asking is not None
        count = round(1.1 * self.data.dialogues * self.tokens / self.data.tokens)  # with the held-out ones
        self.heldout = min(self.heldout, max(8, count // 11))
        self.prompts, self.begun = min(self.prompts, self.heldout // 2), min(self.begun, self.heldout // 2)
        seconds = count * self.data.asking
        found = configs.magpie(self.model, self.rates.rows, self.data.source, count, seconds / 40)
        line = self.on_all("-m data_prep.magpie", *self.config("magpie.yaml", found))
        how = f"{1 / self.data.asking:,.1f} questions/s {self.measured}; {count:,}, up to 1.5 times the time allowed"
        memory = self.rates.weights + self.rates.rows * configs.ASKED * self.model.cache_bytes
        self.add("ask", "asked", [line], seconds + self.rates.start, how, memory=memory, disk=500 * count)
        self.plan.notes.append(f"no --data: read some of {self.data.source} before you trust the drafter")

    def split(self) -> None:
        text = source_bytes(self.data.source)
        unanswered = [] if self.data.asking is None else ["--unanswered"]
        words = [self.data.source, "--out", f"{self.out}/split", "--heldout", self.heldout, *unanswered]
        line = self.python("-m data_prep.split", *words)
        given = f"{self.data.dialogues:,} dialogues, read as long before"
        how = given if self.data.asking is None else "what was asked"
        self.add("split", "split", [line], 2 * self.data.seconds, how, memory=2 * text, disk=text)

    def answers(self) -> None:
        rows, whole = self.rates.rows, self.tokens == self.data.tokens
        # A batch is always answered to its end, so it must not take more than a third of the time.
        row = self.gpus * self.model.answer / self.rates.many  # seconds, of one GPU
        while rows > 1 and 3 * rows * row > self.answering and not whole:
            rows //= 2
        # If there is time for all dialogues, the limit only guards against a slower machine.
        minutes = max(2 * self.answering / 60, 1.0) if whole else self.answering / 60
        found = configs.regenerate(self.model, rows, self.out, minutes)
        config = self.config("regenerate.yaml", found)
        held = [f"source={self.out}/split/heldout.jsonl", f"out={self.out}/answers/heldout.jsonl"]
        held.append(f"minutes={max(0.1 * minutes, 0.5):.2f}")
        line, heldout = (self.on_all("-m data_prep.regenerate", *config, *more) for more in ([], held))
        answered = self.data.dialogues * self.tokens / self.data.tokens
        how = f"{self.rates.many:,.0f} tokens/s {self.measured}, {rows} at once: about {answered:,.0f} dialogues"
        if answered < ENOUGH and not whole:
            self.plan.notes.append(
                f"only about {answered:,.0f} dialogues will be answered, and a head learns little from so few "
                "(docs/smollm2-training.md: 3,185 in its smallest training): give more --minutes, or leave this "
                "machine alone"
            )
        seconds = 1.1 * self.answering + 2 * self.rates.start
        memory = self.rates.weights + rows * self.model.longest * self.model.cache_bytes
        self.add("answers", "answers", [heldout, line], seconds, how, memory=memory, disk=5 * self.tokens)

    def limit(self) -> dict[str, int]:
        """The number of dialogues that there is time for, if their answers are the target's own."""
        share = self.tokens / self.data.tokens
        return {"limit": max(1, int(share * self.data.dialogues))} if self.data.own and share < 1 else {}

    def features(self, taps: list[int], int8: bool, size: float) -> None:
        found = configs.features(self.model, self.out, self.files, int8, taps)
        found[0].update(self.limit())
        line = self.on_all("-m data_prep.features", *self.config("features.yaml", found))
        seconds = self.rates.start + self.tokens / self.rates.prefill
        how = f"{self.rates.prefill:,.0f} tokens/s {self.measured}, {self.tokens / 1e6:,.2f}M tokens"
        self.add("features", "features", [line], seconds, how, disk=size)

    def train(self, online: bool) -> None:
        config, found = self.training(self.training_seconds / 60, online)
        if online:
            found[0]["data"].update(self.limit())
        every = max(20, round(LOST * 60 * self.rate / config.batch_tokens))
        found[0].update(save_every=every, export_every=every)
        found[1]["save_every"] = f"about {LOST:g} minutes here, which a kill may cost"
        memory, disk = self.needed(config)
        script = Path(os.path.relpath(ROOT / "train" / f"{self.method}.py"))
        latest = f"{self.out}/{self.method}/state/latest"
        file = f"{self.method}.yaml"
        line = self.python(str(script), *self.config(file, found))
        if self.gpus > 1:
            line = "deepspeed " + line.removeprefix("python ")
        line += f" $([ -e {shlex.quote(latest)} ] && echo --resume || true)"
        passes = self.training_seconds * self.rate / max(self.tokens, 1)
        how = f"{self.rate:,.0f} tokens/s {self.measured}, {passes:.1f} passes"
        seconds = self.training_seconds + self.rates.start
        self.add("train", self.method, [line], seconds, how, memory=memory, disk=disk)

    def needed(self, config: TrainConfig) -> tuple[float, float]:
        """Bytes of memory and disk of the training; raises ValueError if there are fewer."""
        task = meta_task(config, self.model.config)
        lengths = [self.model.longest] * -(-config.batch_tokens // (self.gpus * self.model.longest))
        parts, _ = rank_memory(config, task, lengths, self.gpus, self.machine.gpus > 0)
        check_memory(sum(parts.values()))
        check_run_disk(config, task.module)
        return sum(parts.values()), run_folder_bytes(config, task.module)

    def measure(self) -> None:
        """The report, after a search if the method needs one, the lossless test, and the card or the push."""
        model, out, entry = self.model, self.out, self.entry
        prompts, folder = self.files["heldout"], f"{out}/{self.method}"
        self.plan.report = f"{out}/speed/report.md; the drafter: {folder}"
        rows = self.rows
        choose = []
        if self.recipe.knobs:
            found = configs.tune(self.recipe, model, out, self.files["train"], entry, self.prompts)
            line = self.python("-m eval.tune", *self.config("tune.yaml", found))
            how = f"{', then '.join(self.recipe.knobs)}, on dialogues of the training"
            self.add("tune", "tune", [line], self.tune_seconds, how)
            best = shlex.quote(f"{out}/tune/best.yaml")
            choose = [f"\"drafters=$(echo '- drafter: prompt_lookup'; cat {best})\""]
        found = configs.speed(model, out, prompts, self.prompts, rows)
        line = self.python("-m eval.speed", *self.config("speed.yaml", found))
        how = f"{self.rates.one:,.0f} tokens/s measured; {len(rows)} methods on {self.prompts} held-out prompts"
        self.add("speed", "speed", [" ".join([line, *choose])], self.report_seconds, how)
        shown = ["--report", f"{out}/speed"]
        if self.rates.exact is None:
            self.plan.notes.append("no lossless test: the target in float32 does not fit into memory")
        else:
            self.certify(prompts)
            shown += ["--certificate", f"{out}/lossless"]
        name = self.hub or f"you/{Path(out).name}"
        card = [] if self.hub else ["--card", f"{out}/card/README.md"]
        line = self.python("-m drafters.hub", "push", folder, name, *shown, *card)
        lines = [f"mkdir -p {shlex.quote(out)}/card", line]
        how = f"to {self.hub}" if self.hub else "only the model card: no --hub"
        self.add("push" if self.hub else "card", "card", lines, self.rates.start / 2, how, memory=0.0)

    def certify(self, prompts: str) -> None:
        """The lossless test."""
        found = configs.lossless(self.recipe, self.model, self.out, prompts, self.entry, self.begun, self.texts)
        out = self.out
        line = self.python("-m eval.lossless", *self.config("lossless.yaml", found))
        how = f"{self.rates.exact:,.0f} tokens/s in float32 measured; {self.texts} sampled texts, {self.begun} greedy"
        # A drafter that is not lossless ends the script; the card says if too little was tested.
        line += f' || grep -q \'"verdict": "not shown\' {shlex.quote(out + "/lossless/lossless.json")}'
        memory = 2 * self.rates.weights * (2 if self.machine.dtype == "bfloat16" else 1)
        self.add("lossless", "lossless", [line], self.certificate_seconds, how, memory=memory)


def _within(value: float, least: int, most: int) -> int:
    return max(least, min(most, int(value)))
