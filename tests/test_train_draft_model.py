"""train/draft_model.py: its divergences, what it starts from and leaves behind, LoRA; the loop is tested with EAGLE."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drafters import TargetModel, generate, make_drafter
from drafters.drafting.draft_model import load_draft_model
from train.core import losses
from train.core.losses import Pairs, divergence_sum
from train.draft.export import with_weights
from train.run.files import read_metrics
from train.run.inputs import open_inputs

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "draft"
    tiny.build("llama", seed=1, **SMALL).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(folder: Path, draft: Path, tmp_path: Path) -> dict[str, Any]:
    target, features = str(folder / "target"), folder / "features"
    return tiny_run.settings(target, features, tmp_path / "run", draft_model=str(draft))


def divergence(name: str, beta: float) -> Any:
    return partial(losses.jsd, beta=beta) if name == "jsd" else getattr(losses, name)


def by_hand(name: str, p: Tensor, q: Tensor, beta: float) -> Tensor:
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    m = beta * p + (1 - beta) * q
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m),
        "total_variation": 0.5 * (p - q).abs().sum(-1),
    }[name]


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "total_variation"])
def test_divergences_and_their_gradients(name: str) -> None:
    """A formula with p and q or beta exchanged, a gradient that is another divergence's, a chunk or head left out."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 11, bias=False, dtype=torch.double), nn.Linear(7, 11, bias=False, dtype=torch.double)
    predicted = torch.randn(9, 5, dtype=torch.double, requires_grad=True)
    target = torch.randn(9, 7, dtype=torch.double)
    pairs = Pairs(predicted[None], target)
    (total,) = divergence_sum(pairs, theirs, divergence(name, 0.2), None, 4, [ours.weight])
    p, q = theirs(target).softmax(-1).detach(), ours(predicted).softmax(-1)
    expected = by_hand(name, p, q, 0.2).sum()
    torch.testing.assert_close(total, expected)
    wanted = [predicted, ours.weight]
    both = zip(torch.autograd.grad(3 * total, wanted), torch.autograd.grad(3 * expected, wanted), strict=True)
    for found, reference in both:
        assert reference.abs().max() > 0.01
        torch.testing.assert_close(found, reference)


def test_divergences_worked_by_hand() -> None:
    """The formulas of DistillSpec at p = (1/2, 1/2), q = (3/4, 1/4); softmax's zeros, where a logarithm is infinite."""
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.75, 0.25]])
    # m = (5/8, 3/8) at beta = 1/2; logarithms by hand
    values = {"forward_kl": 0.143841, "reverse_kl": 0.130812, "jsd": 0.033822, "total_variation": 0.25}
    for name, value in values.items():
        assert divergence(name, 0.5)(p, q.log()).item() == pytest.approx(value, abs=1e-5), name
        for certain in (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])):
            logits = torch.tensor([[0.0, -200.0]], requires_grad=True)
            total = divergence(name, 0.5)(certain, logits.log_softmax(-1)).sum()
            total.backward()
            assert total.isfinite() and logits.grad.isfinite().all(), name


def test_training_starts_from_the_draft_model(settings: dict[str, Any], draft: Path, target: TargetModel) -> None:
    """Random weights instead of the draft model's, an LM head that is not trained or not saved, a folder that
    transformers or a drafter does not load."""
    out = Path(settings["out"])
    tau = {"tau_every": 40, "tau_prompts": 1, "tau_new_tokens": 4}
    tiny_run.train_here("draft_model", settings | {"steps": 40, "precision": "bf16"} | tau)
    rows = read_metrics(out)
    course = [row["heldout_loss"] for row in rows if "heldout_loss" in row]
    assert course[-1] < 0.8 * course[0]
    assert rows[0]["heldout_loss"] == pytest.approx(forward_kl(draft, settings), rel=2e-2)
    assert forward_kl(out, settings) == pytest.approx(course[-1], rel=2e-2)  # the export is in bf16
    assert "heldout_tau" in rows[-2]
    head = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in head and head["model.embed_tokens.weight"].dtype == torch.bfloat16
    info = json.loads((out / "training.json").read_text())
    assert info["training"]["steps"] == 40 and info["target"]["fingerprint"] == target.fingerprint()
    assert not any(
        str(out.parent) in (out / name).read_text() for name in ("training.json", "README.md", "config.json")
    )
    drafter = make_drafter("speculative", target, draft_model=str(out), gamma=2)
    assert generate(target, drafter, [[5, 6, 7]], max_new_tokens=4).tokens[0].numel() == 4


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_lm_head_of_its_own_is_trained(settings: dict[str, Any], tmp_path: Path, precision: str, stage: int) -> None:
    """Catches an LM head whose gradient DeepSpeed does not take up, since the loss multiplies with it elsewhere."""
    model = tiny.build("llama", seed=1, **SMALL | {"tie_word_embeddings": False})
    model.save_pretrained(tmp_path / "untied")
    changes = {"draft_model": str(tmp_path / "untied"), "steps": 2, "precision": precision, "zero_stage": stage}
    tiny_run.train_here("draft_model", settings | changes)
    state = load_file(Path(settings["out"]) / "state" / "step-00000002" / "weights.safetensors")
    moments = load_file(Path(settings["out"]) / "state" / "step-00000002" / "exp_avg.safetensors")
    moved = (state["model.lm_head.weight"] - model.lm_head.weight.bfloat16().float()).abs()
    assert moved.mean() > 1e-3 and moments["model.lm_head.weight"].abs().max() > 0


@torch.no_grad()
def forward_kl(folder: Path, settings: dict[str, Any]) -> float:
    """Of the model in ``folder`` on the held-out answers, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = open_inputs(tiny_run.read("draft_model", settings))
    total, count = 0.0, 0
    for dialogue in inputs.heldout:
        log_q = model(dialogue.input_ids[None]).logits[0].log_softmax(-1)
        p = inputs.ends.lm_head(dialogue.features.to(inputs.ends.lm_head.weight.dtype)).float().softmax(-1)
        rows = dialogue.loss_mask[1:].nonzero()[:, 0]
        total += float((p * (p.log() - log_q)).sum(-1)[rows].sum())
        count += len(rows)
    return total / count


def test_lora_leaves_an_adapter_that_merges(settings: dict[str, Any], draft: Path, target: TargetModel) -> None:
    """An adapter of untrained matrices, one that peft or a drafter does not load, a merge with another scale; the draft
    model itself trained or saved; a finished run that is not seen as one; peft's card, whose header gives a folder as a
    model of the Hub."""
    from peft import PeftModel

    from train.run.training import finished_at

    out, lora = Path(settings["out"]), {"r": 4, "alpha": 12}
    run = tiny_run.train_here("draft_model", settings | {"steps": 30, "lora": lora})
    course = [row["heldout_loss"] for row in read_metrics(out) if "heldout_loss" in row]
    assert course[-1] < 0.95 * course[0]
    state = load_file(out / "state" / "step-00000030" / "weights.safetensors")
    assert state and all("lora_" in name for name in state)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in out.iterdir()}
    assert not (out / "model.safetensors").exists()
    card = (out / "README.md").read_text()
    assert f"`{draft.name}`, aligned with that target" in card and str(draft) not in card and "base_model" not in card
    assert "library_name: peft" in card
    assert finished_at(run.config, run.inputs.train) == 30
    ids = torch.arange(3, 23)[None]
    unmerged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32), str(out))
    expected = unmerged(ids).logits
    merged = load_draft_model(target, str(out))
    found = merged.lm_head(merged.features(ids).features)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = {name: value.detach().clone() for name, value in run.task.module.state_dict().items()}
    ours = with_weights(run.config, weights)
    whole = ours.merged()
    torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "adapter of type 'IA3', and only LORA is merged"),
        ({"use_dora": True}, "adapter with use_dora, and only plain LoRA"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None; set it"),
        ({"r": 2}, "does not fit the base model .* weights are missing, unknown or of another shape"),
        ({"megatron_config": {"a": 1}, "megatron_core": "trap"}, None),
    ],
)
def test_adapters_that_are_no_plain_lora(
    change: dict[str, Any], message: str | None, draft: Path, target: TargetModel, tmp_path: Path
) -> None:
    """An adapter merged as what it is not, a module of a stranger's choice imported, a pickled adapter opened."""
    import peft

    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(draft), peft.LoraConfig(r=4, base_model_name_or_path=str(draft))
    )
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(draft)} | change))
    if message is None:
        load_draft_model(target, str(tmp_path / "a"))
        (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
        message = "has no adapter_model.safetensors; save the adapter again, as safetensors"
    with pytest.raises(ValueError, match=message):
        load_draft_model(target, str(tmp_path / "a"))


def test_killed_and_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    """Weights taken from the draft model again after a kill; LoRA's without the model beneath."""
    values = settings | {"lora": {"r": 2}, "steps": 8, "save_every": 3}
    tiny_run.train_here("draft_model", values | {"out": str(tmp_path / "reference")})
    tiny_run.killed_and_resumed([{"kind": "draft_model", "values": values, "point": "named:2"}], tmp_path)
    runs = Path(settings["out"]), tmp_path / "reference"
    ours, theirs = (
        [{k: v for k, v in row.items() if k not in tiny_run.TIMED} for row in read_metrics(run)] for run in runs
    )
    assert ours == theirs
    one, other = (load_file(run / "adapter_model.safetensors") for run in runs)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in other)


def test_what_does_not_fit_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """A draft model of another vocabulary, or with a window that packed dialogues would not keep."""
    for family, changes, message in (
        ("llama", {"vocab_size": 101}, "has a vocabulary of 101 tokens and target .* one of 97"),
        ("mistral-sliding", {}, "has layers with a sliding window"),
    ):
        tiny.build(family, **changes).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match=message):
            tiny_run.train_here("draft_model", settings | {"draft_model": str(tmp_path / "other")})
        shutil.rmtree(tmp_path / "other")
