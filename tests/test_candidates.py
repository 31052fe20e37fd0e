"""Candidates of an LM head: lossless, by the right ids, the pair that is best, and its way through checkpoints."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import conformance
import pytest
import rigged
import tiny_run
import torch
from conformance import NO_EOS, each_draft, plain_greedy, prompt, rows_of, target_of
from distribution import LIMIT, WARPS, deviation, toy
from rigged import dflash, dflash2, dspark, eagle, eagle3, kangaroo, medusa, with_head
from test_peagle import peagle

from drafters import TargetModel, generate, load_drafter
from drafters.hub import checkpoint
from drafters.layouts.export import export
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.model.candidates import TENSORS, Candidates, add_pair, head_fingerprint, without_pair
from drafters.model.draft_head import DRAFT_IDS
from drafters.model.head_adapter import fingerprint
from train.tools import candidates as program
from train.tools import draft_vocab
from train.watch import candidates as fitting
from train.watch.candidates import Factors, measured


def with_pair(drafter: Any, count: int, rank: int = 40, **options: Any) -> Any:
    """The drafter again, its module with the pair for inputs of equal spread; it draws from ``count`` candidates."""
    head = drafter.head
    weight, bias = head.lm_head.whole_head
    factors = Factors(weight, torch.eye(weight.shape[1]), rank)
    pair = dict(zip(TENSORS, (*factors.pair(rank), head_fingerprint(weight, bias)), strict=True))
    add_pair(drafter.module, pair)
    drafter.module.load_state_dict(pair, strict=False)
    settings = drafter.settings.model_copy(update={"candidates": count, **options})
    made = type(drafter)(drafter.target, drafter.module, settings)
    rigs = [kind for kind in type(head).__mro__ if kind in (rigged.Oracle, rigged.OracleBlock, rigged.OracleHeads)]
    if rigs:
        made = with_head(made, rigs[0], head.noise)
        made.lm_head.enter = head.lm_head.enter
    return made


@pytest.fixture(autouse=True)
def always(request: pytest.FixtureRequest) -> Iterator[None]:
    """Candidates for any number of inputs: tiny vocabularies have fewer rows than most drafts have candidates."""
    if request.node.name == "test_many_inputs_read_the_whole_head":
        yield
        return
    with mock.patch.object(Candidates, "reads_less", lambda *given: True):
        yield


KEPT = 80
MAKE = {
    "eagle chain": lambda t: with_pair(eagle(t, 0.3, "chain", depth=4), 12),
    "eagle dynamic": lambda t: with_pair(eagle(t, 0.3, "dynamic", depth=4, top_k=4, nodes=12), 2),
    "eagle static": lambda t: with_pair(eagle(t, 0.3, "static"), 8),
    "eagle3 d2t": lambda t: with_pair(eagle3(t, 0.3, "static", kept=KEPT), 8),
    "eagle3 d2t chain": lambda t: with_pair(eagle3(t, 0.3, "chain", kept=KEPT), 8),
    "dflash tree": lambda t: with_pair(dflash(t, 0.2, "tree", nodes=8, top_k=3), 8),
    "dflash2": lambda t: with_pair(dflash2(t, 0.1, "chain"), 12),
    "dspark d2t": lambda t: with_pair(dspark(t, 0.1, "chain", markov_head="rnn", draft_vocab_size=KEPT), 8),
    "dspark tree": lambda t: with_pair(dspark(t, 0.2, "tree", nodes=8, top_k=3), 6),
    "peagle": lambda t: with_pair(peagle(t, "chain"), 8),
    "medusa": lambda t: with_pair(medusa(t, 0.3, "static", nodes=8), 12),
}  # fmt: skip

SOME: dict[str, Any] = {"accepts": "some", "families": ("llama",)}
TestEagleChain = conformance.brief(MAKE["eagle chain"], **SOME)
TestEagleDynamic = conformance.brief(MAKE["eagle dynamic"], **SOME)
TestEagle3 = conformance.brief(MAKE["eagle3 d2t"], **SOME)
TestDSpark = conformance.brief(MAKE["dspark d2t"], **SOME)
TestDSparkTree = conformance.brief(MAKE["dspark tree"], **SOME)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", MAKE)
def test_q_is_over_the_candidates(name: str, temperature: float) -> None:
    """Catches candidates' places taken for rows or ids, a q that is not over the candidates, and lossy output."""
    target = target_of("llama")
    drafter = MAKE[name](target)
    count, accepted = drafter.lm_head.candidates.count, []

    def checked(state: DecodeState, draft: DraftTree) -> None:
        if draft.q is not None and draft.size:
            assert draft.q.shape[-1] == target.vocab_size
            torch.testing.assert_close(draft.q.sum(-1), torch.ones(draft.q.shape[:-1]))
            assert 1 < int((draft.q > 0).sum(-1).max()) <= count

    with each_draft(drafter, checked):
        result = generate(
            target, drafter, [prompt(9)], max_new_tokens=24, eos_token_id=NO_EOS, temperature=temperature, seed=1
        )
    accepted = [step.accepted for step in result.trace.steps]
    if temperature == 0:
        assert rows_of(result)[0] == plain_greedy(target, prompt(9), 24)
        assert name == "peagle" or max(accepted) >= 2, "a rig that accepts nothing shows nothing"


@pytest.mark.parametrize("name", ["eagle chain", "eagle static", "eagle3 d2t", "dspark d2t"])
def test_as_many_candidates_as_tokens_draft_the_same(name: str) -> None:
    """Catches logits of other rows than those named, a correction of other rows, and a draft of other ids."""
    target = target_of("llama")
    drafter = MAKE[name](target)
    every = len(drafter.lm_head.whole_head[0])
    traces = []
    for count in (None, every):
        chosen: Any = with_pair(drafter, every) if count else again_without(drafter)
        result = generate(target, chosen, [prompt(9)], max_new_tokens=24, eos_token_id=NO_EOS)
        traces.append([(step.drafted, step.accepted) for step in result.trace.steps])
    assert traces[0] == traces[1]


def again_without(drafter: Any) -> Any:
    return with_pair(drafter, None)  # type: ignore[arg-type]


BRANCHES: Any = [[0], [1], [0, 0], [0, 1], [1, 0]]


def branching(drafter: Any) -> Any:
    """The drafter, which draws the nodes of ``BRANCHES`` in every step."""
    drafter.policy = rigged.Cycling()
    drafter.policy.shapes = (tuple(map(tuple, BRANCHES)),)
    return drafter


TOYS = {
    "chain": lambda t: with_pair(eagle(t, None, "chain", depth=3), 3, 3),
    "static": lambda t: with_pair(eagle(t, None, "static", paths=[[0], [1], [2], [0, 0], [0, 1], [1, 0]]), 3, 3),
    "d2t": lambda t: with_pair(eagle3(t, None, "chain", kept=4, depth=3), 2, 3),
    "d2t static": lambda t: with_pair(eagle3(t, None, "static", kept=4, paths=BRANCHES), 2, 3),
    "dspark": lambda t: with_pair(dspark(t, None, "chain"), 3, 3),
    "dspark d2t, auto": lambda t: branching(with_pair(dspark(t, None, "auto", draft_vocab_size=4), 3, 3)),
    "medusa static": lambda t: with_pair(medusa(t, None, "static", paths=BRANCHES), 3, 3),
}


@pytest.mark.parametrize("name", TOYS)
def test_output_is_distributed_as_the_targets(name: str) -> None:
    """Catches a q over all tokens where they were drawn from candidates, and one of another row's candidates."""
    assert deviation(TOYS[name](toy(layers=4)), WARPS[name == "static"]) < LIMIT


def test_many_inputs_read_the_whole_head() -> None:
    """Catches a gather of more rows than the LM head has, in large batches and wide trees."""
    head = MAKE["eagle chain"](target_of("llama")).lm_head  # 97 rows, 12 candidates
    few, many = (head.scored(torch.randn(1, count, 48, generator=torch.Generator().manual_seed(0))) for count in (8, 9))
    assert few.logits.shape == few.places.shape == (1, 8, 12) and few.among == 97
    assert many.logits.shape == (1, 9, 97) and many.places is None


def test_the_pair_by_hand() -> None:
    """Catches a pair fitted to W alone, factors in the wrong order, and a bias that ranks nothing."""
    weight = torch.tensor([[9.0, 0.0], [-9.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    sigma = torch.diag(torch.tensor([1e-6, 1.0]))
    a, c = Factors(weight, sigma, 1).pair(1)
    product = a.float() @ c.float()
    torch.testing.assert_close(
        product, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), atol=0.02, rtol=0
    )
    inputs = torch.tensor([[0.1, 1.0], [-0.1, -1.0]])  # the first choices are rows 2 and 3, with 1.0 against 0.9
    assert [one.recall for one in measured(Factors(weight, sigma, 1), inputs, weight, None, [1], [1])] == [1.0]
    plain = Factors(weight, torch.eye(2), 1)
    assert [one.recall for one in measured(plain, inputs, weight, None, [1], [1, 2])] == [0.0, 1.0]
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    used = Candidates(a, c, 2, weight, bias)
    logits, rows = used(inputs)
    assert rows[0].sort().values.tolist() == [2, 3]
    torch.testing.assert_close(logits, (inputs @ weight.T + bias).gather(-1, rows))


def test_a_smaller_rank_is_part_of_a_larger() -> None:
    """Catches singular vectors in rising order."""
    generator = torch.Generator().manual_seed(0)
    weight, root = torch.randn(50, 16, generator=generator), torch.randn(16, 16, generator=generator)
    sigma = root @ root.T
    errors = []
    for rank in (1, 4, 8, 15):
        a, c = Factors(weight, sigma, 16).pair(rank)
        off = weight - weight.mean(0) - a.float() @ c.float()
        errors.append(float((off @ sigma @ off.T).trace()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01 * errors[0]


# ------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return tiny_run.save_target(tmp_path_factory.mktemp("target") / "target", "llama")


@pytest.fixture(scope="module")
def features(target: TargetModel) -> Path:
    lengths = {"train": [9], "heldout": [7 + number % 5 for number in range(12)]}
    return tiny_run.write_stores(Path(target.name).with_name("features"), target, lengths)


def run(folder: Path, features: Path, *more: str) -> None:
    program.main(["--checkpoint", str(folder), "--features", str(features), "--new-tokens", "24", *more])


SIZES = ("--rank", "40", "--count", "16")
HEADS = {
    "eagle": lambda t: eagle(t, None, "chain"),
    "eagle3": lambda t: eagle3(t, None, "chain", kept=KEPT),
    "dspark": lambda t: dspark(t, None, "chain"),
    "medusa": lambda t: medusa(t, None, "chain"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_checkpoint_there_and_back(
    target: TargetModel, features: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a pair that is not loaded, or not saved again, and weights of the head that change."""
    HEADS[name](target).save_pretrained(tmp_path)
    _, before = checkpoint.load_checkpoint(tmp_path)
    run(tmp_path, features, *SIZES)
    shown = capsys.readouterr().out
    assert "drafts with 16 candidates of rank 40 now: recall " in shown
    config, after = checkpoint.load_checkpoint(tmp_path)
    assert config["drafter"]["candidates"] == 16 and after["candidates_c"].shape == (40, 48)
    assert all(torch.equal(after[key], value) for key, value in before.items()) and len(after) == len(before) + 3
    assert fingerprint(after) == fingerprint(before), "an adapter of this head must still fit"
    drafter = load_drafter(str(tmp_path), target)
    drafter.save_pretrained(tmp_path / "again")
    again, weights = checkpoint.load_checkpoint(tmp_path / "again")
    assert again["drafter"] == config["drafter"] and weights.keys() == after.keys()
    loaded: Any = load_drafter(str(tmp_path / "again"), target, tree="chain")
    assert loaded.lm_head.candidates.count == 16
    assert load_drafter(str(tmp_path), target, candidates=None).lm_head.candidates is None  # type: ignore[attr-defined]
    result = generate(target, loaded, [[5, 6, 7]], max_new_tokens=20, eos_token_id=[])
    assert result.tokens[0].tolist() == plain_greedy(target, [5, 6, 7], 20)


def test_the_fastest_pair_with_the_recall(
    target: TargetModel, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a choice by rank or count alone, a recall that is not that of drafts, and a second fit on the first."""
    eagle(target, None, "chain").save_pretrained(tmp_path)

    def slow_counts(*given: Any) -> float:
        return (given[-1].rank + 3 * given[-1].candidates) / 49

    with mock.patch.multiple(fitting, RANKS=(8, 16, 24), COUNTS=(2, 4, 8), time_share=slow_counts):
        run(tmp_path, features, "--recall", "0.75")
        first = (tmp_path / "model.safetensors").read_bytes()
        run(tmp_path, features, "--recall", "0.75")
        assert (tmp_path / "model.safetensors").read_bytes() == first
        with pytest.raises(
            ValueError, match=r"is as it was: no pair with a recall of 1.0 is faster .* a recall of 0\.\d+; lower"
        ):
            run(tmp_path, features, "--recall", "1", "--count", "1")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    curve = {(int(row[0]), count): float(row[1 + at]) for row in lines[2:5] for at, count in enumerate((2, 4, 8))}
    config, weights = checkpoint.load_checkpoint(tmp_path)
    chosen = weights["candidates_c"].shape[0], config["drafter"]["candidates"]
    time = {one: one[0] + 3 * one[1] for one in curve}
    assert chosen == min((one for one in curve if curve[one] >= 0.75), key=time.__getitem__)


def test_what_is_refused(target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches a pair of another LM head, sizes that the LM head does not have, and a Sigma of a dozen inputs."""
    with pytest.raises(ValueError, match="holds no config.json; give the folder of a drafter"):
        run(tmp_path, features)
    folder = tmp_path / "eagle"
    eagle(target, None, "chain").save_pretrained(folder)
    refused = partial(pytest.raises, ValueError)
    with refused(match=r"--recall is 1\.5; give a share"):
        run(folder, features, "--recall", "1.5")
    with refused(match="--rank is 49, and the LM head reads 48 dimensions"):
        run(folder, features, "--rank", "49")
    with refused(match="--count is 98, and the LM head has 97 tokens"):
        run(folder, features, "--count", "98")
    with refused(match=r"half of the 2 prompts .* gave \d+ inputs .* 48 dimensions needs 192; raise --prompts"):
        run(folder, features, "--prompts", "2", "--new-tokens", "9")
    with refused(match=r"candidates is 8, and the checkpoint has no pair .*train.tools.candidates"):
        load_drafter(str(folder), target, candidates=8)
    own = tmp_path / "medusa"
    medusa(target, None, "chain", own_lm_heads=True).save_pretrained(own)
    with refused(match="has 4 LM heads of its own, and a pair is for one"):
        run(own, features)
    other = tmp_path / "kangaroo"
    kangaroo(target, rigged=False).save_pretrained(other)
    with refused(match="a drafter of type 'kangaroo', which takes no candidates; give an eagle"):
        run(other, features)
    run(folder, features, *SIZES)
    with refused(match="candidates is 98, more than the LM head's 97 tokens"):
        load_drafter(str(folder), target, candidates=98)
    config, weights = checkpoint.load_checkpoint(folder)
    for change, message in (
        (
            {"candidates_lm_head": weights["candidates_lm_head"] + 1},
            "of another LM head than the drafter's; fit it again",
        ),
        ({"candidates_a": weights["candidates_a"][1:]}, r"shapes \[96, 40\] and \[40, 48\], and the LM head needs"),
        ({"candidates_a": torch.zeros(97, 49), "candidates_c": torch.zeros(49, 48)}, "with r of at most 48"),
    ):
        checkpoint.save_checkpoint(folder, weights | change, config)
        with refused(match=message):
            load_drafter(str(folder), target)
        load_drafter(str(folder), target, candidates=None)
    del weights["candidates_c"]
    checkpoint.save_checkpoint(folder, weights, config)
    with refused(match="has no pair for it .candidates_c."):
        load_drafter(str(folder), target)


def test_what_else_reads_checkpoints(target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches an export with the pair's tensors, a training that loses the pair of init_from, has it beside draft
    tokens or has that of another LM head, and frequent tokens beside it."""
    eagle(target, None, "chain", draft_vocab=None).save_pretrained(tmp_path / "eagle")
    run(tmp_path / "eagle", features, *SIZES)
    notices = export(str(tmp_path / "eagle"), "vllm", tmp_path / "vllm")
    assert any("candidates" in notice for notice in notices)
    stored = checkpoint.load_file(tmp_path / "vllm" / "model.safetensors")
    assert not any("candidates" in name for name in stored)
    values = tiny_run.settings(target.name, features, tmp_path / "run", steps=1, init_from=str(tmp_path / "eagle"))
    assert not tiny_run.main("eagle", tiny_run.command("eagle", tmp_path, values, "--dry-run")[2:])
    tiny_run.train_here("eagle", values)
    assert load_drafter(str(tmp_path / "run"), target).lm_head.candidates.count == 16
    config, weights = checkpoint.load_checkpoint(tmp_path / "eagle")
    checkpoint.save_checkpoint(tmp_path / "torn", without_pair(weights), config)
    with pytest.raises(ValueError, match="it has candidates=16 and no pair for them; fit it again"):
        tiny_run.train_here("eagle", values | {"out": str(tmp_path / "x"), "init_from": str(tmp_path / "torn")})
    tuned = weights | {"candidates_lm_head": weights["candidates_lm_head"] + 1}
    checkpoint.save_checkpoint(tmp_path / "tuned", tuned, config)
    for name, changes in (("tokens", {"draft_vocab": 40}), ("other", {"init_from": str(tmp_path / "tuned")})):
        tiny_run.train_here("eagle", values | {"out": str(tmp_path / name)} | changes)
        config, weights = checkpoint.load_checkpoint(tmp_path / name)
        assert "candidates_a" not in weights and "candidates" not in config["drafter"]
    draft_vocab.main([str(tmp_path / "eagle"), "--data", str(features / "heldout"), "--size", "50"])
    drafter: Any = load_drafter(str(tmp_path / "eagle"), target)
    assert drafter.lm_head.candidates is None and drafter.settings.draft_vocab == 50
    run(tmp_path / "eagle", features, *SIZES)
    stored_config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    assert "draft_vocab" not in stored_config["drafter"] and stored_config["drafter"]["candidates"] == 16
    assert DRAFT_IDS in checkpoint.load_checkpoint(tmp_path / "eagle")[1]
    with pytest.raises(ValueError, match="candidates is 16 and draft_vocab 50; set one of them to null"):
        load_drafter(str(tmp_path / "eagle"), target, draft_vocab=50)
