"""--overfit N: train on a few dialogues, judge on the same ones. A pipeline that cannot learn those is not sound.

Three questions, each with its answer: are the stored features what the target gives for the stored tokens? Does the
loss fall to its floor? Would every answer token then be accepted, the first and the last of each answer included?
The first and the last answer do not go through the training's own mask and shifts: a mistake there cannot hide itself.
"""

import argparse
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.store.reader import FeatureStore
from drafters.common.files import replace_json
from drafters.config import validate
from drafters.model.target import TargetModel
from train.core import engine, runtime
from train.core.config import TrainConfig
from train.core.task import make_task
from train.data.packing import Batch, collate, complete
from train.run.inputs import Inputs, open_inputs
from train.run.loop import TrainingDiverged, TrainRun
from train.watch.positions import answer_positions

STEPS = 400
LEARNING_RATE = 3e-4  # at least: the papers' rates are for far longer runs
FALLEN = 0.2  # of the loss above its floor, what may be left
KNOWN = 0.9  # acceptance rate that must be reached, at every place
SAME = 0.99  # cosine of a stored feature and the target's own; int8 keeps 0.9999
RESULT = "overfit.json"
DESCRIPTION = {"first": "the first token of an answer", "last": "the last one", "others": "the others"}


class FirstDialogues(FeatureStore):
    """The first ``count`` dialogues of a store."""

    def __init__(self, store: FeatureStore, count: int) -> None:
        super().__init__(store.path, store.manifest)
        self.count = min(count, super().__len__())

    def __len__(self) -> int:
        return self.count

    @property
    def lengths(self) -> Tensor:
        return super().lengths[: self.count]


@dataclass
class Finding:
    """One question's answer, and where to look if it is no."""

    question: str
    sound: bool
    answer: str
    look_at: str

    def text(self) -> str:
        """As it is printed: a line or two."""
        mark = "ok  " if self.sound else "FAIL"
        return f"{mark} {self.question}: {self.answer}" + ("" if self.sound else f"\n     look at: {self.look_at}")


def overfit(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """The command; returns 0 if all is sound, else 1. Writes into ``<out>-overfit``, in the place of an earlier run."""
    chosen = any(override.partition("=")[0] == "steps" for override in arguments.overrides)
    runtime.check_devices(config)
    config = overfit_config(config, config.steps if chosen and config.steps else STEPS)
    if config.data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"limit": arguments.overfit})})
    inputs = open_inputs(config)
    ranks = engine.start(config)
    if ranks.is_first:
        clear(config.out)
    findings = run_overfit(config, inputs, ranks, arguments.overfit)
    sound = all(finding.sound for finding in findings)
    if ranks.is_first:
        print("sound: the drafter learns these dialogues" if sound else "NOT sound: see above")
        config.out.mkdir(parents=True, exist_ok=True)
        replace_json(config.out / RESULT, [vars(finding) for finding in findings], allow_nan=True)
    engine.stop()
    return 0 if sound else 1


def overfit_config(config: TrainConfig, steps: int) -> TrainConfig:
    """The config of the overfit run: no noise, the target's own labels, a constant learning rate after a short warm-up,
    one folder aside."""
    changes: dict[str, Any] = {
        "out": config.out.with_name(f"{config.out.name}-overfit"),
        "steps": steps,
        "epochs": None,
        "minutes": None,
        "schedule": "constant",
        "warmup_steps": min(config.warmup_steps, steps // 10),
        "learning_rate": max(config.learning_rate, LEARNING_RATE),
        "weight_decay": 0.0,
        "eval_every": max(1, steps // 4),
        "save_every": steps + 1,
        "export_every": steps + 1,
        "tau_every": None,
        "weight_average": None,
    }
    # No noise, the dialogues as they are and all of their answers; and what a text has is not what the target says, by
    # which the drafter is judged.
    plain = {"noise": "none", "labels": "target", "on_policy": None, "boost": None}
    changes |= {key: value for key, value in plain.items() if key in type(config).model_fields}
    return validate(type(config), {**config.model_dump(), **changes}, source="--overfit")


def clear(out: Path) -> None:
    """Delete what an earlier overfit run left.

    Raises:
        ValueError: the folder holds something else.
    """
    if not out.exists() or not any(out.iterdir()):
        return
    known = any((out / name).is_file() for name in ("run.json", RESULT))
    if not out.name.endswith("-overfit") or not known:
        raise ValueError(f"{out} is not empty and holds no overfit run: empty it, or give another out=")
    shutil.rmtree(out)


def run_overfit(config: TrainConfig, inputs: Inputs, ranks: runtime.Ranks, count: int) -> list[Finding]:
    """Train on the first ``count`` dialogues and answer the three questions, each printed at once by the first rank.

    Damaged features end it before the training, and a training that diverges is a finding, too. All ranks do the same.

    Raises:
        ValueError: none of the dialogues has a trained token.
    """
    few = FirstDialogues(inputs.train, count) if isinstance(inputs.train, FeatureStore) else inputs.train
    task = make_task(config, inputs.ends)
    batches = [collate(few, [index], config.taps) for index in range(len(few))]
    if not any(len(task.rows(batch)) for batch in batches):
        raise ValueError(f"--overfit {count}: none of these dialogues has a trained token; take more of them")
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if ranks.is_first:
            print(finding.text(), flush=True)

    if isinstance(few, FeatureStore) and ranks.is_first:  # what is computed online can be nothing else
        add(check_features(config, few, config.taps))
    unsound = [not finding.sound for finding in findings] or [False]
    if int(ranks.total(torch.tensor(unsound, dtype=torch.int64, device=runtime.rank_device()))):
        return findings
    run = TrainRun(task, Inputs(inputs.ends, few, few), ranks, resume=False, arguments=sys.argv[1:])
    batches = [complete(few, batch, config.taps) for batch in batches]
    before = excess_loss(run, batches)
    try:
        run.train()
    except TrainingDiverged as error:
        advice = "the loss and its gradients; precision=float32; a smaller learning_rate="
        add(Finding("the training stays finite", False, str(error), advice))
        return findings
    add(_judge_loss(before, excess_loss(run, batches)))
    add(_judge_acceptance(acceptance(run, batches)))
    return findings


@torch.no_grad()
def check_features(config: TrainConfig, store: FeatureStore, taps: tuple[int, ...]) -> Finding:
    """Run the target itself over the dialogues and compare: by the cosine, of the worst token in a hundred.

    Token ids that the target does not know and states that are not finite are told first, without the target.
    """
    question = "the stored features are the target's own"
    look_at = (
        "data_prep.features: the store is damaged, of another target or layer, or its tokens are misplaced; "
        f"python -m data_prep.inspect {store.path} --verify finds damaged files"
    )
    damage = _damage(store, taps)
    if damage:
        return Finding(question, False, damage, look_at)
    dtype = store.manifest.target_dtype
    try:
        target = TargetModel.from_pretrained(config.target, dtype, config.tau_device, config.revision)
    except (ValueError, torch.OutOfMemoryError) as error:
        return Finding(question, True, f"not checked, the target cannot be loaded ({error})", look_at)
    cosines: list[Tensor] = []
    for dialogue in store:
        output = target.features(dialogue.input_ids[None].to(target.device), taps=taps)
        pairs = [(dialogue.features, output.features[0]), *((dialogue.taps[k], output.taps[k][0]) for k in taps)]
        cosines += [torch.cosine_similarity(a.float(), b.float().cpu(), dim=-1) for a, b in pairs]
    worst = float(torch.cat(cosines).quantile(0.01))
    return Finding(question, worst >= SAME, f"cosine {worst:.4f} for 1% of the tokens, {SAME} wanted", look_at)


def _damage(store: FeatureStore, taps: tuple[int, ...]) -> str | None:
    """What no target can have given, in the first dialogue that has any of it; None if none has."""
    vocab = store.manifest.vocab_size
    for index, dialogue in enumerate(store):
        ids = dialogue.input_ids
        unknown = ids[(ids < 0) | (ids >= vocab)]
        if len(unknown):
            return f"dialogue {index} has token id {int(unknown[0])}, the target's are 0 to {vocab - 1}"
        for name, states in (("features", dialogue.features), *((f"tap_{k}", dialogue.taps[k]) for k in taps)):
            bad = int((~states.float().isfinite().all(-1)).sum())
            if bad:
                return f"dialogue {index} has {name} that are NaN or infinite at {bad} of {len(ids)} tokens"
    return None


@torch.no_grad()
def excess_loss(run: TrainRun, batches: list[Batch]) -> float:
    """The mean loss over trained tokens above its floor, which is that of a drafter equal to the target."""
    task, module = run.task, run.engine.module
    module.eval()
    above = count = 0.0
    for packed in batches:
        rows = task.rows(packed).to(run.engine.device)
        batch = packed.to(run.engine.device, run.config.dtype)
        predicted, target = task.pairs(module, batch, rows)
        above += float(task.losses(predicted, target)["loss"] - task.floor(target))
        count += len(rows)
    module.train()
    return above / count


@torch.no_grad()
def acceptance(run: TrainRun, batches: list[Batch]) -> dict[str, float]:
    """Mean of sum_x min(p, q), the acceptance rate of sampled drafting, for first, last and other answer tokens.

    Token t of an answer is predicted at index t - ``task.ahead``, and should be what the target's feature t - 1 says.
    (The rate of greedy drafting would hang on ties, which a target of flat distributions has many of.)
    """
    task, module = run.task, run.engine.module
    module.eval()
    shared: dict[str, list[float]] = {kind: [] for kind in DESCRIPTION}
    for packed in batches:
        batch = packed.to(run.engine.device, run.config.dtype)
        predicted = task.predict(module, batch)[0]
        place = answer_positions(batch.loss_mask, batch.segments)[0]
        last = batch.loss_mask[0] & ~batch.shifted(batch.loss_mask, 1)[0] & (place > 0)
        t = place[task.earliest :].ge(0).nonzero()[:, 0] + task.earliest
        overlap = task.overlap(predicted[t - task.ahead], batch.features[0, t - 1])
        for kind, chosen in (("first", place == 0), ("last", last), ("others", (place > 0) & ~last)):
            shared[kind] += overlap[chosen[t]].tolist()
    module.train()
    return {kind: sum(values) / len(values) for kind, values in shared.items() if values}


def _judge_loss(before: float, after: float) -> Finding:
    left = after / before if before > 0 else 0.0
    answer = f"{before:.3f} before, {after:.3f} after ({left:.0%} left, at most {FALLEN:.0%} wanted)"
    advice = "steps= and learning_rate= first (more, higher); then the gradients, the loss, and its targets' alignment"
    sound = math.isfinite(before) and left <= FALLEN
    return Finding("the loss falls to its floor", sound, answer, advice)


def _judge_acceptance(shares: dict[str, float]) -> Finding:
    poor = [kind for kind, share in shares.items() if share < KNOWN]
    answer = ", ".join(f"{DESCRIPTION[kind]} {share:.0%}" for kind, share in shares.items())
    if poor and "others" not in poor:
        advice = "the loss mask or its shift: tokens at the edge of answers are not trained"
    else:
        advice = "the alignment of features, tokens and targets: what is trained is not what is drafted"
    return Finding("every answer token would be accepted", not poor, f"{answer} ({KNOWN:.0%} wanted)", advice)
