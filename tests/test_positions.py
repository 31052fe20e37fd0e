"""Near the end of the context: drafts whose rows lie beyond the last position, which can never be accepted."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import families
import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from cuda_runs import METHODS, Models
from rigged import dflash, dspark, eagle3, medusa, quiet_depths

from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.heads.eagle.shape import EagleShape
from drafters.loop.generate import Step
from drafters.methods.eagle import EagleDrafter, EagleHead, EagleOptions
from drafters.model.rows import Rope

POSITIONS, NEW = 48, 4
LOSSY = {"mjsd", "mjgd", "bild"}  # decoded, not compared


def llama_head(tree: Any) -> Any:
    return lambda target, _: EagleDrafter(
        target, EagleHead(target.config, EagleShape(layer="llama")), EagleOptions(tree=tree)
    )


# Without a head of the target's layers, or one that asks the target for its next features.
WITHOUT_HEADS = [*METHODS][: [*METHODS].index("eagle chain")]
REACHING: dict[str, Callable[[TargetModel, Models], Drafter]] = {
    **{name: METHODS[name] for name in WITHOUT_HEADS if name != "hybrid"},
    "a wide window": lambda target, _: make_drafter("lookahead", target, window=8, ngram=5, guesses=6),
    "a long draft": lambda target, at: make_drafter("speculative", target, draft_model=at.near(target), gamma=9),
    "copies": lambda target, _: make_drafter("prompt_lookup", target, gamma=9, min_ngram=1),
    "a chain of a Llama layer": llama_head("chain"),
    "a tree of a Llama layer": llama_head("dynamic"),
    "eagle3": lambda target, _: eagle3(target, None, "dynamic", top_k=4, nodes=12),
    "medusa": lambda target, _: medusa(target, None, "static", nodes=12),
    "dflash": lambda target, _: dflash(target, None, "chain"),
    "dspark": lambda target, _: dspark(target, None, "tree", nodes=12, top_k=4),
}


class Tables(Models):
    """Targets whose positions index a table with an entry for each: of learned positions, or of RoPE."""

    def __init__(self, family: str) -> None:
        super().__init__("cpu", None)
        self.family = family

    def target(self, method: str) -> TargetModel:
        return target_with_a_table(self.family)


@lru_cache
def target_with_a_table(family: str) -> TargetModel:
    changes = families.WIDE | {"rotary_dim": 8, "n_inner": 64, "ffn_dim": 64}
    return TargetModel(families.build(family, changes | {"max_position_embeddings": POSITIONS}), name=family)


@pytest.mark.parametrize("family", ["gpt2", "gptj", pytest.param("biogpt", marks=pytest.mark.long)])
def test_drafts_beyond_a_table_of_positions(family: str) -> None:
    """Catches an IndexError, which ends the process on a GPU, for drafts and windows that reach beyond the table."""
    target, models = target_with_a_table(family), Tables(family)
    texts = [prompt(POSITIONS - NEW), prompt(POSITIONS - NEW - 5, 1)]
    given: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": NO_EOS}
    plain = [rows_of(generate(target, make_drafter("autoregressive", target), [text], **given))[0] for text in texts]
    for name, make in REACHING.items():
        drafter = make(target, models)
        tokens = rows_of(generate(target, drafter, texts[:1] if drafter.max_batch == 1 else texts, **given))
        assert name in LOSSY or tokens == plain[: len(tokens)], name


def test_a_draft_model_of_fewer_positions() -> None:
    """Catches drafts of a draft model that reach beyond its own table, while the target has positions left."""
    target = TargetModel(families.build("gpt2", families.WIDE | {"max_position_embeddings": 256}), name="long")
    small = target_with_a_table("gpt2")
    text = prompt(POSITIONS - NEW)
    expected = rows_of(
        generate(target, make_drafter("autoregressive", target), [text], max_new_tokens=NEW, eos_token_id=NO_EOS)
    )
    for name, options in (("speculative", {"gamma": 9}), ("ouroboros", {"window": 8}), ("llmcad", {"nodes": 20})):
        drafter = make_drafter(name, target, draft_model=small, **options)
        assert drafter.max_context == POSITIONS
        assert rows_of(generate(target, drafter, [text], max_new_tokens=NEW, eos_token_id=NO_EOS)) == expected


# What a CPU's kernels run in bf16: the target's layers, and passes of a head in one call.
BY_KERNELS = ("lookahead", "speculative", "eagle chain", "eagle static", "eagle dynamic", "dspark tree", "kangaroo")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_position_is_beyond_ropes_table(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table of angles that is shorter than the positions of a tree, of a head's rows or of a draft model: a
    CPU's kernels read what lies behind it, torch raises an error."""
    models = Models("cpu", None)
    for quiet in (False, True):
        model = quiet_depths(0.1)("llama") if quiet else tiny.build("llama", head_dim=32)
        models._targets[quiet] = TargetModel(model.to(getattr(torch, dtype)), name="tiny")
    table, asked = Rope.table, list[int]()

    def exact(self: Rope, upto: int) -> Any:
        asked.append(upto)
        angles = tuple(part.clone() for part in table(self, upto))
        for part in angles:
            part[upto:] = torch.nan
        return angles

    def decoded(name: str) -> tuple[list[list[int]], list[Step]]:
        target = models.target(name)
        drafter = METHODS[name](target, models)
        result = generate(target, drafter, [prompt(20)], max_new_tokens=10, eos_token_id=NO_EOS)
        return rows_of(result), result.trace.steps

    for name in METHODS if dtype == "float32" else BY_KERNELS:
        monkeypatch.setattr(Rope, "table", table)
        expected = decoded(name)
        monkeypatch.setattr(Rope, "table", exact)
        asked.clear()
        assert decoded(name) == expected and asked, name
