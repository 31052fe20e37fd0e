"""Running states: what a commit, a crop, a joining sequence and padding leave of them, and what is refused."""

from collections import deque
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import NO_EOS, checked_commits, plain_greedy, prompt, rows_of, target_of
from distribution import LIMIT, deviation
from families import DECODED, build
from mtp_layers import mtp
from rigged import dflash, dspark, eagle, eagle3, goes_by, kangaroo, medusa, perturbed

from drafters import Drafter, TargetModel, generate, generate_many, make_drafter
from drafters.methods.papers.cascade import CascadeDrafter
from drafters.methods.speculative import SpeculativeDrafter
from drafters.model.cache import KVCache, config_shapes
from drafters.model.rows import Rows
from drafters.model.running import RunningCache
from eval.configs import LosslessConfig
from eval.figures import certificate

FAMILIES = ("qwen3_5_text", "bamba", "mamba", "lfm2")  # gated DeltaNet, Mamba 2, Mamba 1 token by token, convolutions


@lru_cache(maxsize=8)
def running(family: str = "qwen3_5_text", **sizes: int) -> TargetModel:
    """A tiny target with a running state, shared by all tests: do not change it."""
    return TargetModel(build(family, DECODED[family] | {"initializer_range": 0.3} | sizes), name=f"tiny-{family}")


def speculative(target: TargetModel, noise: float = 0.02, **options: Any) -> SpeculativeDrafter:
    return SpeculativeDrafter.from_options(target, draft_model=perturbed(target, noise), **{"gamma": 3, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rejected_token_leaves_no_trace(family: str) -> None:
    """Catches a state that has read rejected tokens or padding, or that is another sequence's or another prefix's."""
    target, lengths = running(family), [9, 4, 6]
    texts = torch.tensor([prompt(20, seed) for seed in range(3)])
    cache = target.new_cache(3, 24)
    cache.expect(lengths)
    target.run(texts[:, :9], cache)
    cache.commit_first(lengths)
    for accepted in ([2, 0, 4], [1, 4, 3], [4, 1, 1]):
        ids = torch.stack([row[at : at + 4] for row, at in zip(texts, lengths, strict=True)])
        drafts = ids.clone()
        for row, count in enumerate(accepted):
            drafts[row, count:] = (ids[row, count:] + 1) % target.vocab_size
        features = target.run(drafts, cache).features
        cache.commit([[*range(count)] for count in accepted])
        for row, (at, count) in enumerate(zip(lengths, accepted, strict=True)):
            whole = target.features(texts[row : row + 1, : at + count]).features[0, at:]
            torch.testing.assert_close(features[row, :count], whole, atol=1e-4, rtol=1e-4)
        lengths = [at + count for at, count in zip(lengths, accepted, strict=True)]
    assert cache.lengths == lengths == [16, 9, 14]


def test_prompts_in_pieces_and_an_answer_continued() -> None:
    """Catches a second piece that begins from an empty state, and a generation that depends on where one stopped."""
    for family in FAMILIES:
        target, ids = running(family), torch.tensor([prompt(17)])
        cache = target.new_cache(1, 24)
        for first, last in ((0, 7), (7, 8), (8, 17)):
            cache.expect([last - first])
            features = target.run(ids[:, first:last], cache).features
            cache.commit_first([last - first])
        whole = target.features(ids).features[:, 8:]
        torch.testing.assert_close(features, whole, atol=1e-4, rtol=1e-4)
    target = running()
    drafter, plain = speculative(target), plain_greedy(target, prompt(9), 16)
    begun = rows_of(generate(target, drafter, [prompt(9)], max_new_tokens=7, eos_token_id=NO_EOS))[0]
    ended = rows_of(generate(target, drafter, [[*prompt(9), *begun]], max_new_tokens=9, eos_token_id=NO_EOS))[0]
    assert begun + ended == plain


def chains(target: TargetModel) -> dict[str, Drafter]:
    """Drafters that need no trees, by name."""
    head = speculative(target, gamma=2)
    return {
        "speculative": speculative(target),
        "lookup": make_drafter("prompt_lookup", target),
        "suffix": make_drafter("suffix", target, chain=True, memory=0),
        "eagle": eagle(target, 0.2, "chain", depth=3),
        "eagle3": eagle3(target, 0.2, "chain", depth=3, taps=[1, 2]),
        "mtp": mtp(target, "chain", 0.2, layers=2, depth=3),
        "dflash": dflash(target, 0.1, "chain"),
        "dspark": dspark(target, 0.1, "chain", taps=[1, 2]),
        "medusa": medusa(target, 0.3, "chain"),
        "hybrid": make_drafter("hybrid", target, head=head, match=2),
        "hybrid, auto": make_drafter("hybrid", target, head=goes_by(eagle(target, 0.2, "auto")), match=2),
    }


def test_two_drafters_in_turn_and_sequences_that_join() -> None:
    """Catches a state of the drafter before, and a joining sequence that gets the state of the one whose place it has,
    or of padding."""
    target, prompts = running(), [prompt(3 + 4 * seed % 11, seed) for seed in range(6)]
    expected = [plain_greedy(target, ids, 10) for ids in prompts]
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": NO_EOS}
    for name, drafter in chains(target).items():
        assert rows_of(generate(target, drafter, prompts[:1], **options)) == expected[:1], name
        waiting = deque(enumerate(prompts))
        draw = partial(lambda queue: queue.popleft() if queue else None, waiting)
        if drafter.max_batch == 1:
            continue
        made = generate_many(target, drafter, draw, batch=2, longest=max(map(len, prompts)), **options)
        assert [one.tokens for one in sorted(made, key=lambda one: int(str(one.key)))] == expected, name


@pytest.mark.parametrize("family", [*FAMILIES, "falcon_h1"])
def test_quantised_targets(family: str) -> None:
    """Catches a linear layer of a mixer that still reads its weights in float32, one that is read without being called,
    and a chain whose tokens are computed otherwise than in plain decoding."""
    plain = running(family)
    target = TargetModel(build(family, DECODED[family] | {"initializer_range": 0.3}), name="int8", quantize="int8")
    assert target.bytes_read() < 0.45 * plain.bytes_read() and target.fingerprint() == plain.fingerprint()
    drafter = SpeculativeDrafter.from_options(target, draft_model=perturbed(plain, 0.03), gamma=3)
    prompts = [prompt(9), prompt(5, 1)]
    made = generate(target, drafter, prompts, max_new_tokens=20, eos_token_id=NO_EOS)
    assert rows_of(made) == [plain_greedy(target, ids, 20) for ids in prompts]
    assert 1.2 < made.trace.tau < 4


def test_what_cannot_be_quantised() -> None:
    """Catches experts that stay in 16 bits, and a model of other layers that is called quantised and is not."""
    experts, others = "a mixture of experts cannot be", "it has other layers in place of"
    for family, reason in (("qwen3_next", experts), ("gpt2", others)):
        with pytest.raises(ValueError, match=f"{reason} .*; leave quantize out"):
            TargetModel(build(family, DECODED[family]), quantize="int8")


def test_kangaroo_resumes_from_its_exit_layer() -> None:
    """Catches deep layers whose state has read the draft twice, and shallow ones whose state is the last token's."""
    target = running()
    drafter = kangaroo(target, True, eta=0.0, max_draft_tokens=3)
    with checked_commits() as seen:
        made = generate(target, drafter, [prompt(9)], max_new_tokens=14, eos_token_id=NO_EOS)
    assert rows_of(made)[0] == plain_greedy(target, prompt(9), 14) and seen.accepted


def test_draft_models_with_a_running_state() -> None:
    """Catches a draft model whose state has read tokens that the target rejected; also inside a cascade."""
    target, draft_model = target_of("llama"), running()
    options: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": NO_EOS}
    made = generate(target, make_drafter("speculative", target, draft_model=draft_model), [prompt(6)], **options)
    assert rows_of(made)[0] == plain_greedy(target, prompt(6), 14)
    near = perturbed(draft_model, 0.02)
    inner = speculative(near, 0.03, gamma=2)
    nested = CascadeDrafter.from_options(draft_model, draft_model=near, inner=inner, gamma=4)
    made = generate(draft_model, nested, [prompt(6)], **options)
    assert rows_of(made)[0] == plain_greedy(draft_model, prompt(6), 14) and made.trace.tau > 1.5


def test_sampled_tokens_have_the_targets_distribution() -> None:
    """Catches a state behind the accepted path, which greedy decoding may not show."""
    sizes = {"vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16, "num_hidden_layers": 3}
    target = running("qwen3_5_text", **sizes)
    assert deviation(speculative(target, 0.05), {"temperature": 1.0}, 2_000) < LIMIT


def certified(texts: int) -> dict[str, Any]:
    """The certificate of a draft model on a target with a running state."""
    sizes = {"vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16, "num_hidden_layers": 3}
    target = running("qwen3_5_text", **sizes)
    keys = {"target": {"path": "tiny"}, "drafter": {"drafter": "speculative"}, "rounded": None, "batch": 64}
    config = LosslessConfig.model_validate(keys | {"texts": texts, "new_tokens": 24, "greedy_tokens": 16})
    lineup: Any = SimpleNamespace(fresh=lambda temperature: {"speculative": speculative(target)})
    found = certificate.certify(config, target, lineup, [[1, 3, 2], [2, 4, 0, 1], [3, 0]] * 4)
    return found | certificate.judged(found["greedy"], found["sampled"])


@pytest.mark.slow
def test_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a certificate that runs no batch or no sampled text on such a target, and one that signs states which
    have read rejected tokens."""
    found = certified(96)
    assert found["verdict"] == "lossless", found["reasons"]

    def last(cache: RunningCache) -> None:
        cache._announced = None
        for kept in cache._kept.values():
            kept[:] = [(list(cache.lengths), kept[-1][1])]

    monkeypatch.setattr(RunningCache, "_choose", last)
    found = certified(48)
    assert found["verdict"] == "not lossless" and not found["greedy"][0]["passed"]
    assert found["sampled"]["p_value"] < 1e-9


def test_auto_chooses_among_chains() -> None:
    """Catches a policy that measures or drafts a tree."""
    target = running()
    drafter = goes_by(eagle(target, 0.0, "auto"))
    made = generate(target, drafter, [prompt(9)], max_new_tokens=14, eos_token_id=NO_EOS)
    assert rows_of(made)[0] == plain_greedy(target, prompt(9), 14)
    assert any(step.drafted for step in made.trace.steps)
    assert all(step.drafted == step.depth for step in made.trace.steps)


TREES: dict[str, dict[str, Any]] = {"lookahead": {}, "mjgd": {}, "suffix": {}, "specinfer": {"draft_models": ["x"]}}
TREES |= {"ouroboros": {"draft_model": "x"}, "llmcad": {"draft_model": "x"}, "spectr": {"draft_model": "x"}}


@pytest.mark.parametrize("method", TREES)
def test_trees_are_refused_at_once(method: str) -> None:
    """Catches a method that needs a tree, found out in its first step or after its draft model was loaded."""
    with pytest.raises(ValueError, match=f"{method} drafts trees, and tiny-qwen3_5_text verifies chains only"):
        make_drafter(method, running(), **TREES[method])


def test_what_else_is_refused() -> None:
    """Catches trees of a head or of a draft model, another cache, and a state that is not kept any more."""
    target, ids = running(), torch.tensor([prompt(6)])
    for made in (partial(eagle, target, None, "dynamic"), partial(eagle, target, None, "static")):
        with pytest.raises(ValueError, match="eagle drafts trees, .* verifies chains only.*set tree to chain"):
            made()
    with pytest.raises(ValueError, match="draft model tiny-qwen3_5_text verifies chains only.*use speculative"):
        make_drafter("mjsd", target_of("llama"), draft_model=target)
    see = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="verifies chains only.*draft a chain"):
        target.run(ids, target.new_cache(1, 8), Rows(see, see.sum(-1) - 1))
    other = KVCache(config_shapes(target.config), 1, 8, target.dtype, "cpu")
    with pytest.raises(ValueError, match="needs a RunningCache, found a KVCache; use target.new_cache"):
        target.run(ids, other)
    cache = target.new_cache(1, 16)
    for _ in range(2):
        target.run(ids, cache)
        cache.commit_first([6])
    with pytest.raises(ValueError, match="the state after 9 tokens of sequence 0 is not kept; .*cache.rewinds"):
        cache.crop([9])
    with pytest.raises(ValueError, match=r"slots \[\[0, 2\]\] of a draft, .* verifies chains only"):
        cache.commit([[0, 2]])
