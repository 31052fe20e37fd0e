"""A pass of an EAGLE head in one call against the same pass by torch's operations and our other kernels."""

from typing import Any

import pytest
import torch
from conformance import NO_EOS, prompt, rows_of
from test_cpu_kernels import needs_tiles
from test_cpu_layer import model_of
from torch import Tensor

from drafters import TargetModel, generate
from drafters.config import UNSHIFTED
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.model.draft_head import DRAFT_IDS, DraftHead
from drafters.model.rows import Rows
from drafters.policy.costs import Curve
from drafters.policy.shape import Costs, ShapePolicy

pytestmark = needs_tiles
RANKS = 5


def drafter_of(name: str, bias: bool = False, **options: Any) -> EagleDrafter:
    """A head of no training, and no small weights, on a target in bf16."""
    target = TargetModel(model_of(name, torch.bfloat16))
    torch.manual_seed(1)
    head = EagleHead(target.config, EagleShape(fc_bias=bias))
    for weights in head.parameters():
        weights.data.normal_(std=0.15) if weights.dim() == 2 else weights.data.uniform_(0.5, 1.5)
    head.register_buffer(DRAFT_IDS, torch.randperm(97)[:60].int())
    return EagleDrafter(target, head, EagleOptions(**options))


# What a draft goes on from, level by level: nodes of the level before, and which of those gone on from each sees.
LEVELS = [
    ([0], [[0]]),
    ([0], [[0, 1]]),
    ([0, 0, 0], [[0, 1, 2], [0, 1, 3], [0, 1, 4]]),
    ([2, 0], [[0, 1, 4, 5], [0, 1, 2, 6]]),
]


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"draft_vocab": 37, "draft_dtype": "int8"}),
        ("llama", {}),
        ("heads of 32", {"draft_vocab": 50, "draft_text": 9, "bias": True}),
        ("biases", {"draft_dtype": "int8"}),
        ("head norms", {"draft_vocab": 20, "draft_text": 0}),
    ],
)
def test_a_pass_is_the_pass(name: str, options: dict[str, Any], rows: int) -> None:
    """Catches a feature of another parent, a token of another place, a wrong position, a node that sees another branch,
    a bias left out, rows of the cache written elsewhere, and candidates that are not the likeliest."""
    drafter = drafter_of(name, **options)
    target, head, behind = drafter.target, drafter.lm_head, 21
    run = drafter.head.one_call
    assert run is not None
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(1, behind + rows, target.hidden_size, generator=generator).bfloat16()
    tokens = torch.randint(0, 97, (1, behind + rows), generator=generator)
    caches = [target.new_cache(1, 100, layers=1) for _ in range(2)]
    for cache in reversed(caches):
        drafter.head.cache = cache
        drafter.head.extend(features[:, :behind], tokens[:, :behind])
        cache.commit_first([behind])
    head.read([tokens[0].tolist()])
    theirs = drafter.head.extend(features[:, behind:], tokens[:, behind:])[:, -1:]
    ours, *found = run(features[0, behind:], range(rows), tokens[0, behind:].tolist(), caches[1], RANKS, judged=1)
    ours = ours[-1:]
    for cache in caches:
        cache.commit_first([rows])
    seen: list[list[int]] = []
    for parents, new in LEVELS:
        likeliest(head, theirs, *found)
        ranks = [parents[:number].count(parent) for number, parent in enumerate(parents)]
        given = head.named([found[0][p][r] for p, r in zip(parents, ranks, strict=True)])
        before, seen = len(seen), seen + new
        see = torch.zeros(1, len(new), len(seen), dtype=torch.bool)
        for row, others in enumerate(new):
            see[0, row, others] = True
        depths = torch.tensor([[len(others) - 1 for others in seen]])
        alone = len(new) == 1
        theirs = drafter.head.extend(
            theirs[:, parents], torch.tensor([given]), Rows(offset=before) if alone else Rows(see, depths, before)
        )
        ours, *found = run(ours, parents, given, caches[1], RANKS, None if alone else new, before)
        assert torch.equal(theirs[0], ours)
    likeliest(head, theirs, *found)
    end = behind + rows + len(seen)
    for a, b in zip(*((cache.keys[0], cache.values[0]) for cache in caches), strict=True):
        assert torch.equal(a[:, :, :end], b[:, :, :end])


def likeliest(head: DraftHead, features: Tensor, places: list[list[int]], probabilities: list[list[float]]) -> None:
    """The places and probabilities are the largest of the head's; of equally likely ones any may come first."""
    expected = head(features)[0].float().softmax(-1)
    assert all(len(set(row)) == RANKS for row in places)
    for found in (torch.tensor(probabilities), expected.gather(1, torch.tensor(places))):
        torch.testing.assert_close(found, expected.topk(RANKS).values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tree", ["auto", "chain", "static"])
def test_decoding_is_the_same(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches drafts that are others over a whole text: features of the wrong step, tokens of the text not read."""
    costs = Costs(Curve((1, 2), (1.0, 1.01)), first=0.01, level=0.01, row=0.001)
    monkeypatch.setattr(ShapePolicy, "_measured", lambda *given: costs)
    found = []
    for one_call in (True, False):
        depth = {"depth": 3} if tree == "chain" else {}
        drafter = drafter_of("llama", tree=tree, draft_vocab=37, draft_text=20, **depth)
        drafter.head.one_call = drafter.head.one_call if one_call else None
        result = generate(drafter.target, drafter, [prompt(30)], max_new_tokens=40, eos_token_id=NO_EOS)
        found.append((rows_of(result), [(step.drafted, step.depth, step.accepted) for step in result.trace.steps]))
    assert found[0] == found[1] and max(depth for _, depth, _ in found[0][1]) >= 3


def test_where_there_is_no_such_call() -> None:
    """Catches kernels for bf16 handed other values, and heads that read something else run as if they read both."""
    target = TargetModel(model_of("llama", torch.float32))
    assert EagleDrafter(target, EagleHead(target.config), EagleOptions()).head.one_call is None
    target = TargetModel(model_of("llama", torch.bfloat16))
    reads = EagleOptions()
    assert EagleDrafter(target, EagleHead(target.config, EagleShape(inputs=UNSHIFTED)), reads).head.one_call is None
    eager = TargetModel(model_of("llama", torch.bfloat16), engine="stock")
    assert EagleDrafter(eager, EagleHead(eager.config), EagleOptions()).head.one_call is None
