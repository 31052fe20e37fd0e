"""--overfit N: train and judge on the same few dialogues. A pipeline that cannot learn them is not sound.

Three questions: are the stored features those of the target for the stored tokens? Does the loss fall to its floor?
Would every answer token then be accepted, including the first and the last? The first and third question do not use
the training's own mask and shifts, so they reveal a mistake there.
"""

import argparse
import math
import shutil
import sys
from copy import copy
from dataclasses import dataclass
from functools import partial
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
from train.core.lm_heads import LMHeads
from train.core.task import make_task
from train.data.packing import Batch, Source, collate, complete
from train.run.inputs import Inputs, open_inputs
from train.run.loop import TrainingDiverged, TrainRun
from train.watch.heldout import answer_positions

STEPS = 400
LEARNING_RATE = 3e-4  # at least: the papers' rates are for far longer runs
FALLEN = 0.2  # largest remaining share of the loss above its floor
KNOWN = 0.9  # least acceptance rate, at every place
SAME = 0.99  # least cosine of a stored feature and the target's own; int8 has 0.9999
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
    """One question's answer, and where to look if it is negative."""

    question: str
    sound: bool
    answer: str
    look_at: str

    def text(self) -> str:
        """One or two lines."""
        mark = "ok  " if self.sound else "FAIL"
        return f"{mark} {self.question}: {self.answer}" + ("" if self.sound else f"\n     look at: {self.look_at}")


def overfit(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """The command; returns 0 if all is sound, else 1. Replaces an earlier run in ``<out>-overfit``."""
    chosen = any(override.partition("=")[0] == "steps" for override in arguments.overrides)
    runtime.check_devices(config)
    config = overfit_config(config, config.steps if chosen and config.steps else STEPS)
    if config.data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"limit": arguments.overfit})})
    inputs = open_inputs(config)
    check_count(config, inputs.train, arguments.overfit)
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


def check_count(config: TrainConfig, train: Source, count: int) -> None:
    """Raise ValueError if the training data has fewer than ``count`` dialogues."""
    if count > len(train):
        there = config.features if config.data is None else config.data.train
        raise ValueError(
            f"--overfit {count:,}: the training data in {there} has {len(train):,} dialogues; give at most that, and "
            f"few, because the drafter must learn them by heart: --overfit {min(8, len(train))}"
        )


def overfit_config(config: TrainConfig, steps: int) -> TrainConfig:
    """The config of the overfit run: no noise, the target's own labels, a constant learning rate after a short warm-up,
    another folder; cross-entropy instead of the total variation, whose gradient is small at first."""
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
        "keep": None,
        "patience": None,
        "weight_average": None,
    }
    # No noise, the original dialogues with all answers, and the target's distributions, which the drafter is judged by.
    plain: dict[str, Any] = {"noise": "none", "labels": "target", "on_policy": None, "boost": None}
    plain |= {"token_weight": 0.0, "target_weight": 1.0}
    if config.classification_loss == "total_variation":
        plain["classification_loss"] = "cross_entropy"
    changes |= {key: value for key, value in plain.items() if key in type(config).model_fields}
    return validate(type(config), {**config.model_dump(), **changes}, source="--overfit")


def clear(out: Path) -> None:
    """Delete an earlier overfit run in ``out``; raise ValueError if it holds something else."""
    if not out.exists() or not any(out.iterdir()):
        return
    known = any((out / name).is_file() for name in ("run.json", RESULT))
    if not out.name.endswith("-overfit") or not known:
        raise ValueError(f"{out} is not empty and holds no overfit run: empty it, or give another out=")
    shutil.rmtree(out)


def run_overfit(config: TrainConfig, inputs: Inputs, ranks: runtime.Ranks, count: int) -> list[Finding]:
    """Train on the first ``count`` dialogues and answer the three questions; the first rank prints each answer.

    Damaged features end it before the training; a diverging training is also a finding. All ranks do the same.

    Raises:
        ValueError: none of the dialogues has a trained token.
    """
    few = FirstDialogues(inputs.train, count) if isinstance(inputs.train, FeatureStore) else inputs.train
    task = make_task(config, inputs.ends)
    batches = [collate(few, [index], config.taps) for index in range(len(few))]
    if not any(len(task.choose(batch).rows) for batch in batches):
        raise ValueError(f"--overfit {count}: none of these dialogues has a trained token; take more of them")
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if ranks.is_first:
            print(finding.text(), flush=True)

    if isinstance(few, FeatureStore) and ranks.is_first:  # online features are the target's own
        add(check_features(config, few))
    unsound = torch.tensor(not all(finding.sound for finding in findings), device=runtime.rank_device())
    if int(ranks.total(unsound.long())):
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
    after = excess_loss(run, batches)
    left = after / before if before > 0 else 0.0
    text = f"{before:.3f} before, {after:.3f} after ({left:.0%} left, at most {FALLEN:.0%} wanted)"
    advice = "steps= and learning_rate= first (more, higher); then the gradients, the loss, and its targets' alignment"
    add(Finding("the loss falls to its floor", math.isfinite(before) and left <= FALLEN, text, advice))
    shares = acceptance(run, batches)
    poor = [kind for kind, share in shares.items() if share < KNOWN]
    text = ", ".join(f"{DESCRIPTION[kind]} {share:.0%}" for kind, share in shares.items())
    advice = "the alignment of features, tokens and targets: what is trained is not what is drafted"
    if poor and "others" not in poor:
        advice = "the loss mask or its shift: tokens at the edge of answers are not trained"
    add(Finding("every answer token would be accepted", not poor, f"{text} ({KNOWN:.0%} wanted)", advice))
    return findings


@torch.no_grad()
def check_features(config: TrainConfig, store: FeatureStore) -> Finding:
    """Run the target over the dialogues and compare by the cosine of the worst token in a hundred.

    Unknown token ids and states that are not finite are reported first, without the target.
    """
    finding = partial(
        Finding,
        "the stored features are the target's own",
        look_at="data_prep.features: the store is damaged, of another target or layer, or its tokens are misplaced; "
        f"python -m data_prep.inspect {store.path} --verify finds damaged files",
    )
    vocab = store.manifest.vocab_size
    for index, dialogue in enumerate(store):
        ids = dialogue.input_ids
        if len(unknown := ids[(ids < 0) | (ids >= vocab)]):
            text = f"dialogue {index} has token id {int(unknown[0])}, the target's are 0 to {vocab - 1}"
            return finding(sound=False, answer=text)
        for name, states in (("features", dialogue.features), *((f"tap_{k}", dialogue.taps[k]) for k in config.taps)):
            if bad := int((~states.float().isfinite().all(-1)).sum()):
                text = f"dialogue {index} has {name} that are NaN or infinite at {bad} of {len(ids)} tokens"
                return finding(sound=False, answer=text)
    try:
        dtype = store.manifest.target_dtype
        target = TargetModel.from_pretrained(config.target, dtype, config.tau_device, config.revision)
    except (ValueError, torch.OutOfMemoryError) as error:
        return finding(sound=True, answer=f"not checked, the target cannot be loaded ({error})")
    cosines: list[Tensor] = []
    for dialogue in store:
        output = target.features(dialogue.input_ids[None].to(target.device), taps=config.taps)
        pairs = [(dialogue.features, output.features), *((dialogue.taps[k], output.taps[k]) for k in config.taps)]
        cosines += [torch.cosine_similarity(a.float(), b[0].float().cpu(), dim=-1) for a, b in pairs]
    worst = float(torch.cat(cosines).quantile(0.01))
    return finding(sound=worst >= SAME, answer=f"cosine {worst:.4f} for 1% of the tokens, {SAME} wanted")


@torch.no_grad()
def excess_loss(run: TrainRun, batches: list[Batch]) -> float:
    """The mean loss over trained tokens above its floor, the loss of a drafter equal to the target."""
    task, module = run.task, run.engine.module
    module.eval()
    above = count = 0.0
    equal = copy(task)  # a drafter equal to the target also has its LM head
    equal.heads = LMHeads(run.config, task.ends.lm_head)
    equal.heads.ids = task.heads.ids
    for packed in batches:
        batch = task.choose(packed).to(run.engine.device, runtime.dtype_of(run.config))
        pairs = task.pairs(module, batch)
        above += float(task.losses(pairs)["loss"] - equal.losses(pairs.perfect())["loss"])
        count += len(batch.rows)
    module.train()
    return above / count


@torch.no_grad()
def acceptance(run: TrainRun, batches: list[Batch]) -> dict[str, float]:
    """Mean of sum_x min(p, q), the acceptance rate of sampled drafting, for first, last and other answer tokens.

    Token t of an answer is predicted at index t - ``task.ahead``, and compared with the target's feature t - 1. (The
    rate of greedy drafting would depend on ties, which are frequent in flat distributions.)
    """
    task, module = run.task, run.engine.module
    module.eval()
    shared: dict[str, list[float]] = {kind: [] for kind in DESCRIPTION}
    for packed in batches:
        batch = packed.to(run.engine.device, runtime.dtype_of(run.config))
        place = answer_positions(batch.loss_mask, batch.segments)[0]
        last = batch.loss_mask[0] & ~batch.shifted(batch.loss_mask, 1)[0] & (place > 0)
        t = place[task.earliest :].ge(0).nonzero()[:, 0] + task.earliest
        overlap = task.heads.compare(task.answers(module, batch, t))[0].mean(0)
        for kind, chosen in (("first", place == 0), ("last", last), ("others", (place > 0) & ~last)):
            shared[kind] += overlap[chosen[t]].tolist()
    module.train()
    return {kind: sum(values) / len(values) for kind, values in shared.items() if values}
