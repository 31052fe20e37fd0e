"""The steps of train.tools.boost: train each draft model in a process of its own, then measure what they cover."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drafters.cli.program import Failure
from drafters.common.files import replace_json
from drafters.common.machine import measured_on
from drafters.model.files import resolve_device
from drafters.model.target import TargetModel
from train.configs import BoostConfig, DraftModelConfig
from train.core.lm_heads import LMHeads
from train.core.runtime import dtype_of
from train.data.packing import collate
from train.draft.coverage import covered_rows, right_rows
from train.run.files import StateFolder
from train.run.inputs import open_inputs
from train.watch.heldout import first_dialogues

SCRIPT = Path(__file__).resolve().parents[1] / "draft_model.py"


def boost(config: BoostConfig, run: DraftModelConfig) -> None:
    """Train the models that are not trained yet, then print and write the coverage."""
    lists = {"boosted": [str(config.out / "1")]} | ({"seeds": [str(config.out / "1")]} if config.seeds else {})
    train(config, 0, config.out / "1", None)
    for number in range(1, len(config.draft_models)):
        for name, members in lists.items():
            out = config.out / f"{name.removesuffix('s')}-{number + 1}"
            after = {"after": members, "length": config.length, "keep": config.keep}
            train(config, number, out, after if name == "boosted" else None)
            members.append(str(out))
    shares = coverage(run, lists | {"as they were": config.draft_models}, config.length)
    result = {"config": config.model_dump(mode="json"), "run": run.model_dump(mode="json"), "coverage": shares}
    replace_json(config.out / "coverage.json", result | {"environment": measured_on(resolve_device())})
    most = max(map(len, shares.values()))
    print(f"{f'covered, {config.length} tokens a speculation':<34}" + "".join(f"{n:>9}" for n in range(1, most + 1)))
    for name, each in shares.items():
        print(f"{name:<34}" + "".join(f"{share:>9.2%}" for share in each))
    print(f"draft_models: {json.dumps(lists['boosted'])}")


def train(config: BoostConfig, number: int, out: Path, boost: dict[str, Any] | None) -> None:
    """Run one training in its own process, or continue it; raise Failure if it fails."""
    values = {"draft_model": config.draft_models[number], "out": str(out), "seed": number, "boost": json.dumps(boost)}
    resume = ["--resume"] if StateFolder(out).latest() else []
    overrides = [f"{key}={value}" for key, value in values.items()]
    line = [sys.executable, str(SCRIPT), "--config", str(config.run), *resume, *overrides]
    if status := subprocess.run(line, check=False).returncode:
        raise Failure(f"the training in {out} ended with status {status}: see above; start again to continue")


@torch.no_grad()
def coverage(run: DraftModelConfig, lists: Mapping[str, list[str]], length: int) -> dict[str, list[float]]:
    """By list, the share of held-out rows that any of its first 1 to n draft models covers."""
    inputs, device = open_inputs(run), resolve_device()
    inputs.ends.to(device)
    heads = LMHeads(run, inputs.ends.lm_head)
    names = list(dict.fromkeys(name for names in lists.values() for name in names))
    models = {name: TargetModel.from_pretrained(name, dtype_of(run), device, engine="stock") for name in names}
    totals = {name: [0] * len(names) for name, names in lists.items()}
    rows = 0
    for index in first_dialogues(inputs.heldout, run.heldout_tokens):
        batch = collate(inputs.heldout, [index])
        answers = batch.shifted(batch.loss_mask, 1)
        rows += int(answers.sum())
        covered = {name: covered_rows(right_rows(model, batch, heads), batch, length) for name, model in models.items()}
        for name, members in lists.items():
            union = torch.zeros_like(answers)
            for place, member in enumerate(members):
                union |= covered[member]
                totals[name][place] += int((union & answers).sum())
    return {name: [total / rows for total in counts] for name, counts in totals.items()}
