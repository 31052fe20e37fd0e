"""Medusa-2 (``joint:`` of train/medusa.py): its loss, whose learning rate is whose, what it leaves behind."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from conformance import plain_greedy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data_prep.store.reader import FeatureStore
from drafters import TargetModel, generate, load_drafter
from drafters.common.machine import environment
from drafters.hub.model_card import model_card
from drafters.methods.medusa import MedusaDrafter
from drafters.model.ends import FrozenEnds
from eval.report.tables import target_line
from train.core.losses import Pairs
from train.core.task import make_task
from train.data.packing import collate
from train.draft.joint import JointModule
from train.medusa import JointTask
from train.run.files import read_metrics
from train.run.training import farewell, finished_at

HEADS = 3
LORA = {"r": 4, "alpha": 8}


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    joint = {"lora": LORA, "heads_first": 2, "rate": 0.5}
    return tiny_run.settings(target.name, features, tmp_path / "run", heads=HEADS, joint=joint)


def fields(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return settings | {"joint": settings["joint"] | changes}


@pytest.mark.parametrize("labels", ["target", "tokens"])
def test_the_loss_is_the_papers(settings: dict[str, Any], store: FeatureStore, ends: FrozenEnds, labels: str) -> None:
    """lambda_0 left out or on the target's own loss, heads on the features as they were, a target that learns the token
    after the next one, dialogues of a pack that see each other."""
    config = tiny_run.read("medusa", fields(settings, lora=None, lambda_0=0.3) | {"labels": labels})
    task = make_task(config, ends)
    assert isinstance(task, JointTask)
    task.load()
    for name, weights in task.module.named_parameters():
        noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(len(name)))
        weights.data += 0.1 * noise * weights.requires_grad
    ours = TargetModel(copy.deepcopy(task.module.target.base), name="tuned")
    batch = collate(store, [3, 0, 1], ())
    found = tiny_run.losses_of(task, batch, 1)
    own, each, count = 0.0, [0.0] * HEADS, 0
    for index in (3, 0, 1):
        item = store[index]
        now = ours.features(item.input_ids[None]).features[0].detach()
        states = task.module.heads(now).detach()
        for t in (t for t in item.loss_mask.nonzero()[:, 0].tolist() if t >= HEADS + 1):
            p = ends.lm_head(item.features[t - 1]).softmax(-1)
            p = p if labels == "target" else torch.eye(len(p))[item.input_ids[t]]
            own -= float((p * ends.lm_head(now[t - 1]).log_softmax(-1)).sum())
            for k in range(1, HEADS + 1):
                each[k - 1] -= float((p * ends.lm_head(states[t - k - 1, k - 1]).log_softmax(-1)).sum())
            count += 1
    assert count == len(task.rows(batch)) > 10
    expected = own + 0.3 * sum(0.8**k * loss for k, loss in enumerate(each, 1))
    assert float(found["target_loss"]) == pytest.approx(own, rel=1e-4)
    assert [float(found[f"head_{k}_loss"]) for k in range(1, HEADS + 1)] == pytest.approx(each, rel=1e-4)
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-4)
    found["loss"].backward()
    still = {name for name, weights in task.module.named_parameters() if weights.grad is None}
    assert still and all("embed_tokens" in name or "lm_head" in name for name in still)


def test_acceptance_is_by_the_target_as_it_is_now(
    settings: dict[str, Any], store: FeatureStore, ends: FrozenEnds
) -> None:
    """Heads judged by the target as it was, and the target's own agreement with what it was under a head's name."""
    task = make_task(tiny_run.read("medusa", settings), ends)
    batch = collate(store, [3], ())
    target = torch.randn(6, ends.lm_head.in_features, generator=torch.Generator().manual_seed(0))
    pairs = Pairs(torch.stack([-target, -target, target, -target]), target)  # the target now, and three heads
    figures = task.heldout(task.module, batch, pairs)
    shares = {name: float(ratio.total / ratio.count) for name, ratio in figures.items() if name.endswith("top1")}
    assert shares == {"head_1_top1": 1, "head_2_top1": 0, "head_3_top1": 1, "target_top1": 0}
    assert task.heads.compare(task.judged(pairs))[1][0].all()


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Medusa-2 by LoRA."""
    out = tmp_path_factory.mktemp("joint") / "run"
    values = tiny_run.settings(str(folder / "target"), folder / "features", out, heads=HEADS, steps=40)
    values |= {"tau_every": 40, "tau_prompts": 2, "tau_new_tokens": 8, "joint": {"lora": LORA, "heads_first": 10}}
    run = tiny_run.train_here("medusa", values)
    assert finished_at(run.config, run.inputs.train) == 40
    assert f"target.path={out / 'target'}" in farewell(run.config, 40, run.inputs.heldout, run.inputs.ends)
    return out


def test_it_learns_and_leaves_another_target(trained: Path, target: TargetModel) -> None:
    """Heads or LoRA without a gradient, a merged model that is not what LoRA says, one that transformers does not load
    or that passes for the old one, heads that load beside the wrong target, figures of the target as it was."""
    from peft import PeftModel

    rows = read_metrics(trained)
    course = [row["heldout_head_1_loss"] for row in rows if "heldout_head_1_loss" in row]
    assert course[-1] < 0.98 * course[0]
    assert rows[0]["heldout_target_top1"] == 1 and "heldout_tau_tree" in rows[-2]
    tuned = TargetModel.from_pretrained(str(trained / "target"), "float32")
    ids = torch.arange(3, 23)[None]
    plain = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32)
    before = plain(ids).logits
    expected = PeftModel.from_pretrained(plain, str(trained / "adapter"))(ids).logits
    torch.testing.assert_close(tuned.lm_head(tuned.features(ids).features), expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 1e-3
    assert tuned.config.tuned_from == {"name": "target", "fingerprint": target.fingerprint()}
    assert "another model than `target`" in (trained / "target" / "README.md").read_text()
    assert "; tuned from target, another model" in target_line(environment(tuned))
    assert environment(target)["target"].keys() == environment(tuned)["target"].keys() - {"tuned_from"}
    drafter = load_drafter(str(trained), tuned)
    assert isinstance(drafter, MedusaDrafter) and len(drafter.module) == HEADS
    assert drafter.provenance["training"]["tuned_from"]["fingerprint"] == target.fingerprint()
    assert "tuned from `target` together with these heads" in model_card(drafter.provenance, "user/heads", 1)
    result = generate(tuned, drafter, [[5, 6, 7]], max_new_tokens=12, eos_token_id=[])
    assert result.tokens[0].tolist() == plain_greedy(tuned, [5, 6, 7], 12)
    with pytest.raises(ValueError, match=f"trained for '{trained}/target', not for .*other weights"):
        load_drafter(str(trained), target)
    load_drafter(str(trained), TargetModel.from_pretrained(str(trained / "adapter"), "float32"))


def test_the_target_waits_and_then_has_a_rate_of_its_own(settings: dict[str, Any]) -> None:
    """A target that moves while the heads are new, or at the heads' rate; factors given to other parts."""
    run = tiny_run.train_here("medusa", fields(settings, heads_first=4) | {"steps": 4, "save_every": 4})
    state = load_file(run.config.out / "state" / "step-00000004" / "weights.safetensors")
    moved = {name: value for name, value in state.items() if "lora_B" in name}
    assert moved and not any(value.any() for value in moved.values())
    assert any(value.any() for name, value in state.items() if name.startswith("heads."))
    task = run.task
    assert isinstance(task, JointTask) and isinstance(task.module, JointModule)
    assert [task.rate_factors(step)["target."] for step in (0, 3, 4, 5, 9)] == [0, 0, 0.25, 0.5, 0.5]
    optimizer: Any = run.engine._engine.optimizer
    names = {id(weights): name for name, weights in task.module.named_parameters()}
    rates = {names[id(w)].split(".")[0]: group["lr"] for group in optimizer.param_groups for w in group["params"]}
    assert rates == {"target": 0.0, "heads": pytest.approx(0.005)}  # half of the cosine is over


def test_killed_and_resumed_equals_uninterrupted(settings: dict[str, Any], tmp_path: Path) -> None:
    """LoRA without the target beneath, moments of another part, dropout of another step, warm-up begun again."""
    lora = LORA | {"dropout": 0.2}
    values = fields(settings, lora=lora) | {"steps": 8, "save_every": 3, "precision": "float32"}
    tiny_run.train_here("medusa", values | {"out": str(tmp_path / "reference")})
    tiny_run.killed_and_resumed([{"kind": "medusa", "values": values, "point": "named:2"}], tmp_path)
    runs = Path(settings["out"]), tmp_path / "reference"
    ours, theirs = (
        [{k: v for k, v in row.items() if k not in tiny_run.TIMED} for row in read_metrics(run)] for run in runs
    )
    assert [one.keys() for one in ours] == [other.keys() for other in theirs]
    # Up to rounding: a product's last bit may hang on where in memory a process has its tensors, and in bf16 a few
    # steps make percents of that. Losses alone: of rates over a few tokens one is a large part.
    losses = [[{k: v for k, v in row.items() if "loss" in k or k == "step"} for row in rows] for rows in (ours, theirs)]
    assert all(one == pytest.approx(other, rel=0.02, abs=0.02) for one, other in zip(*losses, strict=True))
    for file in ("model.safetensors", "target/model.safetensors"):
        one, other = (load_file(run / file) for run in runs)
        assert one.keys() == other.keys()
        assert all(
            float((one[key].float() - other[key].float()).norm()) <= 0.01 * float(other[key].norm()) for key in one
        )


def test_whole_targets_are_tuned_too(settings: dict[str, Any], target: TargetModel, features: Path) -> None:
    """Layers that stay as they are, an embedding or LM head that does not, heads that are initialised again."""
    first = tiny_run.settings(target.name, features, Path(settings["out"]).with_name("first"), heads=HEADS, steps=3)
    tiny_run.train_here("medusa", first)
    changes = {"init_from": first["out"], "steps": 1, "learning_rate": 1e-6, "weight_average": 0.5}
    run = tiny_run.train_here("medusa", fields(settings, lora=None, heads_first=0) | changes)
    heads, given = (load_file(Path(each) / "model.safetensors") for each in (run.config.out, first["out"]))
    assert all(torch.allclose(heads[name].float(), given[name].float(), atol=1e-3) for name in given)
    before, after = (load_file(Path(each) / "model.safetensors") for each in (target.name, run.config.out / "target"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "embed_tokens" in name or "lm_head" in name}
    assert not (run.config.out / "adapter").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"own_lm_heads": True}, "own_lm_heads is True, and joint tunes the whole target"),
        ({"lora": LORA, "init_from": "x"}, r"lora is .*by joint\.lora"),
        ({"loss_vocab": 9}, "loss_vocab is 9, .* whole target"),
        ({"classification_loss": "lk_alpha"}, "needs classification_loss: cross_entropy, found lk_alpha"),
        ({"zero_stage": 3}, "zero_stage is 3"),
    ],
)
def test_what_does_not_go_with_it(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """A run of hours whose target loses its vocabulary or its LM head."""
    with pytest.raises(ValueError, match=message):
        tiny_run.read("medusa", settings | changes)


@pytest.mark.parametrize(("targets", "message"), [(["o_proj", "lm_head"], "LM head stay")])
def test_lora_where_it_may_not_be(settings: dict[str, Any], ends: FrozenEnds, targets: list[str], message: str) -> None:
    """A tuned target that passes for the one it was; heads trained through another LM head than they draft through."""
    config = tiny_run.read("medusa", fields(settings, lora=LORA | {"targets": targets}))
    with pytest.raises(ValueError, match=message):
        make_task(config, ends)
