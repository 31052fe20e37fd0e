"""Several MTP layers, and layers with latent attention: drafts equal those of transformers' own MTP modules."""

import itertools
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import conformance
import families
import pytest
import tiny_run
import torch
import torch.nn.functional as F
from conformance import NO_EOS, plain_greedy, prompt, rows_of, target_of
from mtp_layers import mtp, with_layer
from torch import Tensor
from transformers.modeling_layers import MtpModel

from drafters import TargetModel, generate, generate_many, load_drafter, make_drafter
from drafters.heads.mtp.own import load_own
from drafters.hub.checkpoint import load_checkpoint
from drafters.loop.state import DecodeState
from train.core.task import make_task
from train.data.packing import collate
from train.preflight.dry_run import dry_run
from train.run.inputs import open_inputs

NAMED = {"embed_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj", "norm": "post_norm"}


def reference(drafter: Any) -> Any:
    """transformers' modules with the drafter's weights."""
    model, module = drafter.target.model, drafter.module
    model.config.num_mtp_layers = len(module.layers)
    model.config.mtp_mlp_layer_types = ["sparse"] * len(module.layers)
    theirs: Any = MtpModel(model, len(module.layers)).eval()
    theirs.config._attn_implementation = "sdpa"
    for number, (layer, mine) in enumerate(zip(theirs.layers, module.layers, strict=True)):
        layer.mtp_block.load_state_dict(mine.state_dict())
        for name, there in NAMED.items():
            getattr(layer, there).load_state_dict(getattr(module.parts(number), name).state_dict())
        layer.use_post_norm = module.shape.feeds_back_normed
    return theirs


def predictions(theirs: Any, features: Tensor, tokens: list[int], count: int) -> Tensor:
    """Logits ``[V]`` after the last ``count`` of ``tokens``, which are drafted; features ``[1, n, H]``."""
    length, hidden = features.shape[1], features
    for step in range(count + 1):
        ids = torch.tensor([tokens[1 + step : 1 + step + length]])
        positions = torch.arange(1 + step, 1 + step + length)[None]
        hidden = theirs.layers[step](
            theirs.embed_tokens(ids), hidden, theirs.rotary_emb(hidden, positions), None, positions, None
        )
    hidden = hidden if theirs.layers[count].use_post_norm else theirs.layers[count].post_norm(hidden)
    logits: Tensor = theirs.shared_head(hidden)[0, -1]
    return logits


@torch.no_grad()
def compared(drafter: Any, top_k: int, prompts: list[list[int]], new: int = 12) -> int:
    """Decode, and assert that every draft token is among the ``top_k`` that transformers' modules rank first after the
    tokens before it; return the number of tokens."""
    theirs, target, propose, count = reference(drafter), drafter.target, drafter.propose, 0

    steps = itertools.count()

    def checked(state: DecodeState) -> Any:
        nonlocal count
        if next(steps) % 3 == 1:  # so that the head has two tokens to read at once
            return state.nothing
        draft = propose(state)
        for row, known in enumerate(state.tokens):
            if state.finished[row] or not draft.size:
                continue
            features = target.features(torch.tensor([known[:-1]])).features
            parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
            for node, token in enumerate(tokens):
                path, above = [], parents[node]
                while above >= 0:
                    path, above = [tokens[above], *path], parents[above]
                logits = predictions(theirs, features, [*known, *path], len(path))
                assert token in logits.topk(top_k).indices.tolist(), (row, node, path)
                count += 1
        return draft

    waiting = deque(enumerate(prompts))
    with mock.patch.object(drafter, "propose", checked):
        options: dict[str, Any] = {"batch": 2, "longest": max(map(len, prompts)), "max_new_tokens": new}
        draw = partial(lambda queue: queue.popleft() if queue else None, waiting)
        early = plain_greedy(target, prompts[0], 5)[-1:]  # ends the first answer, so that the third prompt joins
        assert len(list(generate_many(target, drafter, draw, eos_token_id=early, **options))) == len(prompts)
    return count


def built(family: str) -> TargetModel:
    return TargetModel(families.build(family, families.DECODED[family]).eval(), name=family)


@pytest.mark.parametrize(("tree", "top_k"), [("chain", 1), ("dynamic", 3), ("static", 2)])
@pytest.mark.parametrize(("kind", "normed"), [("qwen", True), ("deepseek", True), ("deepseek", False)])
def test_drafts_of_three_layers(kind: str, normed: bool, tree: str, top_k: int) -> None:
    """Catches a step that runs another layer, a later layer that reads another token's state or lacks the text before
    it, parts of another layer, a node that reads another node's state, and a sequence that joins with another's."""
    keys: dict[str, Any] = {"kind": kind, "feeds_back_normed": normed, "masks_first": False, "layers": 3}
    options: dict[str, Any] = {
        "dynamic": {"nodes": 9, "top_k": 3},
        "static": {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]]},
    }
    drafter = mtp(target_of("llama"), tree, **keys, **options.get(tree, {}))
    assert compared(drafter, top_k, [prompt(9), prompt(4, 1), prompt(6, 2)]) > 40


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "youtu"])
@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_with_latent_attention(family: str, layers: int) -> None:
    """Catches a cache of other widths than the latent's, a dense layer where there are experts, and a planted norm."""
    drafter = mtp(
        built(family), "chain", kind="deepseek", feeds_back_normed=True, masks_first=False, layers=layers, depth=layers
    )
    assert compared(drafter, 1, [prompt(9), prompt(4, 1)]) > 5


def test_finished_sequences_leave_room_in_later_caches() -> None:
    """Catches a sequence that ends early and keeps its tokens in the caches of later layers, where another one then
    has no room to read the tokens of many steps at once."""
    drafter = mtp(target_of("llama"), "chain", 0.0, layers=2, depth=3)
    propose = drafter.propose

    def one_sided(state: DecodeState) -> Any:
        if state.finished[0] and len(state.tokens[1]) < 40:
            return state.nothing
        draft = propose(state)
        draft.tokens[1] = (draft.tokens[1] + 1) % state.target.vocab_size  # rejected: the first sequence is faster
        return draft

    prompts = [prompt(9), prompt(4, 1)]
    with mock.patch.object(drafter, "propose", one_sided):
        made = generate(drafter.target, drafter, prompts, max_new_tokens=48, eos_token_id=NO_EOS)
    assert rows_of(made) == [plain_greedy(drafter.target, ids, 48) for ids in prompts]


TestChain = conformance.suite(
    lambda t: mtp(t, "chain", 0.3, layers=3), accepts="some", families=("llama",), longest_draft=3
)
TestDynamic = conformance.brief(
    lambda t: mtp(t, "dynamic", 0.3, kind="deepseek", layers=2, nodes=8, top_k=3), accepts="some", families=("llama",)
)
TestDeeper = conformance.brief(lambda t: mtp(t, "chain", kind="mimo", layers=2, depth=5), families=("qwen3",))


# ------------------------------------------------------------------------------------------- training


def prepared(folder: Path, family: str, kind: str, layers: int, **changes: Any) -> Any:
    """The keys of a run for a target of ``family``, which has such layers in its files."""
    with_layer(folder / "target", kind, family, layers=layers)
    target = TargetModel.from_pretrained(str(folder / "target"), "float32", "cpu")
    stores = tiny_run.write_stores(folder / "stores", target)
    head = {"kind": kind, "layers": layers} | ({"feeds_back_normed": True} if family == "deepseek_v3" else {})
    keys: dict[str, Any] = {"head": head, "start": "target"}
    keys |= {"unroll": layers} if layers > 1 else {}
    return tiny_run.settings(target.name, stores, folder / "run", **keys | changes)


def expected_loss(task: Any, batch: Any) -> Tensor:
    """The loss from whole forwards, a chain of them for each trained token."""
    total, count = torch.zeros(()), len(task.module.layers)
    shares = [0.6**step for step in range(task.config.unroll)]
    for span in batch.spans:
        begin, end = span.start, span.start + span.length
        ids = batch.input_ids[:, begin:end]
        for row in (row - begin for row in batch.rows.tolist() if begin <= row < end):
            truth = task.ends.lm_head(batch.features[0, begin + row + 1]).softmax(-1)
            for step, share in enumerate(shares):
                hidden = features = batch.features[:, begin : begin + row - step + 1]
                for n in range(step + 1):
                    if count > 1:  # layer n reads at each index what layer n - 1 gave there
                        positions, tokens = torch.arange(hidden.shape[1])[None] + n, ids[:, 1 + n :]
                        hidden = task.module(
                            hidden, task.ends.embed(tokens[:, : hidden.shape[1]]), positions, None, None, n
                        )
                    else:  # the layer reads the features, and behind them its own outputs
                        positions = torch.arange(features.shape[1])[None]
                        tokens = ids[:, 1 : 1 + features.shape[1]]
                        hidden = task.module(features, task.ends.embed(tokens), positions)
                        features = torch.cat([features, hidden[:, -1:]], dim=1)
                q = task.ends.lm_head(task.module.parts(step).scored(hidden[:, -1]))
                total = total + share / sum(shares) * F.cross_entropy(q, truth[None])
    return total


@pytest.mark.parametrize(
    ("kind", "family", "layers"),
    [("qwen", "qwen3", 3), ("deepseek", "llama", 2), ("deepseek", "deepseek_v3", 1), ("deepseek", "deepseek_v3", 2)],
)
def test_the_loss_and_the_first_weights(tmp_path: Path, kind: str, family: str, layers: int) -> None:
    """Catches a step that trains another layer or with another layer's parts, keys of earlier steps among those of a
    layer, latents of a chain that are not expanded, and first weights of the first layer only."""
    config = tiny_run.read("mtp", prepared(tmp_path, family, kind, layers))
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    task.load()
    own = load_own(config.target)[1]
    assert all(torch.equal(value, own[name]) for name, value in task.module.state_dict().items())
    batch = collate(inputs.train, [1, 3], config.taps)
    batch = replace(batch, rows=task.rows(batch))
    assert len(batch.rows) > 5
    losses = task.losses(task.pairs(task.module, batch, seed=0))
    torch.testing.assert_close(losses["loss"], expected_loss(task, batch), rtol=1e-4, atol=1e-4)
    losses["loss"].backward()
    unread = [name for name, weights in task.module.named_parameters() if weights.grad is None]
    assert not [name for name in unread if "experts" not in name]


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("glm4_moe_lite", 1)])
def test_new_layers_learn(tmp_path: Path, family: str, layers: int) -> None:
    """Catches first weights of the first layer only, layers that are trained and not exported, and a dry run that
    cannot build them."""
    values = prepared(tmp_path, family, "deepseek", layers, start="regression", steps=30, learning_rate=3e-3)
    config = tiny_run.read("mtp", values)
    assert not dry_run(config, tiny_run.arguments()).problems
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    task.fit(inputs.train)
    assert all(torch.equal(other.fc.weight, task.module.fc.weight) for other in task.module.others)
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    _, names, drafter = tiny_run.learned("mtp", values, target, below=0.95)
    assert f"heldout_step_{layers - 1}_top1" in names and len(drafter.module.layers) == layers


@pytest.mark.parametrize(("layers", "more"), [(2, {}), (1, {"start": "regression"})])
def test_resumed_equals_uninterrupted(tmp_path: Path, layers: int, more: dict[str, Any]) -> None:
    """Catches a resumed run that begins with the target's or with solved weights again."""
    values = prepared(tmp_path, "llama", "deepseek", layers, schedule="constant", steps=8, learning_rate=1e-2, **more)
    tiny_run.train_here("mtp", values)
    parts = values | {"out": str(tmp_path / "parts")}
    tiny_run.train_here("mtp", parts | {"steps": 4})
    tiny_run.train_here("mtp", parts, resume=True)
    ours, theirs = (load_checkpoint(each["out"])[1] for each in (values, parts))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_lora_of_layers_with_experts(tmp_path: Path) -> None:
    """Catches an adapter that takes experts for its targets, and one of the first layer only."""
    values = prepared(tmp_path, "glm4_moe", "deepseek", 2, steps=3, learning_rate=1e-2)
    target = TargetModel.from_pretrained(values["target"], "float32", "cpu")
    make_drafter("mtp", target).save_pretrained(tmp_path / "own")  # type: ignore[attr-defined]
    tiny_run.train_here("mtp", values | {"init_from": str(tmp_path / "own"), "lora": {"r": 4}})
    loaded = (load_drafter(str(path), target) for path in (tmp_path / "own", values["out"]))
    before, after = (drafter.module.state_dict() for drafter in loaded)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {"fc.weight", "others.0.fc.weight", "layers.1.mlp.shared_experts.up_proj.weight"} <= moved
    assert not any(".experts." in name or "norm" in name for name in moved)


def test_what_does_not_train_all_layers_is_refused(tmp_path: Path) -> None:
    """Catches layers that no step trains, and a training that begins with fewer layers than the target has."""
    values = prepared(tmp_path, "llama", "qwen", 2)
    with pytest.raises(
        ValueError, match=r"unroll is 3 and unroll_from is 0.0, and of 2 layers .*; set unroll=2 unroll"
    ):
        tiny_run.read("mtp", values | {"unroll": 3})
    config = tiny_run.read("mtp", values | {"head": {"kind": "qwen"}, "unroll": 3})
    with pytest.raises(
        ValueError, match="head.layers is 1, but the MTP layers of .* have 2; set head.layers=2 unroll=2, or"
    ):
        make_task(config, open_inputs(config).ends).load()
