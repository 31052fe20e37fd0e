"""The training loop of every drafter: batches -> losses -> DeepSpeed's step -> logs, checkpoints, exports.

Resuming is exact: a step depends only on the weights, the optimiser's state and the position in the data. The order of
the data, the noise and dropout are drawn from the seed and that position, so a checkpoint has no generator's state.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data_prep.common.progress import WITHOUT_TIME_LEFT, Bar
from drafters.cli.program import Failure
from drafters.common.files import replace_json
from drafters.common.threads import fit_threads
from train.core.average import WeightAverage
from train.core.config import TENSORBOARD
from train.core.engine import Engine
from train.core.runtime import Ranks, check_same_step, dtype_of, rank_device, seed_step
from train.core.task import Task
from train.core.weights import init_from
from train.data.draft_vocab import find_frequent
from train.data.packing import Batch, Position, StepData, TrainData
from train.data.shard_check import ShardCheck
from train.run import files
from train.run.describe import describe_run, provenance
from train.run.files import Metrics, StateFolder
from train.run.inputs import Inputs
from train.run.keep import TAU, Keeper
from train.run.limits import Limits, Progress
from train.run.state import SavedState, save_state
from train.run.summary import OWN_SHARE, answers_line, describe_answers, write_summary
from train.run.trackers import start_trackers
from train.watch.energy import TrainingEnergy
from train.watch.flops import TrainingCost, training_cost
from train.watch.heldout import Heldout
from train.watch.meter import Meter
from train.watch.tau import HeldoutTau

EPSILON = 1e-5  # added to the loss's denominator, as in EAGLE's released code
TAU_FIX = "if the target does not fit beside the training, set tau_device: cpu; or set tau_every: null"


class TrainingDiverged(Failure):
    """The loss or the gradient is NaN or infinite."""


class TrainRun:
    """One run: a task, its data, DeepSpeed's engine and the run folder."""

    def __init__(self, task: Task, inputs: Inputs, ranks: Ranks, resume: bool, arguments: list[str]) -> None:
        self.task, self.inputs, self.ranks, self.config = task, inputs, ranks, task.config
        self.states = StateFolder(self.config.out)
        saved = SavedState(self.states.newest() or self.states.path) if resume else None
        self.progress = Progress(**{"joules": None, **saved.progress}) if saved else Progress()
        self._first_weights(resumed=saved is not None)
        if saved:
            saved.load_weights(task.module)
        # Of all passes and of the first alone; before ZeRO-3 partitions the weights.
        costs = training_cost(task), training_cost(task, 1)
        self._start_engine()
        self.keeper = Keeper(self.config, self.progress, ranks, self.engine.device, resumed=saved is not None)
        self._open_data(costs)
        device, energy = self.engine.device, self.energy
        self.info = describe_run(task, inputs, ranks, device, energy, self.trained, arguments)
        if saved:
            files.check_continues(self.config.out, self.info)
            saved.load_optimizer(self.engine, self.progress.step)
            if self.average is not None:
                self.average.load(saved.weight_average())
        self.metrics = self._open_run_folder(resume) if ranks.is_first else None

    def _first_weights(self, resumed: bool) -> None:
        """The weights of step 0, and the vocabularies of draft and loss.

        A resumed run needs them, too: a state holds no vocabulary, no candidates and no base of a LoRA.
        """
        config, task, train = self.config, self.task, self.inputs.train
        task.load()
        if config.init_from is not None:
            init_from(task, config.init_from)
        covered, self.trained = find_frequent(task, train), task.describe(train)
        for line in (covered, self.trained) if self.ranks.is_first else ():
            if line is not None:
                print(line)
        if not resumed and config.solves_weights:
            task.ends.to(rank_device())
            self.inputs.load_target(config, rank_device())
            task.fit(train)

    def _start_engine(self) -> None:
        task = self.task
        self.engine = Engine(task.module, self.config, task.rate_factors(0), task.lm_heads)
        task.ends.to(self.engine.device)
        if self.inputs.target is None:
            self.inputs.load_target(self.config, self.engine.device)
        decay = self.config.weight_average
        self.average = None if decay is None else WeightAverage(self.engine.module, decay)
        check_same_step(self.ranks, self.progress.step, self.engine.device)

    def _open_data(self, costs: tuple[TrainingCost, TrainingCost]) -> None:
        """The training batches, the held-out text, the check of both stores' files, and what measures the run."""
        inputs, device = self.inputs, self.engine.device
        stores = [inputs.train, inputs.heldout] if self.config.verify else []
        self.check = ShardCheck(stores, self.ranks, device)
        self.data = TrainData(inputs.train, self.config, self.ranks, pin=device.type == "cuda")
        self.data.check = self.check
        self.data.rewrite = self.task.rewriter(self.data, self.engine, lambda: self.progress.step)
        last_step = self.config.last_step(self.data.steps_in)
        self.limits = Limits(self.config, self.progress, last_step, self.ranks, device)
        self.heldout = Heldout(inputs.heldout, self.config.heldout_tokens, self.ranks)
        everywhere = range(len(inputs.heldout))  # the prompts of tau are spread over the store
        self.check.first_read(inputs.heldout, everywhere if self.config.tau_every else self.heldout.dialogues)
        self.meter = Meter(self.task, costs, device)
        self.energy = TrainingEnergy(device, self.ranks, self.progress.joules)
        self.tau: HeldoutTau | None = None
        if self.config.tau_every and self.ranks.is_first:
            self.tau = HeldoutTau(self.task, inputs.heldout, device, inputs.target)

    def _open_run_folder(self, resume: bool) -> Metrics:
        self.config.out.mkdir(parents=True, exist_ok=True)
        if resume:
            self.states.tidy()
        else:
            files.clear_dead_run(self.config.out)
        replace_json(self.config.out / "run.json", {**self.info, "resumed_at_step": self.progress.step})
        trackers = start_trackers(self.config)
        return Metrics(self.config.out, self.progress.step, TENSORBOARD in self.config.trackers, trackers)

    def train(self) -> None:
        """Train from the current step to the first limit; evaluate, save and export, also at the end.

        Raises:
            TrainingDiverged: the loss or the gradient is not finite; the checkpoints stay as they were.
        """
        config, progress = self.config, self.progress
        self.limits.start()
        form = None if self.limits.last_step is None else WITHOUT_TIME_LEFT
        bar = Bar(total=self.limits.last_step, initial=progress.step, disable=not self.ranks.is_first, bar_format=form)
        steps = self.meter.watch(self.data.steps(Position(progress.epoch, progress.batch)), progress.tokens)
        # At least one step, even in a short run.
        finished = progress.step > 0 and (self.limits.finished() or self.keeper.out_of_patience())
        if finished:
            bar.write(f"{config.out} ended at step {progress.step:,} without its final files; writing them now")
            self._export()
        elif progress.step:
            bar.write(f"{config.out}: continues after step {progress.step:,}{self.limits.text()}")
        else:
            separate = self.inputs.heldout is not self.inputs.train  # not in --overfit
            self._evaluate(bar, with_own_answers=separate)  # too little memory or a missing file fails now
            self._measure_tau(bar)
        ended = "finished"

        def due(every: int | None) -> bool:
            return finished or bool(every and progress.step % every == 0)

        try:
            while not finished:
                self._step(steps, bar)
                finished = self.limits.finished()
                if due(config.tau_every):
                    self._measure_tau(bar)
                    finished = finished or self.keeper.out_of_patience()
                if due(config.eval_every):
                    self._evaluate(bar)
                if due(config.save_every) or due(config.export_every):
                    self.check.wait(bar.write)
                    self._check_shards()
                # The state first, so that a full disk during the export does not lose training.
                if due(config.save_every):
                    progress.joules = self.energy.total()
                    save_state(self.engine, self.states, vars(progress), self.ranks, self.average)
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

    def _step(self, steps: Iterator[StepData], bar: Any) -> None:
        """One optimiser step, which depends only on the weights, the optimiser's state and the step's number.

        Micro-batches and ranks differ in their numbers of trained positions, so losses are summed, and divided once by
        the positions of all.
        """
        # The data, the random numbers and the learning rate of this step.
        began = time.monotonic()
        fit_threads()
        data = next(steps)
        progress, engine = self.progress, self.engine
        seed_step(self.config.seed, progress.step, self.ranks)
        self.task.done = self.limits.done()
        rate = self.limits.learning_rate(self.task.done)

        # The trained positions: counted before the first loss, so that its gradient has the right scale at once.
        random_seed = self.config.seed * 1_000_003 + data.epoch  # of noise
        batches = [self._with_rows(batch, random_seed) for batch in data.batches]
        tokens = sum(batch.tokens for batch in batches)
        counts = self._total([sum(len(batch.rows) for batch in batches), tokens, self.check.broken])
        # DeepSpeed averages over ranks and micro-batches; the loss is the mean over the positions of all of them.
        share = (self.ranks.count * len(batches) / (counts[0] + EPSILON)).float()

        # Forward and backward, micro-batch by micro-batch. The losses' sums stay on the device.
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            if number:
                engine.step()  # before the accumulation boundary this only counts the previous micro-batch
            on_device = batch.to(engine.device, dtype_of(self.config))
            parts = self.task.losses(self.task.pairs(engine, on_device, random_seed))
            engine.backward(parts["loss"] * share)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0) + value.detach()

        # The update, and the step's one copy to the host.
        totals = self.ranks.total(torch.stack([value.double() for value in sums.values()]))
        norm = engine.update(rate, self.task.rate_factors(progress.step))
        if self.average is not None:
            self.average.update(progress.step)
        *means, norm, tokens, broken = torch.cat([totals / (counts[0] + EPSILON), norm, counts[1:]]).tolist()

        # NaN, or data of a broken shard, has reached the weights by now, but no saved state.
        if broken:
            self._check_shards()
        losses = dict(zip(sums, means, strict=True))
        self._check_finite({**losses, "grad_norm": norm})

        # The step is done: a state saved now continues with the next batch.
        progress.step, progress.tokens = progress.step + 1, progress.tokens + int(tokens)
        progress.epoch, progress.batch = data.following.epoch, data.following.batch
        progress.seconds = self.limits.elapsed()
        self.meter.step_done(batches)
        self._report(bar, losses, norm, rate, tokens / (time.monotonic() - began))

    def _with_rows(self, batch: Batch, seed: int) -> Batch:
        chosen = self.task.choose(batch, seed)
        return chosen.pin_memory() if self.data.pin else chosen  # else the copy would wait for the GPU

    def _report(self, bar: Any, losses: dict[str, float], norm: float, rate: float, speed: float) -> None:
        bar.update(1)
        step = self.progress.step
        if step % self.config.log_every and step != self.limits.last_step:
            return
        text = f"loss {losses['loss']:.3f}, {speed:,.0f} tokens/s, {self.limits.time_left()} left"
        bar.set_postfix_str(text, refresh=False)
        if self.metrics:
            more = {"learning_rate": rate, "grad_norm": norm, **self.meter.figures(self.progress.tokens)}
            self.metrics.add(step, {**losses, **more, "tokens": self.progress.tokens})

    def _sum_up(self, ended: str) -> None:
        """Write the run's summary; its own errors (a full disk) only give a warning."""
        try:
            answers = write_summary(self.config.out, ended)["heldout_answers"]
            if answers["warning"]:
                tqdm.write(answers_line(answers))
        except (OSError, ValueError) as error:
            tqdm.write(f"warning: no summary: {error}", file=sys.stderr)

    def _averaged(self) -> AbstractContextManager[None]:
        """Inside, the module has the averaged weights, which are judged and exported."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _weights(self) -> dict[str, Tensor]:
        with self._averaged():
            return self.engine.weights()

    def _evaluate(self, bar: Any, with_own_answers: bool = False) -> None:
        module, device, dtype = self.engine.module, self.engine.device, dtype_of(self.config)
        with self._averaged():
            figures = self.heldout.figures(self.task, module, device, dtype, with_own_answers)
        joules = self.progress.joules = self.energy.total()
        if self.metrics is None:
            return
        bad = [name for name, value in figures.items() if not math.isfinite(value)]
        figures = {name: value for name, value in figures.items() if name not in bad}
        if bad:  # perhaps from one held-out dialogue: the run goes on
            bar.write(f"warning: step {self.progress.step}: NaN or infinite, so left out: {', '.join(bad)}")
            figures["heldout_not_finite"] = len(bad)
        spent = {"seconds": round(self.progress.seconds, 1)} | ({} if joules is None else {"joules": round(joules, 1)})
        self.metrics.add(self.progress.step, {**figures, **spent})
        shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if "_at_" not in name)
        bar.write(f"step {self.progress.step}: {shown}")
        if with_own_answers:
            bar.write(answers_line(describe_answers(self.info["heldout"], figures.get(OWN_SHARE))))

    def _measure_tau(self, bar: Any) -> None:
        """Measure tau by the real loop on the first rank, while the others wait, and keep the weights if they are the
        best; the time is taken off the clock."""
        if not self.config.tau_every:
            return
        began, step, keeper = time.monotonic(), self.progress.step, self.keeper
        weights = self._weights()
        figures = self._tau_figures(weights, bar)
        tau = float(self._total([figures.get(TAU, 0.0)]))  # of all ranks, which so decide the same; 0: not measured
        if tau and keeper.judge(tau):
            training = self._provenance()
            if self.ranks.is_first:
                keeper.save(weights, training)
        if figures and self.metrics is not None:
            figures |= keeper.figures()
            self.metrics.add(step, figures)
            shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if "_tau" in name)
            bar.write(f"step {step}: {shown}" + (f" (of step {keeper.step})" if keeper.step is not None else ""))
            if keeper.out_of_patience():
                bar.write(f"step {step}: stopped, no gain in {self.config.patience} measurements (patience)")
        spent = time.monotonic() - began if self.ranks.is_first else 0.0
        self.limits.skip(float(self._total([spent])))

    def _tau_figures(self, weights: dict[str, Tensor], bar: Any) -> dict[str, float]:
        """The figures of ``weights`` on the first rank; nothing elsewhere, and after an error."""
        if self.tau is None:
            return {}
        try:
            return self.tau.figures(weights)
        except (RuntimeError, ValueError, OSError) as error:
            if self.progress.step == 0:
                if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                    raise  # a bug: show the trace
                raise ValueError(f"tau_every: {error}; {TAU_FIX}") from error
            exports = f"; step {self.keeper.step} stays the best" if self.keeper.step is not None else ""
            bar.write(f"warning: tau is not measured any more ({error}){exports}; {TAU_FIX}")
            self.tau = None  # the run goes on
            return {}

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
            f"step {self.progress.step + 1}: {what}; stopped, {self.states.saved_notice()}. Usually a smaller "
            f"learning_rate (now {self.config.learning_rate}) or a longer warmup_steps (now {self.config.warmup_steps})"
            f" helps{other}"
        )

    def _check_shards(self) -> None:
        """Raise ValueError if a shard that was read is broken, before a checkpoint is made from it."""
        if problems := self.check.problems():
            raise ValueError(
                f"stopped at step {self.progress.step}, {self.states.saved_notice()}: {problems}; then continue with "
                "--resume, or start again. verify: false would train on it anyway"
            )

    def _total(self, values: list[float]) -> Tensor:
        """The sums of ``values`` over all ranks, float64, on the device."""
        return self.ranks.total(torch.tensor(values, dtype=torch.float64, device=self.engine.device))

    def _export(self) -> None:
        """Write the best drafter so far, or else the drafter as it is now, into the top of the run folder."""
        kept = self.keeper.step is not None  # on all ranks or on none
        weights, training = ({}, {}) if kept else (self._weights(), self._provenance())
        if not self.ranks.is_first:
            return
        if kept:
            weights, training = self.keeper.load()
        target = self.inputs.ends.identity(self.config.target, self.config.revision)
        self.task.export(weights, target, training)

    def _provenance(self) -> dict[str, Any]:
        """What the training was so far, for an export; a collective."""
        self.progress.joules = self.energy.total()
        return provenance(self.inputs, self.progress, self.info)
