"""Drafting with a part of the LM head, or an int8 copy: lossless and by the right ids, for every drafter with one."""

import json
import random
import tempfile
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import conformance
import pytest
import torch
from conformance import NO_EOS, each_draft, plain_greedy, prompt, rows_of, target_of
from distribution import LIMIT, VOCAB, WARPS, deviation, toy
from rigged import Oracle, OracleHeads, eagle, kangaroo, medusa, perturbed, quiet_depths, with_head
from tiny import build
from torch import Tensor

from drafters import Drafter, TargetModel, generate, load_drafter, make_drafter
from drafters.drafting import draft_model
from drafters.heads.eagle.module import EagleHead
from drafters.learned import LearnedDrafter
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.methods.papers.specinfer import SpecInferDrafter
from drafters.model.draft_head import DRAFT_IDS, DRAFT_IDS_FILE, TEXT_ROWS, DraftHead, TextTokens, head_ids, listed_head

Options = dict[str, Any]
# ids, options of the drafter -> the drafter, whose draft model (or oracle) is often right.
Make = Callable[[TargetModel, Tensor, Options], Drafter]


def shuffled(vocab: int, count: int, seed: int = 0) -> Tensor:
    """``count`` token ids in an order of no meaning."""
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count].int()


def listing(model: TargetModel, ids: Tensor) -> TargetModel:
    """``model`` as if loaded from a folder in which ``ids`` lie."""
    listed = copy(model)
    listed.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]  # kept for as long as the model
    listed.source = listed.folder.name  # type: ignore[attr-defined]
    (Path(listed.source) / DRAFT_IDS_FILE).write_text(json.dumps(ids.tolist()))
    return listed


def with_ids(drafter: LearnedDrafter, ids: Tensor, options: Options) -> Any:
    """A learned drafter again, its module with ``ids``."""
    drafter.module.register_buffer(DRAFT_IDS, ids)
    made = type(drafter)(drafter.target, drafter.module, drafter.settings.model_copy(update=options))
    rigs = [kind for kind in type(drafter.head).__mro__ if kind in (Oracle, OracleHeads)]
    return with_head(made, rigs[0], drafter.head.noise) if rigs else made  # type: ignore[attr-defined]


def eagle_with(tree: str, noise: float | None = 0.3, **shape: object) -> Make:
    return lambda target, ids, options: with_ids(eagle(target, noise, tree, **shape), ids, options)


def with_model(name: str, noise: float, **more: Any) -> Make:
    """A method with a draft model: the target, perturbed."""

    def make(target: TargetModel, ids: Tensor, options: Options) -> Drafter:
        model = listing(perturbed(target, noise) if noise else target, ids)
        inner = {"inner": {"drafter": "prompt_lookup"}} if name == "cascade" else {}
        models = {"draft_models": [model, model]} if name == "specinfer" else {"draft_model": model}
        return make_drafter(name, target, **models, **more, **inner, **options)

    return make


SHAPES: dict[str, Options] = {
    "speculative": {},
    "specinfer": {"gamma": 3},
    "spectr": {"gamma": 3, "drafts": 2, "draft_temperature": 0.3},
    "llmcad": {"nodes": 8, "branches": 3},
    "cascade": {"gamma": 3},
    "ouroboros": {"gamma": 3, "window": 2, "beta": 3, "k": 2, "guesses": 2},
    "mjsd": {"gamma": 3, "beams": 3},
    "bild": {"gamma": 4, "fallback": 0.1},
}
METHODS: dict[str, Make] = {
    "eagle chain": eagle_with("chain", depth=4),
    "eagle static": eagle_with("static"),
    "eagle dynamic": eagle_with("dynamic", depth=4, top_k=4, nodes=12),
    "medusa static": lambda target, ids, options: with_ids(medusa(target, 0.3, "static", nodes=12), ids, options),
    "kangaroo": lambda target, ids, options: with_ids(kangaroo(target, rigged=True, eta=0.0), ids, options),
    **{name: with_model(name, 0.0 if name == "llmcad" else 0.05, **shape) for name, shape in SHAPES.items()},
}


def target_for(name: str) -> TargetModel:
    return target_of("llama", quiet_depths(0.3)) if name == "kangaroo" else target_of("llama")


TestStaticInt8 = conformance.brief(
    lambda target: METHODS["eagle static"](
        target, shuffled(target.vocab_size, 60), {"draft_vocab": 50, "draft_dtype": "int8"}
    ),
    accepts="some",
    families=("llama", "mixtral"),
)
TestSpeculative = conformance.brief(
    lambda target: METHODS["speculative"](target, shuffled(target.vocab_size, 60), {"draft_vocab": 60}),
    accepts="some",
    families=("qwen3",),
)


def heads_of(drafter: Drafter) -> list[DraftHead]:
    """Its draft heads, or those of the first drafter within it."""
    within: Any = drafter.speculators[0] if isinstance(drafter, SpecInferDrafter) else drafter
    return within.head.lm_heads if isinstance(within, LearnedDrafter) else [within.lm_head]


def decode(target: TargetModel, drafter: Drafter, temperature: float = 0.0) -> Any:
    options: Options = {"max_new_tokens": 24, "eos_token_id": NO_EOS, "temperature": temperature, "seed": 1}
    return generate(target, drafter, [prompt(9)], **options)


@pytest.mark.parametrize("name", METHODS)
def test_every_id_in_another_order_drafts_the_same(name: str) -> None:
    """Catches a place among the rows taken for the token: with all tokens listed, in any order, nothing may change."""
    target = target_for(name)
    whole = decode(target, METHODS[name](target, shuffled(target.vocab_size, target.vocab_size), {}))
    options = {"draft_vocab": target.vocab_size}
    listed = decode(target, METHODS[name](target, shuffled(target.vocab_size, target.vocab_size), options))
    drafts = [[(step.drafted, step.accepted) for step in result.trace.steps] for result in (whole, listed)]
    if name != "spectr":  # it draws its drafts, and the order decides which ones
        assert drafts[0] == drafts[1]
    assert rows_of(whole) == rows_of(listed)
    assert max(accepted for _, accepted in drafts[1]) >= 2, "a rig that accepts nothing shows nothing"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_only_kept_tokens_are_drafted(name: str, temperature: float) -> None:
    """Catches drafts from the whole head, a q that is not over the kept tokens or not normalised there, lossy output;
    at temperature 1, where rows are the text's, what the answer has brought not being among them."""
    target = target_for(name)
    ids = shuffled(target.vocab_size, 60)
    text = 10 if temperature else 0
    drafter = METHODS[name](target, ids, {"draft_vocab": 40, "draft_text": text})
    propose, seen = drafter.propose, []

    def checked(state: DecodeState) -> DraftTree:
        allowed = set(ids[: 40 + text].tolist()) | (set(state.tokens[0]) if text else set())
        draft = propose(state)
        seen.append(draft.size)
        if draft.size and text and name != "llmcad":
            rare = [token for token in reversed(state.tokens[0]) if token not in ids[:40].tolist()]
            latest = set(list(dict.fromkeys(rare))[:text])
            assert all(latest <= set(head.ids.tolist()) for head in heads_of(drafter) if head.ids is not None)
        assert set(draft.tokens.flatten().tolist()) <= allowed
        assert draft.q is None or draft.q.shape[-1] == target.vocab_size
        if draft.q is not None and draft.size:
            torch.testing.assert_close(draft.q[..., sorted(allowed)].sum(-1), torch.ones(draft.q.shape[:-1]))
            assert bool((draft.q.flatten(0, 1) > 0).sum(-1).max() <= 40 + text)
        return draft

    with mock.patch.object(drafter, "propose", checked):
        result = decode(target, drafter, temperature)
    assert sum(seen) > 10
    if drafter.lossless and temperature == 0:
        assert rows_of(result)[0] == plain_greedy(target, prompt(9), 24)


KEPT = torch.tensor([3, 0, 4, 1], dtype=torch.int32)  # the first 3 are drafted with, and token 1 or 2
TOYS: dict[str, Make] = {
    "eagle chain": eagle_with("chain", None, depth=3),
    "eagle static": eagle_with("static", None, paths=[[0], [1], [2], [0, 0], [0, 1], [1, 0]]),
    "medusa static": lambda target, ids, options: with_ids(medusa(target, None, "static", nodes=8), ids, options),
    "speculative": with_model("speculative", 0.5, gamma=3),
    "specinfer": with_model("specinfer", 0.5, gamma=3),
    "spectr": with_model("spectr", 0.5, gamma=3, drafts=2),
    "cascade": with_model("cascade", 0.5, gamma=3),
    "ouroboros": with_model("ouroboros", 0.5, gamma=2, window=2, beta=3, k=2, guesses=2),
}


# Two of them draw for 20 seconds, and have tests of their own rules.
LONG = ("specinfer", "spectr")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in TOYS]
)
def test_output_is_distributed_as_the_targets(name: str) -> None:
    """Catches a q over the whole vocabulary where tokens were drawn from a part of it: residuals would be too small;
    and a q of tokens that are no longer, or not yet, those of the head's last row."""
    target = toy()
    drafter = TOYS[name](target, KEPT, {"draft_vocab": 3, "draft_text": 1})
    assert VOCAB == target.vocab_size == 5
    assert deviation(drafter, WARPS[name in ("eagle chain", "spectr")]) < LIMIT


@pytest.mark.parametrize("name", ["eagle static", "speculative"])
def test_the_measurement_sees_a_q_of_the_whole_vocabulary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a distribution test that cannot fail."""
    drafter = TOYS[name](toy(), KEPT, {"draft_vocab": 3, "draft_text": 0})
    monkeypatch.setattr(DraftHead, "spread", wrongly_spread)
    assert deviation(drafter, WARPS[0], 4_000) > 8.0


def wrongly_spread(head: DraftHead, q: Tensor) -> Tensor:
    """As if q had been normalised before tokens were left out: those have a third of its mass."""
    assert head.ids is not None
    whole = q.new_full((*q.shape[:-1], head.model.vocab_size), 1 / 6)
    return whole.index_copy_(-1, head.ids, q * 2 / 3)


def test_int8_rows_are_the_rows() -> None:
    """Catches int8 rows of other tokens, a bias of the wrong rows, and int8 that changes a learned head when saved."""
    target = target_of("llama")
    ids, features = shuffled(target.vocab_size, 30), torch.randn(2, 3, target.hidden_size)
    expected = target.lm_head(features)[..., ids.long()]
    torch.testing.assert_close(DraftHead(target, ids)(features), expected, atol=1e-5, rtol=1e-5)
    rounded = DraftHead(target, ids, "int8")(features)
    assert 0 < (rounded - expected).abs().max() < 0.02 * expected.abs().max()
    before = eagle(target, None, "chain")
    weights = {name: value.clone() for name, value in before.module.state_dict().items()}
    after = with_ids(before, ids, {"draft_dtype": "int8"})
    assert all(torch.equal(after.module.state_dict()[name], value) for name, value in weights.items())


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_rows_of_the_text_are_those_of_its_tokens(precision: torch.dtype, dtype: Literal["int8"] | None) -> None:
    """Catches rows that stay another token's, in any layout that a weight is kept in, ids without their rows, rows of
    one prompt in the next, and a bias that stays behind."""
    target = TargetModel(build("llama", hidden_size=64).to(precision))
    ids, features = shuffled(target.vocab_size, 60), torch.randn(3, target.hidden_size).to(precision)
    own = torch.nn.Linear(target.hidden_size, target.vocab_size, dtype=precision)
    head = DraftHead(target, ids, dtype, own, text=20)
    rare = sorted(set(range(target.vocab_size)) - set(ids.tolist()))
    text = [rare[:5] + ids[:5].tolist()]
    for tokens in (rare[:5], rare[3:30]):
        head.read(text)
        assert head.ids is not None and head.ids[:40].tolist() == ids[:40].tolist()
        assert set(tokens[-20:]) <= set(head.ids[40:].tolist()) and len(set(head.ids.tolist())) == 60
        expected, given = own(features).float()[:, head.ids], head(features).float()
        assert (given - expected).abs().max() < 0.03 * expected.abs().max()
        text[0] += rare[3:30]
    head.read([[int(ids[0])]])
    assert head.ids is not None and head.ids.tolist() == ids.tolist()
    assert (head(features).float() - own(features).float()[:, ids.long()]).abs().max() < 0.03 * expected.abs().max()


def test_who_was_met_longest_ago_gives_way() -> None:
    """Catches a token of the prompt dropped while it is used, a spare one that outlives the text's, and rows of a batch
    that are read twice, or not at all, when one of them is given to another prompt."""
    known = TextTokens([0, 1], [8, 9])
    first, other = [1, 5], [0]
    rows = [first, other]
    assert known.read(rows) == {3: 5} and 8 in known and 9 not in known
    first.append(6)
    assert known.read(rows) == {2: 6}
    other += [5, 7]  # 5 again: 6 has waited longer now
    assert known.read(rows) == {2: 7} and 5 in known
    rows[0] = [6, 0]
    assert known.read(rows) == {3: 6} and len(known) == 4
    assert known.read([[2]]) == {2: 8, 3: 2} and known.read([[]]) == {3: 9}
    assert TextTokens([0, 1], []).read([[5]]) == {}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An EAGLE checkpoint that lists 60 ids and drafts with 40 of them."""
    target = target_of("llama")
    drafter = with_ids(eagle(target, None, "chain"), shuffled(target.vocab_size, 60), {"draft_vocab": 40})
    drafter.save_pretrained(tmp_path / "eagle")
    return tmp_path / "eagle"


def test_a_checkpoint_carries_its_ids(saved: Path) -> None:
    """Catches ids lost, cut or reordered between saving and loading, and options that do not choose among them."""
    target = target_of("llama")
    ids = shuffled(target.vocab_size, 60).long()
    as_saved, fewer, whole = (load_drafter(str(saved), target, **more) for more in ({}, {"draft_vocab": 7}, WHOLE))
    assert as_saved.lm_head.ids.tolist()[:60] == ids.tolist() and fewer.lm_head.ids.tolist()[:60] == ids.tolist()
    assert (as_saved.lm_head.width, as_saved.lm_head.text, fewer.lm_head.text) == (97, 57, 90)
    assert as_saved.drafter_config() == {"layer": "target", "tree": "chain", "draft_vocab": 40}
    none = load_drafter(str(saved), target, draft_text=0)
    assert none.lm_head.ids.tolist() == ids[:40].tolist()
    assert none.drafter_config() == {"layer": "target", "tree": "chain", "draft_vocab": 40, "draft_text": 0}
    assert whole.lm_head.ids is None and whole.lm_head.width == target.vocab_size
    assert whole.module.draft_ids.tolist() == ids.tolist()
    with pytest.raises(
        ValueError, match=r"draft_vocab is 61, .* lists the 60 most frequent.*draft_vocab=60.*train\.tools\.draft"
    ):
        load_drafter(str(saved), target, draft_vocab=61)


WHOLE: Options = {"draft_vocab": None}


def test_the_rows_of_the_text_begin_as_what_is_listed_and_then_the_others() -> None:
    """Catches a token with two rows, whose probability would count twice, one too many or too few, and rare tokens that
    take the rows of listed ones."""
    rng = random.Random(0)
    for _ in range(100):
        vocab = rng.randint(2, 30)
        ids = rng.sample(range(vocab), rng.randint(1, vocab))
        count, text = rng.randint(1, len(ids)), rng.choice([None, rng.randint(0, 30)])
        kept, places = head_ids(torch.tensor(ids).int(), EagleOptions(draft_vocab=count, draft_text=text), vocab, "x")
        assert places == min(vocab - count, TEXT_ROWS if text is None else text) and kept is not None
        assert kept.tolist() == [*ids, *sorted(set(range(vocab)) - set(ids))][: count + places]


def test_ids_have_to_be_there() -> None:
    """Catches an option that is dropped in silence where nothing says which tokens are frequent."""
    target = target_of("llama")
    drafter = EagleDrafter(target, EagleHead(target.config), EagleOptions())
    with pytest.raises(
        ValueError,
        match=r"draft_vocab is 8, .*no draft_ids.*leave draft_vocab out.*python -m train\.tools\.draft_vocab",
    ):
        listed_head(target, drafter.module, EagleOptions(draft_vocab=8))
    with pytest.raises(ValueError, match=r"draft_vocab is 8, but tiny-llama does not say"):
        make_drafter("speculative", target, draft_model=target, draft_vocab=8)


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        (torch.tensor([3, 97], dtype=torch.int32), r"lists token 97, and the vocabulary has 97"),
        (torch.tensor([3, -1], dtype=torch.int32), r"lists token -1"),
        (torch.tensor([3, 5, 3], dtype=torch.int32), r"lists 1 of its 3 tokens twice"),
        (torch.tensor([3.0, 5.0]), r"holds float32 of shape \[2\], not a list of token ids"),
        (torch.zeros(0, dtype=torch.int32), r"shape \[0\]"),
        (torch.tensor([[3], [5]]), r"shape \[2, 1\]"),
    ],
)
def test_damaged_ids_are_refused(ids: Tensor, wrong: str) -> None:
    """Catches ids that would index outside the LM head, or give a token's probability twice."""
    target = target_of("llama")
    weights = eagle(target, None, "chain").module.state_dict()
    with pytest.raises(ValueError, match=wrong):
        EagleDrafter.from_weights(target, weights | {DRAFT_IDS: ids}, {"draft_vocab": 2})
    with pytest.raises(ValueError, match=wrong):
        make_drafter("speculative", target, draft_model=listing(target, ids), draft_vocab=2)


def resized(target: TargetModel, size: int, noise: float = 0.0) -> TargetModel:
    """A draft model with ``size`` rows in embedding and LM head; rows that the target lacks are likely ones."""
    model = deepcopy(perturbed(target, noise).model) if noise else deepcopy(target.model)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        more = 1.5 * part.weight.data[: max(size - target.vocab_size, 0)]
        part.weight.data = torch.cat([part.weight.data[:size], more])
    model.get_input_embeddings().num_embeddings = model.get_output_embeddings().out_features = size
    model.config.vocab_size = size
    return TargetModel(model, name=f"of {size}")


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model comes with the same tokenizer, of fewer tokens than rows."""
    monkeypatch.setattr(draft_model, "vocabulary", lambda _: {"a": 0, "b": 1, "c": 2})


MODELS = ("speculative", "specinfer", "spectr", "llmcad", "cascade", "ouroboros", "mjsd", "bild")
OTHERS: list[Options] = [{}, {"draft_dtype": "int8"}, {"draft_vocab": 75, "draft_text": 10}]


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [(name, OTHERS[(at + turn) % 3], more) for at, name in enumerate(MODELS) for turn, more in enumerate((-7, 7))],
)
@pytest.mark.usefixtures("one_tokenizer")
def test_a_draft_model_of_another_size(name: str, options: Options, more: int) -> None:
    """Catches a padded model of the family refused, ids drafted that one of the models has no row for, ids of the
    target that the draft model has no embedding for, and a q over another vocabulary."""
    target = target_of("llama")
    size = target.vocab_size + more
    ids, least = shuffled(size, size), min(size, target.vocab_size)
    model = resized(target, size)
    with mock.patch(f"{__name__}.perturbed", lambda *_: model):
        drafter = with_model(name, 0.05, **SHAPES[name])(target, ids, options)
    from_target = name == "ouroboros"  # its phrases are the target's words

    def checked(state: DecodeState, draft: DraftTree) -> None:
        drafted = draft.tokens.flatten().tolist()
        assert from_target or all(token < least for token in drafted)
        assert draft.q is None or draft.q.shape[-1] == target.vocab_size
        assert draft.q is None or not draft.q[..., least:].any()

    for temperature in (0.0, 1.0):
        with each_draft(drafter, checked):
            found = [
                generate(target, drafter, [text], max_new_tokens=24, eos_token_id=NO_EOS, temperature=temperature)
                for text in (prompt(9), [target.vocab_size - 1, *prompt(5)])
            ]
        steps = [step for result in found for step in result.trace.steps]
        if temperature == 0:
            assert max(step.accepted for step in steps) >= 2, "a rig that accepts nothing shows nothing"
            assert not drafter.lossless or rows_of(found[0])[0] == plain_greedy(target, prompt(9), 24)


BESIDE = [("speculative", 7), ("speculative", -7), ("spectr", 7)]
LESS = [("spectr", -7), ("cascade", 7), ("ouroboros", -7)]  # of the same kinds, left to make test-long


@pytest.mark.parametrize(("name", "more"), [*BESIDE, *(pytest.param(*each, marks=pytest.mark.long) for each in LESS)])
@pytest.mark.usefixtures("one_tokenizer")
def test_output_is_the_targets_beside_a_model_of_another_size(name: str, more: int) -> None:
    """Catches a q that counts what was cut, or spreads it over what the target alone has."""
    target = toy()
    model = resized(target, VOCAB + (1 if more > 0 else -1), 0.5)
    with mock.patch(f"{__name__}.perturbed", lambda *_: model):
        drafter = TOYS[name](target, KEPT, {})
    assert deviation(drafter, WARPS[name == "spectr"]) < LIMIT


def test_tokenizers_of_one_family() -> None:
    """Catches unused extra tokens that make a tokenizer another one, and another one that passes for having some."""
    common = {"a": 0, "b": 1, "c": 2}
    for ours, theirs in ((common | {"<extra>": 3}, common), (common, common | {"<extra>": 3}), (None, common)):
        draft_model.check_tokenizers("ours", ours, "theirs", theirs)
    for ours in (common | {"c": 3}, {"a": 0, "b": 1, "x": 2}):
        with pytest.raises(ValueError, match="ours has another tokenizer than target theirs: 1 of 3 tokens differ"):
            draft_model.check_tokenizers("ours", ours, "theirs", common)
