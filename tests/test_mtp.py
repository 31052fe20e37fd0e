"""MTP: drafts equal the layer from its description, training is exact."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import conformance
import families
import pytest
import tiny_run
import torch
import torch.nn.functional as F
from by_keys import new_head
from conformance import NO_EOS, plain_greedy, prompt, target_of
from mtp_layers import mtp, with_layer
from programs import status
from rigged import goes_by
from torch import Tensor

import eval.parity
from drafters import TargetModel, generate
from drafters.heads.mtp.shape import MTPShape
from drafters.loop.state import DecodeState
from eval.measure.mistakes import declared
from train.core.task import make_task
from train.data.packing import collate
from train.data.regression import add_nothing, affine
from train.preflight.dry_run import dry_run
from train.run.files import read_metrics
from train.run.inputs import open_inputs

KINDS = ("qwen", "mimo", "deepseek")


def rms(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden * (hidden.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def described(drafter: Any, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer of a Llama feeds back, and what enters the LM head, ``[n, H]`` each, by its description."""
    weights, config, shape = drafter.module.state_dict(), drafter.module.config, drafter.module.shape
    heads, width = config.num_attention_heads, config.head_dim
    groups = heads // config.num_key_value_heads
    if shape.kind != "qwen":
        embeddings = torch.cat([torch.zeros(1, config.hidden_size), embeddings[1:]])
    parts = [
        rms(embeddings, weights["embed_norm.weight"], config.rms_norm_eps),
        rms(features, weights["hidden_norm.weight"], config.rms_norm_eps),
    ]
    hidden = torch.cat(parts[::-1] if shape.kind == "mimo" else parts, dim=-1) @ weights["fc.weight"].T
    normed = rms(hidden, weights["layers.0.input_layernorm.weight"], config.rms_norm_eps)
    q, k, v = (
        (normed @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(hidden), -1, width).transpose(0, 1)
        for name in "qkv"
    )
    angles = torch.arange(len(hidden))[:, None] / 10000.0 ** (torch.arange(0, width, 2) / width)
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    q, k, v = turned(q), turned(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    hidden = hidden + mixed.transpose(0, 1).flatten(1) @ weights["layers.0.self_attn.o_proj.weight"].T
    normed = rms(hidden, weights["layers.0.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up, down = (weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    hidden = hidden + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    normed = rms(hidden, weights["norm.weight"], config.rms_norm_eps)
    return (hidden if shape.kind == "deepseek" else normed), normed


@pytest.mark.parametrize("keys", [*({"kind": kind} for kind in KINDS), {"state": 4}], ids=str)
def test_drafts_equal_the_layer_from_scratch(keys: dict[str, Any]) -> None:
    """Catches inputs in the wrong order, a norm that is left out or on the wrong side, a state that is another one, an
    embedding at position 0, a position that is one off, and a rejected token that stays in the cache."""
    target = target_of("llama")
    drafter = mtp(target, "chain", **keys)
    propose, compared = drafter.propose, []

    def checked(state: DecodeState) -> Any:
        draft = propose(state)
        for row, known in enumerate(state.tokens):
            if state.finished[row] or not draft.size:
                continue
            output = target.features(torch.tensor([known[:-1]]), taps=drafter.taps)
            features = (output.taps[4] if drafter.taps else output.features)[0]
            tokens = list(known[1:])
            for slot in range(draft.size):
                back, entering = described(drafter, features, target.embed(torch.tensor(tokens)))
                assert int(target.lm_head(entering[-1]).argmax()) == int(draft.tokens[row, slot])
                tokens.append(int(draft.tokens[row, slot]))
                features = torch.cat([features, back[-1:]])
            compared.append(row)
        return draft

    with mock.patch.object(drafter, "propose", checked):
        generate(target, drafter, [prompt(9), prompt(3, 1)], max_new_tokens=8, eos_token_id=NO_EOS)
    assert compared.count(0) > 4 and compared.count(1) > 4


TestChainAll = conformance.brief(lambda t: mtp(t, "chain", 0.0), accepts="all", families=("llama",))
TestChainSome = conformance.suite(lambda t: mtp(t, "chain", 0.3), accepts="some", families=("llama",))
TestDynamic = conformance.brief(
    lambda t: mtp(t, "dynamic", 0.3, kind="deepseek", nodes=8, top_k=3), accepts="some", families=("llama",)
)
TestOther = conformance.brief(lambda t: mtp(t, "static", kind="mimo"), families=("qwen3", "mistral"))
TestAuto = conformance.brief(lambda t: goes_by(mtp(t, "auto")), families=("llama",))


@pytest.mark.parametrize("name", ["embedding and hidden state swapped", "feedback on the wrong side of the norm"])
def test_a_planted_mistake_changes_drafts(name: str) -> None:
    """Catches a mistake that parity plants, and that changes nothing."""
    target = target_of("llama")
    drafter = mtp(target, "chain", depth=5)
    wrong = next(one for one in declared(MTPShape) if one.name == name).plant(drafter)
    drafts: list[list[Any]] = []
    for each in (drafter, wrong):
        propose, tokens = each.propose, list[Any]()

        def noted(state: DecodeState, propose: Any = propose, tokens: list[Any] = tokens) -> Any:
            draft = propose(state)
            tokens.append(draft.tokens.tolist())
            return draft

        with mock.patch.object(each, "propose", noted):
            generate(target, each, [prompt(9)], max_new_tokens=12, eos_token_id=NO_EOS)
        drafts.append(tokens)
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_is_stored_whole(kind: Any) -> None:
    """Catches a key of another value than its kind's that a checkpoint leaves out, so that it loads with the kind's."""
    for name in ("embedding_first", "feeds_back_normed", "masks_first"):
        for value in (True, False):
            shape = MTPShape(**{"kind": kind, name: value})
            assert MTPShape(**shape.stored()) == shape


# ------------------------------------------------------------------------------------------- training


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", head={"kind": "qwen"}, start="random")


@pytest.mark.parametrize("keys", [{"kind": "qwen"}, {"kind": "deepseek", "state": tiny_run.TAP}], ids=str)
def test_the_loss_is_the_one_of_the_paper(settings: dict[str, Any], keys: dict[str, Any]) -> None:
    """Catches steps about other tokens, a detached feedback, a wrong share of a step, and another state."""
    config = tiny_run.read("mtp", settings | {"precision": "float32", "head": keys})
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    batch = collate(inputs.train, [1, 3], config.taps)
    batch = replace(batch, rows=task.rows(batch))
    found = task.losses(task.pairs(task.module, batch, seed=0))
    found["loss"].backward()
    gradients = {name: weights.grad.clone() for name, weights in task.module.named_parameters()}
    task.module.zero_grad()
    states, expected, count = task.features(batch)[0], torch.zeros(()), 0
    for span in batch.spans:
        for row in (row for row in batch.rows.tolist() if span.start <= row < span.start + span.length):
            truth = inputs.ends.lm_head(batch.features[0, row + 1]).softmax(-1)  # of token row + 2
            for step, share in enumerate((1, 0.6, 0.36)):
                chain = states[span.start : row - step + 1][None]
                for _ in range(step + 1):
                    length = chain.shape[1]
                    tokens = task.ends.embed(batch.input_ids[:, span.start + 1 : span.start + 1 + length])
                    predicted = task.module(chain, tokens, torch.arange(length)[None])[:, -1:]
                    chain = torch.cat([chain, predicted], dim=1)
                q = inputs.ends.lm_head(task.module.scored(predicted))[0]
                expected = expected + share / 1.96 * F.cross_entropy(q, truth[None])
            count += 1
    assert count > 5
    torch.testing.assert_close(found["loss"], expected, rtol=1e-4, atol=1e-4)
    expected.backward()
    for name, weights in task.module.named_parameters():
        torch.testing.assert_close(gradients[name], weights.grad, rtol=1e-3, atol=1e-5)


def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel) -> None:
    """Catches a layer that is trained and not exported, and figures without the chain's steps."""
    _, names, drafter = tiny_run.learned("mtp", settings | {"steps": 40, "learning_rate": 3e-3}, target, below=0.9)
    assert {"step_2_loss", "heldout_step_2_top1", "heldout_0-alpha"} <= names and drafter.name == "mtp"


def test_it_learns_from_the_state_before_the_final_norm(
    settings: dict[str, Any], target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a training that refuses the state after the last layer, one that reads the feature in its place, and
    first weights that are solved for without that state."""
    monkeypatch.setattr(tiny_run, "TAP", target.num_layers)
    stores = tiny_run.write_stores(tmp_path / "stores", target)
    head = {"kind": "deepseek", "state": target.num_layers}
    values = settings | {"features": str(stores), "head": head, "start": "regression", "steps": 40}
    config = tiny_run.read("mtp", values)
    assert not dry_run(config, tiny_run.arguments()).problems
    inputs = open_inputs(config)
    batch = collate(inputs.train, [1], config.taps)
    states = make_task(config, inputs.ends).features(batch)  # type: ignore[attr-defined]
    torch.testing.assert_close(target.body.norm(states), batch.features, rtol=1e-3, atol=1e-4)
    _, _, drafter = tiny_run.learned("mtp", values | {"learning_rate": 3e-3}, target, below=0.95)
    assert drafter.taps == (target.num_layers,)
    with pytest.raises(ValueError, match=f"{target.num_layers + 1} layers, .* choose from 1 to {target.num_layers}"):
        open_inputs(tiny_run.read("mtp", values | {"head": head | {"state": target.num_layers + 1}}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_layer_begins_as_the_best_linear_one(settings: dict[str, Any], kind: str) -> None:
    """Catches inputs in another order than fc reads them, a norm that scales its output otherwise than the target's,
    and a layer that adds something."""
    config = tiny_run.read("mtp", settings | {"precision": "float32", "head": {"kind": kind}, "start": "regression"})
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    task.load()
    before = task.module.norm.weight.clone()
    task.fit(inputs.train)
    assert not torch.equal(before, task.module.norm.weight)
    losses = []
    for scale in (1.0, 0.0, 2.0):  # a norm forgets the size of what it reads, so the scale is that of the second half
        weight = task.module.fc.weight.data.clone()
        task.module.fc.weight.data[:, 48:] *= scale
        batch = collate(inputs.train, [1, 3], config.taps)
        batch = replace(batch, rows=task.rows(batch))
        pairs = task.pairs(task.module, batch, seed=0)
        losses.append(float((pairs.predictions[0] - pairs.targets).detach().pow(2).mean()))
        task.module.fc.weight.data.copy_(weight)
    assert losses[0] < 0.5 * float(pairs.targets.pow(2).mean()) and losses[0] < min(losses[1:])


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "glm4_moe", "starcoder2"])
def test_a_new_layer_adds_nothing(family: str) -> None:
    """Catches experts that add something to what a new layer returns."""
    head = new_head("mtp", families.build(family, families.DECODED[family]).config)
    add_nothing(head)
    hidden, positions = torch.randn(1, 5, 48), torch.arange(5)[None]
    with torch.no_grad():
        out = head.layers[0](
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=head.rotary_emb(hidden, positions),
        )
    torch.testing.assert_close(out, hidden)


def test_a_new_layer_of_a_family_with_layer_norms(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches factors and bias of a LayerNorm that the first weights leave out."""
    families.saved("starcoder2", {}, tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    stores = tiny_run.write_stores(tmp_path / "stores", target)
    settings |= {"target": target.name, "features": str(stores), "start": "regression", "precision": "float32"}
    config = tiny_run.read("mtp", settings)
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    task.fit(inputs.train)
    ones = torch.ones(48)
    factor, bias = affine(task.module.norm, ones)
    values = torch.randn(48)
    values = (values - values.mean()) / values.std(correction=0)
    torch.testing.assert_close(task.module.norm(values), values * factor + bias, atol=1e-3, rtol=1e-3)
    batch = collate(inputs.train, [1, 3], config.taps)
    pairs = task.pairs(task.module, replace(batch, rows=task.rows(batch)), seed=0)
    error = (pairs.predictions[0] - pairs.targets).detach().pow(2).mean()
    assert error < 0.3 * pairs.targets.var(0).mean()


def test_the_first_embedding_is_masked_in_the_fit(settings: dict[str, Any]) -> None:
    """Catches first weights that are fitted to an embedding which the layer never reads."""
    settings |= {"head": {"kind": "mimo"}, "start": "regression", "unroll": 1}
    inputs = open_inputs(config := tiny_run.read("mtp", settings))
    task: Any = make_task(config, inputs.ends)
    read: list[Tensor] = []

    def noted(pairs: Any, noise: Tensor) -> Tensor:
        read.extend(x for x, _ in pairs)
        return torch.zeros(48, 96)

    with mock.patch("train.data.regression.least_squares", noted):
        task.fit(inputs.train)
    assert int((torch.cat(read)[:, 48:] == 0).all(1).sum()) == len(inputs.train.lengths)


def test_later_steps_begin_late(settings: dict[str, Any]) -> None:
    """Catches steps behind the first that are trained from the beginning or never."""
    run = tiny_run.train_here("mtp", settings | {"steps": 4, "warmup_steps": 0, "log_every": 1, "unroll_from": 0.5})
    rows = [row for row in read_metrics(run.config.out) if "loss" in row]
    assert ["step_2_loss" in row for row in rows] == [False, False, True, True]


def test_a_training_begins_with_the_targets_layer(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches new weights where the target has some, a layer of another kind, and weights that a start replaces."""
    head = with_layer(tmp_path / "own", "qwen")
    stores = tiny_run.write_stores(
        tmp_path / "stores", TargetModel.from_pretrained(str(tmp_path / "own"), "float32", "cpu")
    )
    settings |= {"target": str(tmp_path / "own"), "features": str(stores), "start": "target"}
    config = tiny_run.read("mtp", settings)
    task: Any = make_task(config, open_inputs(config).ends)
    task.load()
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in task.module.state_dict().items())
    config = tiny_run.read("mtp", settings | {"head": {"kind": "mimo"}})
    with pytest.raises(
        ValueError, match="head.kind is mimo, but the MTP layers of .* have qwen; set head.kind=qwen, or start=reg"
    ):
        make_task(config, open_inputs(config).ends).load()
    with pytest.raises(ValueError, match="start: regression replaces weights of init_from: runs/other"):
        tiny_run.read("mtp", settings | {"start": "regression", "init_from": "runs/other"})


def test_a_dry_run_finds_the_first_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a dry run of a fine-tuning that cannot start, and one reason once for each program."""
    settings |= {"start": "target"}
    report = dry_run(tiny_run.read("mtp", settings), tiny_run.arguments())
    assert [problem.partition("has no")[2][:10] for problem in report.problems] == [" MTP layer"]
    (served,) = [line for line in report.lines if line.startswith("served by")]
    assert served.count("drafters.stitch") == 1 and "vLLM, SGLang" in served
    with_layer(tmp_path / "own", "qwen", "mixtral")
    stores = tiny_run.write_stores(
        tmp_path / "stores", TargetModel.from_pretrained(str(tmp_path / "own"), "float32", "cpu")
    )
    settings |= {"target": str(tmp_path / "own"), "features": str(stores)}
    report = dry_run(tiny_run.read("mtp", settings), tiny_run.arguments())
    assert not report.problems and "of kind qwen" in report.text()


@pytest.mark.parametrize(
    ("family", "keys"),
    [("llama", {"kind": "qwen"}), ("llama", {"kind": "deepseek", "layers": 2}), ("qwen3_5_text", {"kind": "qwen"})],
)
def test_an_overfit_layer_is_accepted(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    """Catches inputs in decoding that are not those of training, a tau during training that drafts trees on a running
    state, and a parity check that refuses MTP layers or finds another reading of the checkpoint better."""
    families.saved(family, families.DECODED[family] | {"initializer_range": 0.3}, tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    prompts = [prompt(8, seed) for seed in range(8)]
    texts = [torch.tensor([*ids, *plain_greedy(target, ids, 24)]) for ids in prompts]
    stores = tiny_run.write_texts(tmp_path / "stores", target, texts, [torch.arange(32) > 7] * 8)
    steps = {"steps": 250, "learning_rate": 1e-2, "warmup_steps": 5, "start": "random"}
    more = {"head": keys, "unroll": keys.get("layers", 3), "tau_every": 250, "tau_new_tokens": 12, "keep": "best"}
    tiny_run.train_here("mtp", tiny_run.settings(target.name, stores, tmp_path / "run", **steps, **more))
    measured = [row for row in read_metrics(tmp_path / "run") if "heldout_tau" in row][-1]
    assert measured["heldout_tau"] > 2 and ("heldout_tau_tree" in measured) != target.chains_only
    line = ["--checkpoint", str(tmp_path / "run"), "--target", target.name, "--engine", "ours", "threads=1", "depth=2"]
    line += ["target.dtype=float32", "target.device=cpu", "max_new_tokens=24", f"out={tmp_path / 'out'}"]
    with mock.patch("eval.figures.diagnosis.prompts_of", lambda config, drafter: prompts):
        assert status(eval.parity.main, *line) == 0
    readings = json.loads((tmp_path / "out" / "parity.json").read_text())["readings"]
    tau = {one["name"]: one["tau"]["value"] for one in readings}
    assert tau.pop("as loaded") > 2.5  # at most 3
    assert tau.pop("embedding and hidden state swapped") < 1.5
    across = tau.pop("state on the wrong side of the target's final norm")
    assert across < 2.5 or family != "llama"
    assert [*tau] == ["feedback on the wrong side of the norm"]
