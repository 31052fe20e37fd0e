"""The training loop of every drafter: batches -> losses -> DeepSpeed's step -> logs, checkpoints, exports.

Resuming is exact: what a step does follows from the weights, the optimiser's state and the step's position in the data
alone. The order of the data, the noise and dropout are drawn from the seed and that position, so a checkpoint holds no
generator's state.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data_prep.common.progress import WITHOUT_TIME_LEFT, Bar
from drafters.cli.program import Failure
from drafters.common.files import replace_json
from drafters.common.machine import hardware
from drafters.common.threads import fit_threads
from train.core.average import WeightAverage
from train.core.engine import Engine
from train.core.runtime import Ranks, check_same_step, rank_device, seed_step
from train.core.task import Task
from train.data.frequency import find_frequent
from train.data.packing import Batch, Position, StepData, TrainData
from train.data.shard_check import ShardCheck
from train.run.answers import OWN_SHARE, answers_line, describe_answers, describe_heldout
from train.run.files import (
    Metrics,
    StateFolder,
    check_same_base,
    check_same_data,
    clear_dead_run,
    describe_data,
    describe_run,
)
from train.run.inputs import Inputs, target_identity
from train.run.state import SavedState, save_state
from train.run.summary import write_summary
from train.watch.energy import TrainingEnergy
from train.watch.flops import training_cost
from train.watch.heldout import Heldout
from train.watch.meter import Meter
from train.watch.tau import HeldoutTau

EPSILON = 1e-5  # of the loss's denominator, as EAGLE's released code has it
TAU_FIX = "if the target does not fit beside the training, set tau_device: cpu; or set tau_every: null"


class TrainingDiverged(Failure):
    """The loss or the gradient is NaN or infinite."""


@dataclass
class Progress:
    """What a saved state holds beside weights and Adam's moments."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    joules: float | None = 0.0

    @property
    def position(self) -> Position:
        """The next global batch."""
        return Position(self.epoch, self.batch)


class TrainRun:
    """One run: a task, its data, DeepSpeed's engine and the run folder."""

    def __init__(self, task: Task, inputs: Inputs, ranks: Ranks, resume: bool, arguments: list[str]) -> None:
        self.task, self.inputs, self.ranks, self.config = task, inputs, ranks, task.config
        self.states = StateFolder(self.config.out)
        saved = SavedState(self.states.newest() or self.states.path) if resume else None
        task.load()
        if self.config.init_from is not None and (saved is None or self.config.lora):  # no state has a LoRA's base
            task.init_from(self.config.init_from)
        if saved:
            saved.load_weights(task.module)
        cost = training_cost(task)
        find_frequent(task, inputs.train)
        if saved is None and task.fits:
            task.ends.to(rank_device())
            inputs.load_target(self.config, rank_device())
            task.fit(inputs.train)
        self.engine = Engine(task.module, self.config, task.rate_factors(0), task.lm_heads)
        task.ends.to(self.engine.device)
        if inputs.target is None:
            inputs.load_target(self.config, self.engine.device)
        decay = self.config.weight_average
        self.average = None if decay is None else WeightAverage(self.engine.module, decay)
        self.meter = Meter(task, cost, self.engine.device)
        stores = [inputs.train, inputs.heldout] if self.config.verify else []
        self.check = ShardCheck(stores, ranks, self.engine.device)
        self.data = TrainData(inputs.train, self.config, ranks, pin=self.engine.device.type == "cuda")
        self.data.check = self.check
        self.heldout = Heldout(inputs.heldout, self.config.heldout_tokens, ranks)
        whole = bool(self.config.tau_every)  # its prompts are spread over the store
        self.check.first_read(inputs.heldout, range(len(inputs.heldout)) if whole else self.heldout.dialogues)
        tau = HeldoutTau(task, inputs.heldout, self.engine.device, inputs.target) if whole and ranks.is_first else None
        self.tau: HeldoutTau | None = tau
        self.last_step = self.config.last_step(self.data.steps_in)
        # A state of before energy was counted does not tell it.
        self.progress = Progress(**{"joules": None, **saved.progress}) if saved else Progress()
        check_same_step(ranks, self.progress.step, self.engine.device)
        self.energy = TrainingEnergy(self.engine.device, ranks, self.progress.joules)
        self.data.rewrite = task.rewriter(self.data, self.engine, lambda: self.progress.step)
        self._clock = time.monotonic()
        data = {"train": describe_data(inputs.train.manifest)}
        heldout = describe_heldout(self.config, inputs.heldout.manifest)
        more = {"data": data, "heldout": heldout, "loss_chunk_rows": task.chunk_rows, "energy": self.energy.how}
        more |= {"hardware": hardware(self.engine.device)}
        base = None if task.base is None else task.base.model_dump()
        self.info = describe_run(self.config, arguments, ranks.count) | more | ({"base": base} if base else {})
        if saved:
            check_same_data(self.config.out, data)
            check_same_base(self.config.out, base)
            saved.load_optimizer(self.engine, self.progress.step)
            if self.average is not None:
                self.average.load(saved.weight_average())
        self.metrics: Metrics | None = None
        if ranks.is_first:
            self.config.out.mkdir(parents=True, exist_ok=True)
            if saved:
                self.states.tidy()
            else:
                clear_dead_run(self.config.out)
            replace_json(self.config.out / "run.json", {**self.info, "resumed_at_step": self.progress.step})
            self.metrics = Metrics(self.config.out, self.progress.step)

    def train(self) -> None:
        """From the current step to the limit that comes first; evaluates, saves and exports at the end, too.

        Raises:
            TrainingDiverged: the loss or the gradient is not finite; the checkpoints stay as they were.
        """
        config, progress = self.config, self.progress
        self._clock = time.monotonic() - progress.seconds
        form = None if self.last_step is None else WITHOUT_TIME_LEFT
        bar = Bar(total=self.last_step, initial=progress.step, disable=not self.ranks.is_first, bar_format=form)
        steps = self.meter.watch(self.data.steps(progress.position), progress.tokens)
        finished = progress.step > 0 and self._finished()  # however short `minutes` are, there is one step
        if finished:
            bar.write(f"{config.out} was killed at its end, after step {progress.step:,}: what is missing is written")
            self._export()
        elif progress.step:
            bar.write(f"{config.out}: going on after step {progress.step:,}{self._of_limit()}")
        else:
            apart = self.inputs.heldout is not self.inputs.train  # as --overfit has them
            self._evaluate(bar, whose=apart)  # what does not fit into memory, or is not there, fails now
            self._measure_tau(bar)
        ended = "finished"

        def due(every: int | None) -> bool:
            return finished or bool(every and progress.step % every == 0)

        try:
            while not finished:
                self._step(steps, bar)
                finished = self._finished()
                if due(config.eval_every):
                    self._evaluate(bar)
                if due(config.tau_every):
                    self._measure_tau(bar)
                if due(config.save_every) or due(config.export_every):
                    self.check.wait(bar.write)
                    self._check_shards()
                # The state comes before the export: a full disk must not cost what was trained.
                if due(config.save_every):
                    self._save()
                if due(config.export_every):
                    self._export()
        except KeyboardInterrupt:
            ended = f"interrupted after step {progress.step}"
            raise
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
            raise
        finally:
            steps.close()
            self.check.close()
            self.energy.close()
            bar.close()
            if self.metrics:
                self.metrics.close()
                self._sum_up(ended)

    # ------------------------------------------------------------------------------------------- one step

    def _step(self, steps: Iterator[StepData], bar: Any) -> None:
        """One optimiser step. What it does follows from the weights, the optimiser's state and the step's number alone.

        Micro-batches and ranks differ in how many positions they train on, so losses are summed, and divided once by
        the positions of all of them.
        """
        # The data, the random numbers and the learning rate of this step.
        began = time.monotonic()
        fit_threads()
        data = next(steps)
        progress, engine = self.progress, self.engine
        seed_step(self.config.seed, progress.step, self.ranks)
        rate = self._learning_rate()

        # The trained positions: counted before the first loss, so that its gradient has the right scale at once.
        rows = [self.task.rows(batch) for batch in data.batches]
        if self.data.pin:  # copied from other memory, they would wait for the micro-batch before
            rows = [part.pin_memory() for part in rows]
        tokens = sum(batch.tokens for batch in data.batches)
        counts = self._total([sum(len(part) for part in rows), tokens, self.check.broken])
        # DeepSpeed averages over ranks and micro-batches; the mean wanted is over the positions of all of them.
        share = (self.ranks.count * len(data.batches) / (counts[0] + EPSILON)).float()

        # Forward and backward, micro-batch by micro-batch. The losses' sums stay on the device.
        sums: dict[str, Tensor] = {}
        for number, (batch, part) in enumerate(zip(data.batches, rows, strict=True)):
            if number:
                engine.step()  # before the accumulation boundary this only counts the micro-batch before
            parts = self._loss(batch, part, data.epoch)
            engine.backward(parts["loss"] * share)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0) + value.detach()

        # The update, and the step's one copy to the host.
        totals = self.ranks.total(torch.stack([value.double() for value in sums.values()]))
        norm = engine.update(rate, self.task.rate_factors(progress.step))
        if self.average is not None:
            self.average.update(progress.step)
        *means, norm, tokens, broken = torch.cat([totals / (counts[0] + EPSILON), norm, counts[1:]]).tolist()

        # What is not finite, or came from a broken shard, has reached the weights by now, but no saved state.
        if broken:
            self._check_shards()
        losses = dict(zip(sums, means, strict=True))
        self._check_finite({**losses, "grad_norm": norm})

        # Only now is the step done: a state saved after it goes on with the next batch.
        progress.step, progress.tokens = progress.step + 1, progress.tokens + int(tokens)
        progress.epoch, progress.batch = data.following.epoch, data.following.batch
        progress.seconds = time.monotonic() - self._clock
        self.energy.tick()
        self._report(bar, losses, norm, rate, tokens / (time.monotonic() - began))

    def _loss(self, batch: Batch, rows: Tensor, epoch: int) -> dict[str, Tensor]:
        noise_seed = self.config.seed * 1_000_003 + epoch
        on_device = batch.to(self.engine.device, self.config.dtype)
        return self.task.loss_sums(self.engine, on_device, rows.to(self.engine.device, non_blocking=True), noise_seed)

    def _learning_rate(self) -> float:
        """Linear warm-up from 0, then the schedule over what is left of steps, epochs or minutes."""
        config, step = self.config, self.progress.step
        warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "constant" or warm < 1.0:
            return config.learning_rate * warm
        done = self._fraction_done()
        left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
        return config.learning_rate * left

    def _fraction_done(self) -> float:
        by_step, warmup = 0.0, self.config.warmup_steps
        if self.last_step is not None:
            by_step = (self.progress.step - warmup) / max(1, self.last_step - warmup)
        by_clock = self.progress.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        if self.config.minutes and self.ranks.count > 1:
            by_clock = float(self._total([by_clock])) / self.ranks.count
        return min(1.0, max(0.0, by_step, by_clock))

    def _of_limit(self) -> str:
        """Out of how many steps and minutes, as far as they are limited."""
        steps, minutes = f" of {self.last_step:,}" if self.last_step is not None else "", self.config.minutes
        return steps + (f", {self.progress.seconds / 60:.1f} of {minutes:g} minutes" if minutes else "")

    def _finished(self) -> bool:
        if self.last_step is not None and self.progress.step >= self.last_step:
            return True
        if self.config.minutes is None:
            return False
        late = time.monotonic() - self._clock >= 60 * self.config.minutes
        ended = bool(self._total([late]) > 0)  # one rank's clock decides for all
        if ended:  # as the state has to say, or a resumed run would take one step more
            self.progress.seconds = max(self.progress.seconds, 60 * self.config.minutes)
        return ended

    # ------------------------------------------------------------------------------------------- figures

    def _report(self, bar: Any, losses: dict[str, float], norm: float, rate: float, speed: float) -> None:
        bar.update(1)
        self.meter.step_done()
        step = self.progress.step
        if step % self.config.log_every and step != self.last_step:
            return
        text = f"loss {losses['loss']:.3f}, {speed:,.0f} tokens/s, {self._time_left()} left"
        bar.set_postfix_str(text, refresh=False)
        if self.metrics:
            more = {"learning_rate": rate, "grad_norm": norm, **self.meter.figures(self.progress.tokens)}
            self.metrics.add(step, {**losses, **more, "tokens": self.progress.tokens})

    def _time_left(self) -> str:
        """Until the limit that comes first."""
        progress, left = self.progress, []
        if self.last_step is not None and progress.step:
            left.append(progress.seconds / progress.step * (self.last_step - progress.step))
        if self.config.minutes:
            left.append(60 * self.config.minutes - progress.seconds)
        return str(tqdm.format_interval(max(0, min(left))))

    def _sum_up(self, ended: str) -> None:
        """The run's summary; what hinders it (a full disk) must not hide what ended the run."""
        try:
            found = write_summary(self.config.out, ended)["heldout_answers"]
            if found["warning"]:
                tqdm.write(answers_line(found))
        except (OSError, ValueError) as error:
            tqdm.write(f"warning: no summary: {error}", file=sys.stderr)

    def _averaged(self) -> AbstractContextManager[None]:
        """The module has the weights that are to be judged and exported meanwhile."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _weights(self) -> dict[str, Tensor]:
        with self._averaged():
            return self.engine.weights()

    def _evaluate(self, bar: Any, whose: bool = False) -> None:
        module, device, dtype = self.engine.module, self.engine.device, self.config.dtype
        with self._averaged():
            figures = self.heldout.figures(self.task, module, device, dtype, whose)
        joules = self.progress.joules = self.energy.total()
        if self.metrics is None:
            return
        bad = [name for name, value in figures.items() if not math.isfinite(value)]
        figures = {name: value for name, value in figures.items() if name not in bad}
        if bad:  # of the held-out text alone, perhaps of one dialogue: no reason to lose a run
            bar.write(f"warning: step {self.progress.step}: NaN or infinite, and left out: {', '.join(bad)}")
            figures["heldout_not_finite"] = len(bad)
        spent = {"seconds": round(self.progress.seconds, 1)} | ({} if joules is None else {"joules": round(joules, 1)})
        self.metrics.add(self.progress.step, {**figures, **spent})
        shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if "_at_" not in name)
        bar.write(f"step {self.progress.step}: {shown}")
        if whose:
            bar.write(answers_line(describe_answers(self.info["heldout"], figures.get(OWN_SHARE))))

    def _measure_tau(self, bar: Any) -> None:
        """tau by the real loop, on the first rank; the others wait. The run's clock stands still meanwhile."""
        if not self.config.tau_every:
            return
        began = time.monotonic()
        self.energy.lap()
        weights = self._weights()
        if self.tau is not None and self.metrics is not None:
            try:
                figures = self.tau.figures(weights)
                self.metrics.add(self.progress.step, figures)
                shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if "_tau" in name)
                bar.write(f"step {self.progress.step}: {shown}")
            except (RuntimeError, ValueError, OSError) as error:
                if self.progress.step == 0:
                    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                        raise  # a fault, of which the trace tells more
                    raise ValueError(f"tau_every: {error}; {TAU_FIX}") from error
                bar.write(f"warning: tau is not measured any more ({error}); {TAU_FIX}")
                self.tau = None  # no reason to lose a run
        spent = time.monotonic() - began if self.ranks.is_first else 0.0
        self._clock += float(self._total([spent]))

    def _check_finite(self, values: dict[str, float]) -> None:
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not bad:
            return
        self.check.wait(tqdm.write)
        self._check_shards()
        what, other = ", ".join(f"{name} = {value}" for name, value in bad.items()), ""
        if not self.progress.step and isinstance(self.config.features, Path):
            command = f"python -m data_prep.inspect {self.config.features / 'train'} --verify"
            other = f"; at the first step the features may be damaged, too: {command}"
        raise TrainingDiverged(
            f"step {self.progress.step + 1}: {what}; stopped, {self.states.kept()}. Usually a smaller learning_rate "
            f"(now {self.config.learning_rate}) or a longer warmup_steps (now {self.config.warmup_steps}) helps{other}"
        )

    def _check_shards(self) -> None:
        """Raise ValueError if a shard that was read is found to be broken: no checkpoint may come from it."""
        if problems := self.check.problems():
            raise ValueError(
                f"stopped at step {self.progress.step}, {self.states.kept()}: {problems}; then go on with --resume, or "
                "start anew. With verify: false it would be trained on as it is"
            )

    def _total(self, values: list[float]) -> Tensor:
        """The sums of ``values`` over all ranks, float64, on the device."""
        return self.ranks.total(torch.tensor(values, dtype=torch.float64, device=self.engine.device))

    # ------------------------------------------------------------------------------------------- files

    def _save(self) -> None:
        self.progress.joules = self.energy.total()
        progress = dict(vars(self.progress))
        save_state(self.engine, self.states, self.progress.step, progress, self.ranks, self.average)

    def _export(self) -> None:
        """Write the drafter as it is now into the top of the run folder."""
        self.progress.joules = self.energy.total()
        weights = self._weights()
        if not self.ranks.is_first:
            return
        manifest = self.inputs.train.manifest
        training = {
            "data": manifest.source,
            "features": "online" if self.config.features == "online" else "store",
            "feature_dtype": manifest.dtype,
            "dialogues": manifest.dialogues,
            "steps": self.progress.step,
            "tokens": self.progress.tokens,
            "epochs": self.progress.epoch,
            "minutes": round(self.progress.seconds / 60, 2),
            "joules": self.progress.joules,
            **{key: self.info[key] for key in ("config", "ranks", "versions", "commit")},
        }
        self.task.export(weights, target_identity(self.config, self.inputs.ends), training)
