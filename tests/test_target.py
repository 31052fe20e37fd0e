"""TargetModel: layer ranges, tree attention, rotary tables, fingerprints, frozen ends, and what it refuses."""

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import prompt, target_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafters import TargetModel, load_frozen_ends
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.rows import Placed, Rope, Rows

PARENTS = [ROOT, ROOT, 0, 0, 1, 2, 5]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_features_are_the_lm_heads_input(family: str) -> None:
    """Catches features before the final norm, and taps that are one layer off."""
    target = target_of(family)
    ids = torch.tensor([prompt(13), prompt(13, 1)])
    output = target.features(ids, taps=(0, 2, 4))
    theirs = target.model(ids, output_hidden_states=True)
    torch.testing.assert_close(target.lm_head(output.features), theirs.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.taps[0], target.embed(ids))
    torch.testing.assert_close(output.taps[2], theirs.hidden_states[2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.body.norm(output.taps[4]), output.features, atol=1e-5, rtol=1e-5)


def test_padding_on_the_right_is_harmless() -> None:
    """Catches features of short rows that depend on what fills the batch."""
    target = target_of("llama")
    alone = target.features(torch.tensor([prompt(5)])).features
    padded = target.features(torch.tensor([prompt(5) + [9] * 6, prompt(11)]), lengths=[5, 11]).features
    torch.testing.assert_close(padded[:1, :5], alone, atol=1e-5, rtol=1e-5)


def test_two_threads_share_a_target() -> None:
    """Catches a forward of the stock engine with another thread's layers (Kangaroo's halves) or taps."""
    target, ids = TargetModel(tiny.build("llama"), engine="stock"), torch.tensor([prompt(6)])
    whole, half = target.features(ids, taps=(2,)), target.shallow(ids, None, 2)
    assert torch.equal(whole.taps[2], half)

    def halves(_: int) -> bool:
        return torch.equal(target.shallow(ids, None, 2), half)

    def wholes(_: int) -> bool:
        found = target.features(ids, taps=(2,))
        return torch.equal(found.features, whole.features) and torch.equal(found.taps[2], half)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [pool.map(kind, range(25)) for kind in (halves, wholes) * 2]
            assert all(all(part) for part in found)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layer_ranges_make_the_whole(family: str) -> None:
    """Catches shallow rows written over each other and a resume that reads the wrong slots (Kangaroo)."""
    target = target_of(family)
    ids, new = torch.tensor([prompt(10)]), torch.tensor([prompt(3, 5)])
    whole, parts = target.new_cache(1, 16), target.new_cache(1, 16)
    for cache in (whole, parts):
        target.run(ids, cache)
        cache.commit_first([10])
    expected = target.run(new, whole, taps=(2,))
    shallow = [target.shallow(new[:, i : i + 1], parts, 2, Rows(offset=i)) for i in range(3)]
    hidden = torch.cat(shallow, dim=1)
    torch.testing.assert_close(hidden, expected.taps[2], atol=1e-4, rtol=1e-4)
    found = target.run(hidden, parts, start=2)
    torch.testing.assert_close(found.features, expected.features, atol=1e-4, rtol=1e-4)
    for ours, expected in zip(parts.keys, whole.keys, strict=True):
        torch.testing.assert_close(ours[:, :, :13], expected[:, :, :13], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tree_attention_equals_each_path_alone(family: str) -> None:
    """Catches a node that sees its siblings, positions by row instead of depth, and windows counted in rows."""
    target = target_of(family)
    prompts = [prompt(10), prompt(7)]  # of unequal length, so that rows of the tree start at different slots
    draft = DraftTree(torch.tensor([prompt(7, 3), prompt(7, 4)]), torch.tensor([PARENTS] * 2))
    roots = torch.tensor([[40], [41]])
    cache = target.new_cache(2, 20)
    target.run(torch.tensor([prompts[0], prompts[1] + [0] * 3]), cache)
    cache.commit_first([10, 7])
    see = draft.ancestors()
    output = target.run(torch.cat([roots, draft.tokens], 1), cache, Rows(see, draft.depths(see))).features
    for row, ids in enumerate(prompts):
        for node in range(-1, 7):
            path = [int(draft.tokens[row, j]) for j in range(7) if see[row, node + 1, j + 1]]
            alone = target.features(torch.tensor([[*ids, int(roots[row]), *path]])).features[0, -1]
            torch.testing.assert_close(output[row, node + 1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("lengths", [(10, 10), (10, 7)])
def test_trees_grown_in_parts(family: str, lengths: tuple[int, int]) -> None:
    """Catches a later level at the first one's positions, and a window that siblings push each other out of."""
    target = target_of(family)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    draft = DraftTree(torch.tensor([prompt(10, 3), prompt(10, 4)]), torch.tensor([[-1, -1, *range(1, 9)]] * 2))
    tokens, see = torch.cat([torch.tensor([[40], [41]]), draft.tokens], 1), draft.ancestors()
    depths, cache = draft.depths(see), target.new_cache(2, 24)
    target.run(torch.tensor([ids + [0] * (10 - len(ids)) for ids in prompts]), cache)
    cache.commit_first(list(lengths))
    first = target.run(tokens[:, :5], cache, Rows(see[:, :5, :5], depths[:, :5])).features
    second = target.run(tokens[:, 5:], cache, Rows(see[:, 5:], depths, 5)).features
    for row, ids in enumerate(prompts):
        for node, found in enumerate(torch.cat([first, second], 1)[row]):
            alone = target.features(torch.tensor([ids + tokens[row][see[row, node]].tolist()])).features[0, -1]
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_eager_attention_equals_sdpa(family: str) -> None:
    """Catches a bool mask under eager attention, which transformers adds to the scores instead of masking."""
    target = target_of(family)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(target.config), attn_implementation="eager", dtype=torch.float32
    )
    model.load_state_dict(target.model.state_dict())
    eager = TargetModel(model)
    assert eager.config._attn_implementation == "eager" != target.config._attn_implementation
    ids, new = torch.tensor([prompt(12)]), torch.tensor([prompt(8, 2)])
    see = DraftTree(new[:, 1:], torch.tensor([PARENTS])).ancestors()
    outputs = []
    for one in (target, eager):
        cache = one.new_cache(1, 20)
        first = one.run(ids, cache).features
        cache.commit_first([12])
        outputs.append((first, one.run(new, cache, Rows(see, see.sum(-1) - 1)).features))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    ],
)
def test_rope_table_equals_rotary_embedding(rope: dict[str, Any]) -> None:
    """Catches a table too short, grown wrongly, or kept where the angles depend on the length."""
    model: Any = tiny.build("llama", rope_parameters=rope, num_hidden_layers=1)
    table = Rope(model.model.rotary_emb, model.config, lambda angles: angles, model.model.norm.weight)
    for positions in ([[0, 3, 3, 4], [5, 6, 6, 7]], [[255, 256, 257, 511]], [[1030, 2, 900, 0]]):
        ids = torch.tensor(positions)
        upto = int(ids.max()) + 1
        found = table(Placed(Rows(depths=ids - upto), [upto] * len(ids), ids.shape[1], ids.device))
        expected = model.model.rotary_emb(model.model.norm.weight, position_ids=ids)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_fingerprint_is_of_the_checkpoint(
    stored: torch.dtype, tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """Catches a drafter refused because its target is loaded in another dtype, or accepted by a fine-tune of it."""
    for seed in range(3):
        model = copy.deepcopy(tiny_model("llama", seed=seed)).to(stored)
        model.save_pretrained(tmp_path / str(seed))
    name = str(tmp_path / "0")
    # float16 keeps bfloat16's digits but rounds float32's its own way: no hash survives that.
    dtypes = ["bfloat16", "float32"] + ["float16"] * (stored == torch.bfloat16)
    marks = {TargetModel.from_pretrained(name, dtype=dtype).fingerprint() for dtype in dtypes}
    marks.add(load_frozen_ends(name).fingerprint)
    assert len(marks) == 1
    others = {TargetModel.from_pretrained(str(tmp_path / seed)).fingerprint() for seed in "12"}
    assert len(others) == 2 and not others & marks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_frozen_ends_are_the_targets(tied: bool, sharded: bool, tmp_path: Path) -> None:
    """Catches the embedding taken for an untied LM head, and tensors looked for in the wrong shard."""
    model = tiny.build("qwen3", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    ends = load_frozen_ends(str(tmp_path), dtype="float32")
    target = TargetModel.from_pretrained(str(tmp_path), dtype="float32")
    ids, features = torch.tensor([prompt(6)]), torch.randn(1, 6, target.hidden_size)
    assert torch.equal(ends.embed(ids), target.embed(ids))
    assert torch.equal(ends.lm_head(features), target.lm_head(features))
    assert ends.fingerprint == target.fingerprint()
    assert not ends.embed.weight.requires_grad and not ends.lm_head.weight.requires_grad


SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
