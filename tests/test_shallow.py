"""train/tools/shallow.py: a draft model of some of the target's layers, and training it with its ends left alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafters import TargetModel, generate, make_drafter
from train.configs import DraftModelConfig
from train.core.task import make_task
from train.data.packing import collate
from train.draft.shallow import shallow_config
from train.run.files import read_metrics
from train.tools import shallow

FOUR: dict[str, Any] = {"num_hidden_layers": 4}


def saved(model: PreTrainedModel, folder: Path, **how: Any) -> Path:
    """A model and a tokenizer in ``folder``."""
    model.save_pretrained(folder, **how)
    AutoTokenizer.from_pretrained(tiny_run.ROOT / "checkpoints" / "stdlib-target").save_pretrained(folder)
    return folder


def taken(target: Path, layers: str, out: Path) -> PreTrainedModel:
    shallow.main([str(target), "--layers", layers, "--out", str(out)])
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}], ids=["one file", "many files"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_it_is_the_targets_layers(family: str, tied: bool, how: dict[str, Any], tmp_path: Path) -> None:
    """Catches layers in another order or from another place, ends that are not the target's, a head that is missing."""
    model = tiny.build(family, **FOUR, tie_word_embeddings=tied).eval()
    found = taken(saved(model, tmp_path / "target", **how), "0,2-3", tmp_path / "out").eval()
    body: Any = model.model
    body.layers = nn.ModuleList([body.layers[number] for number in (0, 2, 3)])
    for place, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = 3
    ids = torch.arange(3, 23)[None]
    assert torch.equal(found(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    facts = json.loads((tmp_path / "out" / "shallow.json").read_text())
    assert facts["layers"] == [0, 2, 3] and facts["target"] == str(tmp_path / "target")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("some words")["input_ids"]


def test_what_the_configuration_says_of_each_layer_goes_along(tmp_path: Path) -> None:
    """Catches the first layers' kinds of attention given to others."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = tiny.build("qwen3", **FOUR, layer_types=kinds, sliding_window=8)
    assert taken(saved(model, tmp_path / "target"), "1,2", tmp_path / "out").config.layer_types == kinds[1:3]


def test_as_many_tokens_that_end_answers_as_layers(tmp_path: Path) -> None:
    """Catches any list of that length taken for one of layers."""
    model = tiny.build("llama", **FOUR, eos_token_id=[5, 6, 7, 8])
    assert taken(saved(model, tmp_path / "target"), "1,2", tmp_path / "out").config.eos_token_id == [5, 6, 7, 8]


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}], ids=str)
def test_layers_that_are_what_their_numbers_say(changes: dict[str, Any]) -> None:
    """Catches an expert's weights in a dense layer: transformers draws new ones where names do not fit."""
    config = CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=4, **changes)
    with pytest.raises(ValueError, match="its layers are dense or mixtures of experts by their numbers"):
        shallow_config(config, [0, 1], "it")


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Of a run whose ends are left alone, with a loss over 40 of the 97 tokens."""
    target = folder / "target"
    tiny.build("llama", seed=1, num_hidden_layers=1, hidden_size=32).save_pretrained(tmp_path / "draft")
    changes = {"draft_model": str(tmp_path / "draft"), "freeze_ends": True, "loss_vocab": 40}
    return tiny_run.settings(str(target), folder / "features", tmp_path / "run", **changes)


@pytest.mark.parametrize("divergence", ["forward_kl", "tokens"])
def test_the_loss_is_over_some_tokens_alone(settings: dict[str, Any], ends: Any, store: Any, divergence: str) -> None:
    """Catches another token's logit, a text's token taken for its place, or the whole vocabulary in one of the two."""
    task = make_task(tiny_run.read("draft_model", settings | {"divergence": divergence}), ends)
    ids = task.heads.ids = torch.randperm(97, generator=torch.Generator().manual_seed(0))[:40].sort().values.int()
    batch = collate(store, [3, 0, 1])
    rows = task.rows(batch)
    loss = tiny_run.losses_of(task, batch, 1)["loss"]
    logits = task.module.lm_head(task.predict(task.module, batch)).flatten(0, 1)[rows][:, ids]
    if divergence == "tokens":
        tokens = batch.input_ids.flatten()[rows + 1]
        there = torch.isin(tokens, ids)
        places = torch.searchsorted(ids, tokens[there].int())
        expected = F.cross_entropy(logits[there], places, reduction="sum")
        assert 0 < there.sum() < len(there)
    else:
        p = ends.lm_head(batch.features.flatten(0, 1)[rows])[:, ids].softmax(-1)
        expected = F.kl_div(logits.log_softmax(-1), p, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert all((weights.grad is None) == (not weights.requires_grad) for weights in task.module.parameters())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_layers_learn_and_ends_stay(
    settings: dict[str, Any], target: TargetModel, precision: str, tmp_path: Path
) -> None:
    """Catches ends that are trained, an export without them, a run that does not learn, or one that drafts nothing."""
    out = Path(settings["out"])
    tiny_run.train_here("draft_model", settings | {"steps": 40, "precision": precision})
    course = [row["heldout_loss"] for row in read_metrics(out) if "heldout_loss" in row]
    assert course[-1] < 0.9 * course[0]
    before, after = (load_file(run / "model.safetensors") for run in (tmp_path / "draft", out))
    same = {name for name in before if torch.equal(before[name].bfloat16(), after[name])}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"} & before.keys()
    drafter = make_drafter("speculative", target, draft_model=str(out), gamma=2)
    assert generate(target, drafter, [[5, 6, 7]], max_new_tokens=4).tokens[0].numel() == 4


def test_killed_and_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches ends that are lost with a process: a state has what is trained alone."""
    values = settings | {"steps": 8, "save_every": 3}
    tiny_run.train_here("draft_model", values | {"out": str(tmp_path / "reference")})
    tiny_run.killed_and_resumed([{"kind": "draft_model", "values": values, "point": "named:1"}], tmp_path)
    one, other = (load_file(run / "model.safetensors") for run in (Path(settings["out"]), tmp_path / "reference"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in other)


def test_whose_tokens_the_loss_can_leave_out(settings: dict[str, Any]) -> None:
    """Catches an LM head trained on some of its tokens, whose others would be left behind."""
    tiny_run.read("draft_model", settings | {"freeze_ends": False, "lora": {"r": 4}})
    with pytest.raises(ValueError, match="set freeze_ends=true"):
        tiny_run.read("draft_model", settings | {"freeze_ends": False})
    assert not DraftModelConfig.model_validate(settings | {"loss_vocab": None}).trains_lm_head
