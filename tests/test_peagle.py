"""P-EAGLE: slots equal a forward from its description, drafts are lossless, training and forms keep the head."""

from pathlib import Path
from typing import Any
from unittest import mock

import conformance
import pytest
import tiny_run
import torch
from conformance import NO_EOS, check_children, each_draft, prompt, target_of
from pydantic import ValidationError
from rigged import PEAGLE, goes_by, peagle
from test_eagle3 import described, first_features, rms
from test_eagle3_layouts import rewrite, save_target, written
from test_train_dflash import own_text
from tiny import VOCAB_SIZE
from torch import Tensor

from data_prep.store.reader import FeatureStore
from drafters import TargetModel, generate, load_drafter
from drafters.heads.peagle.shape import PEagleShape
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from eval.configs import ParityConfig
from eval.figures import diagnosis
from eval.figures.diagnosis import FAULT, PASS, compared, decoded, ranked
from eval.figures.readings import AS_LOADED
from train.core.task import make_task
from train.run.files import read_metrics

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, 3.1": {"layers": 1, "fc_norm": True, "norm_output": True},
    "small vocabulary": {"draft_vocab_size": 60, "norm_before_residual": True},
    "qwen3": {"layer": "qwen3", "own_lm_head": False},
    "window": {"sliding_window": 5},
}


def slots(drafter: Any, known: list[int]) -> Tensor:
    """Scores ``[K, V]`` of all depths after committed tokens, from scratch: one causal chain."""
    target, head, shape = drafter.target, drafter.module, drafter.module.shape
    weights = head.state_dict()
    taps = target.features(torch.tensor([known[:-1]]), taps=drafter.taps).taps
    states = [taps[tap][0] for tap in drafter.taps]
    masked = weights["mask_hidden"][0].expand(shape.depths - 1, -1).chunk(len(states), dim=-1)
    states = [torch.cat([state, mask]) for state, mask in zip(states, masked, strict=True)]
    tokens = target.embed(torch.tensor([*known[1:], *[shape.mask_token_id] * (shape.depths - 1)]))
    rows = described(weights, head.config, shape, first_features(weights, head.config, shape, states), tokens)
    rows = rows if shape.norm_output else rms(rows, weights["norm.weight"], head.config.rms_norm_eps)
    own = weights.get("lm_head.weight", target.model.get_output_embeddings().weight)
    whole = torch.full((shape.depths, VOCAB_SIZE), -torch.inf)
    whole[:, torch.arange(len(own)) + weights.get("d2t", 0)] = rows[-shape.depths :] @ own.T
    return whole


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_equal_the_head_from_scratch(variant: str, temperature: float) -> None:
    """Catches a mask row at another position, one that stays in the cache, a learned state that is not fused, and a
    slot of another depth."""
    target = target_of("llama")
    drafter = peagle(target, "chain", **VARIANTS[variant])
    compared = []

    def checked(state: DecodeState, draft: DraftTree) -> None:
        for row, known in enumerate(state.tokens):
            if state.finished[row] or not draft.size:
                continue
            scores = slots(drafter, known)
            check_children(state, draft, lambda path, scores=scores: scores[len(path)], row)
            compared.append(row)

    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": NO_EOS, "temperature": temperature}
    with each_draft(drafter, checked):
        generate(target, drafter, [prompt(9), prompt(3, 1)], **options)
    assert compared.count(0) > 5 and compared.count(1) > 5


TestChainAll = conformance.brief(lambda t: peagle(t, "chain", 0.0), accepts="all", families=("llama",))
TestTreeSome = conformance.suite(lambda t: peagle(t, "tree", 0.4, nodes=12), accepts="some", families=("llama",))
TestChain = conformance.brief(lambda t: peagle(t, "chain", draft_vocab_size=60), families=("llama", "qwen3"))
TestTree = conformance.brief(lambda t: peagle(t, "tree", nodes=12, top_k=4), families=("llama",))
TestAuto = conformance.brief(lambda t: goes_by(peagle(t, "auto")), families=("llama",))


# ------------------------------------------------------------------------------------------- training


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    keys = {"taps": [tiny_run.TAP], "mask_token_id": 2, "depths": 3, "layers": 2}
    return tiny_run.settings(target.name, features, tmp_path / "run", head=keys)


@pytest.mark.parametrize("more", [{}, {"sliding_window": 4}])
def test_the_loss_of_all_depths(settings: dict[str, Any], more: dict[str, Any]) -> None:
    """Catches a depth that sees another draft's mask tokens, a label one token off, a position that COD sampling left
    out, and weights that do not make up for it."""
    settings["head"] |= more
    task, batch = tiny_run.task_of("peagle", settings | {"draft_vocab": 60}, 1, 3)
    config, batch = task.config, task.choose(batch)
    sampled = task.sampled(batch, 5)
    assert sampled[0].eq(1).all() and 0 < int(sampled[2].gt(0).sum()) < sampled.shape[1]
    loss = task.losses(task.pairs(task.module, batch, seed=5))["loss"]
    loss.backward()
    gradient = task.module.mask_hidden.grad.clone()
    task.module.zero_grad()

    head, shape, ids = task.module, config.head, task.heads.ids.long()
    masks, total = task.ends.embed(torch.tensor([shape.mask_token_id])), torch.zeros(())
    kept = dict.fromkeys(range(3), 0)
    for number, row in enumerate(batch.rows.tolist()):
        span = next(s for s in batch.spans if s.start <= row < s.start + s.length)
        place = row - span.start
        tokens = task.ends.embed(span.of(batch.input_ids))
        target = span.of(batch.features)[place + 1] @ task.ends.lm_head.weight.T
        if config.mask_uncovered and int(target.argmax()) not in ids.tolist():
            continue
        p = target[ids].softmax(-1)
        for depth in range(3):
            anchor = place - depth
            states = span.of(batch.taps[tiny_run.TAP])[: anchor + 1]
            fused = torch.cat([head.fused(states), head.masked()[0].expand(depth, -1)])
            inputs_ = torch.cat([tokens[1 : anchor + 2], masks.expand(depth, -1)])
            found = head(fused[None], inputs_[None], torch.arange(anchor + 1 + depth)[None])[0, -1]
            log_q = head.lm_head(head.scored(found)).log_softmax(-1)
            total = total - sampled[depth, number] * (p * log_q).sum()
            kept[depth] += bool(sampled[depth, number])
    assert kept[0] > kept[2] > 0
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-4)
    total.backward()
    torch.testing.assert_close(gradient, head.mask_hidden.grad, rtol=1e-3, atol=1e-5)


def test_cod_sampling_is_nested(settings: dict[str, Any]) -> None:
    """Catches a depth that is trained where the one before it is not, and shares other than max(ratio^d, least)."""
    task, _ = tiny_run.task_of("peagle", settings | {"down_sample_ratio": 0.5, "down_sample_ratio_min": 0.3}, 0)
    batch: Any = mock.Mock(input_ids=torch.zeros(1, 40_000), rows=torch.arange(10, 39_990))
    trained = task.sampled(batch, 1).gt(0)
    for depth, share in enumerate((1.0, 0.5, 0.3)):
        assert abs(float(trained[depth].float().mean()) - share) < 0.01
        if depth:  # of one anchor
            assert not (trained[depth][1:] & ~trained[depth - 1][:-1]).any()


def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel) -> None:
    """Catches a loss that does not reach the head, and a checkpoint that drafts otherwise."""
    learning = {"steps": 30, "warmup_steps": 5, "tau_every": 30, "tau_new_tokens": 8}
    run = tiny_run.train_here("peagle", settings | learning)
    losses = [row["loss"] for row in read_metrics(Path(settings["out"])) if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    before = make_task(run.task.config, run.task.ends).module.state_dict()
    drafter: Any = load_drafter(settings["out"], target)
    assert drafter.module.shape.depths == 3 and drafter.taps == (tiny_run.TAP,)
    changed = {name for name, value in drafter.module.state_dict().items() if not torch.equal(value, before[name])}
    assert {"mask_hidden", "fc.weight", "lm_head.weight"} <= changed
    assert generate(target, drafter, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6).tokens.shape == (1, 6)
    with pytest.raises(ValueError, match="depth is 4, and the head predicts 3 tokens at once; use 3 or less"):
        load_drafter(settings["out"], target, depth=4)


# ------------------------------------------------------------------------------------------- parity

PARITY = ParityConfig.model_validate(
    {"target": {"path": "t"}, "checkpoint": "c", "engine": "ours", "batch": 16, "depth": 3, "max_new_tokens": 20}
)


@pytest.fixture(scope="module")
def learnt(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[list[int]]]:
    """A drafter that learnt the target's answers to three prompts by heart, and these prompts."""
    folder = tmp_path_factory.mktemp("learnt")
    texts = own_text(folder / "features", target)
    keys = {"taps": [tiny_run.TAP], "mask_token_id": 2, "depths": 3, "layers": 1}
    more: dict[str, Any] = {"steps": 120, "lm_head_start": "target", "head": keys}
    tiny_run.train_here("peagle", tiny_run.settings(target.name, texts, folder / "run", **more))
    store = FeatureStore.open(texts / "heldout")
    return load_drafter(str(folder / "run"), target, tree="chain"), [one.input_ids[:4].tolist() for one in store]


@pytest.mark.parametrize("name", ["layer ids one too high", "wrong mask token", "residual on the wrong side"])
def test_a_planted_fault_is_named(name: str, learnt: tuple[Any, list[list[int]]]) -> None:
    """Catches a mistake that parity does not try on this head, and so calls it another's; one that changes nothing, or
    the shared drafter."""
    drafter, prompts = learnt
    ours = decoded(drafter, prompts, PARITY, AS_LOADED)
    mistake = next(one for one in diagnosis.known(drafter) if one.name.startswith(name))
    found = compared(drafter, ours, decoded(mistake.plant(drafter), prompts, PARITY, ""), prompts, PARITY)
    assert (found["verdict"], found["named"]) == (FAULT, [mistake.name])
    right = ranked(drafter, ours, prompts, PARITY)
    assert right["verdict"] == PASS and right["readings"][0]["tau"]["value"] > 2
    assert not any("feedback" in one["name"] for one in right["readings"]), "nothing is fed back"


# ------------------------------------------------------------------------------------------- forms


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def save_head(folder: Path, target: TargetModel, **options: Any) -> str:
    head = peagle(target, "chain", **options).module
    save_checkpoint(folder, head.state_dict(), make_config("peagle", PEAGLE | options, target), dtype=None)
    return str(folder)


@pytest.mark.parametrize("layer", ["llama", "qwen3"])
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_there_and_back(to: str, layer: str, saved: TargetModel, tmp_path: Path) -> None:
    """Catches a learned state that is lost, a head that is read as EAGLE-3's, a window that a form loses, and a command
    for another method."""
    window = 6 if layer == "llama" else None
    head = save_head(tmp_path / "head", saved, draft_vocab_size=60, layer=layer, sliding_window=window)
    export(head, to, tmp_path / "there")
    assert check(tmp_path / "there", to, saved.name).startswith(f"{tmp_path / 'there'} is a P-EAGLE head for ")
    config, weights = written(tmp_path / "there")
    assert config["mask_token_id"] == config["pard_token"] == 2 and weights["mask_hidden"].shape[-1] == 3 * 48
    assert '"parallel_drafting": true' in (tmp_path / "there" / "README.md").read_text()
    convert(str(tmp_path / "there"), saved.name, tmp_path / "back")
    one, other = load_checkpoint(head), load_checkpoint(str(tmp_path / "back"))
    assert PEagleShape(**one[0]["drafter"]) == PEagleShape(**other[0]["drafter"])
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items()) and len(one[1]) == len(other[1])
    export(str(tmp_path / "back"), to, tmp_path / "again")
    again, tensors = written(tmp_path / "again")
    assert again | {"made_from": 0} == config | {"made_from": 0} and tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], value) for name, value in weights.items())


def test_what_released_folders_lack(saved: TargetModel, tmp_path: Path) -> None:
    """Catches two mask tokens, and a number of depths that is made up without a word."""
    export(save_head(tmp_path / "head", saved), "vllm", tmp_path / "there")
    config, weights = written(tmp_path / "there")
    released = {key: value for key, value in config.items() if key not in ("made_from", "mask_token_id")}
    rewrite(tmp_path / "there", released, weights)
    notes = convert(str(tmp_path / "there"), saved.name, tmp_path / "back", taps=[1, 2, 3])
    assert any("do not say how many tokens" in note and note.endswith("taken for 8") for note in notes)
    for tokens, found in (({"mask_token_id": 3}, "'mask_token_id': 3, 'pard_token': 2"), ({"pard_token": None}, "{}")):
        rewrite(tmp_path / "there", released | tokens, weights)
        with pytest.raises(ValueError, match="there must be one mask token") as error:
            convert(str(tmp_path / "there"), saved.name, tmp_path / "out", taps=[1, 2, 3])
        assert found in str(error.value)
    with pytest.raises(ValueError, match="it is of the method 'peagle'; SGLang loads"):
        export(str(tmp_path / "head"), "sglang", tmp_path / "other")


def test_bad_keys(saved: TargetModel) -> None:
    """Catches a mask token beyond the vocabulary, and a window that a draft does not fit into."""
    shape = PEagleShape(**PEAGLE | {"mask_token_id": 97})
    with pytest.raises(ValueError, match="mask_token_id is 97, and the target's vocabulary has 97 tokens"):
        shape.check(saved.config)
    with pytest.raises(ValidationError, match="depths"):
        PEagleShape(**PEAGLE | {"depths": 1})
    run: dict[str, Any] = tiny_run.settings("t", Path("f"), Path("o"), head=PEAGLE | {"sliding_window": 4})
    with pytest.raises(ValueError, match="sliding_window is 4, and a draft of depths=4 .* set sliding_window=5"):
        tiny_run.read("peagle", run)
