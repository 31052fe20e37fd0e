"""Released DFlash2 heads, made from the descriptions of z-lab, Model-Optimizer and speculators: read, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from block_reference import block_states
from rigged import BLOCK, SELECTOR, dflash2
from test_block_layouts import same, save_head
from test_eagle3_layouts import LAYERS, rewrite, save_target, written
from torch import Tensor

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export

Config, Weights = dict[str, Any], dict[str, Tensor]
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
LAYER = {
    "model_type": "qwen3", "hidden_size": tiny.HIDDEN_SIZE, "vocab_size": tiny.VOCAB_SIZE, "num_hidden_layers": 2,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rope_theta": 500000.0,
}  # fmt: skip
OWN = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}


def zlab(config: Config) -> None:
    """As z-lab publishes them: the keys of block, convolutions and selector in the group, bidirectional windows."""
    group = {"block_size": 5, "mask_token_id": 2, "target_layer_ids": [0, 1, 2]} | OWN
    config |= {**LAYER, **WINDOWS, "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": group}


def optimizer(config: Config) -> None:
    """As Model-Optimizer exports them: block_size twice, windows by use_swa."""
    zlab(config)
    config |= {"block_size": 5, "layer_types": ["full_attention"] * 2, "num_target_layers": LAYERS}
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 8, "causal": False}


def speculators(config: Config) -> None:
    """As speculators 0.9 saves them: flat keys, states by inputs, windows that end at the anchor."""
    config |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "block_size": 5} | OWN
    config |= {"transformer_layer_config": LAYER | WINDOWS, "aux_hidden_state_layer_ids": [1, 2, 3]}
    config |= {"draft_vocab_size": tiny.VOCAB_SIZE, "mask_token_id": 2, "sample_from_anchor": False}


READ: dict[str, tuple[Callable[[Config], None], dict[str, Any]]] = {
    "z-lab": (zlab, {"sliding_window": 8}),
    "Model-Optimizer": (optimizer, {"sliding_window": 8}),
    "speculators": (speculators, {"sliding_window": 8, "window_edge": "anchor"}),
}
MASKS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda own: None,
    "bare": lambda own: own[None],
    "named": lambda own: {"embedding": own, "mask_token_id": 2},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def released(folder: Path, target: TargetModel, form: str = "z-lab", mask: str = "none") -> tuple[Config, Weights]:
    """A released folder, and what it holds; the mask embedding is among the weights."""
    make, options = READ[form]
    shape = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    more = {"mask_embedding": mask != "none", "shape": shape}
    module = dflash2(target, None, "chain", **options | more).module
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    config: Config = {}
    make(config)
    folder.mkdir()
    if (own := weights.pop("mask_embedding", None)) is not None:
        torch.save(MASKS[mask](own), folder / "mask_embedding.pt")
    rewrite(folder, config, weights)
    return config, weights if own is None else weights | {"mask_embedding": own}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", READ)
def test_a_released_head_computes_as_described(form: str, mask: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches a lost convolution or codebook, other windows, a mask embedding that is ignored, causal blocks."""
    _, weights = released(tmp_path / "released", target, form, mask)
    convert(str(tmp_path / "released"), target.name, tmp_path / "ours")
    same_target = TargetModel.from_pretrained(target.name, "float32", "cpu")
    drafter: Any = load_drafter(str(tmp_path / "ours"), same_target, tree="chain")
    stored = load_checkpoint(tmp_path / "ours")[1]
    assert stored.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in stored.items())
    shape = drafter.module.shape
    assert (shape.block_size, shape.selector_top_k, shape.causal, shape.mask_embedding) == (5, 6, False, mask != "none")
    known = torch.arange(5, 17)[None]
    taps = same_target.features(known, taps=drafter.taps).taps
    states = torch.cat([taps[tap] for tap in drafter.taps], dim=-1)
    block = same_target.embed(torch.tensor([[17, 2, 2, 2, 2]]))
    found = drafter.module(states, block, torch.arange(17)[None])[0]
    expected = block_states(weights, drafter.module.config, states[0], block[0], shape)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}
    plain = generate(same_target, make_drafter("autoregressive", same_target), [[5, 6, 7]], **options).tokens
    assert torch.equal(generate(same_target, drafter, [[5, 6, 7]], **options).tokens, plain)
    if form == "speculators" and mask != "none":
        return  # speculators writes none, and no other form has its windows
    export(str(tmp_path / "ours"), "speculators" if form == "speculators" else "vllm", tmp_path / "again")
    check(tmp_path / "again", None, target.name)
    assert (tmp_path / "again" / "mask_embedding.pt").is_file() == (mask != "none")
    assert "mask_embedding" not in written(tmp_path / "again")[1]
    convert(str(tmp_path / "again"), target.name, tmp_path / "back")
    same(tmp_path / "ours", tmp_path / "back")


def test_the_contract_of_each_reader(target: TargetModel, tmp_path: Path) -> None:
    """Catches keys that vLLM and SGLang look for in the group, one of speculators below the top, a command with our
    name of the method, which engines do not have."""
    head = save_head(tmp_path / "head", "dflash2", target)
    export(head, "vllm", tmp_path / "vllm")
    config, weights = written(tmp_path / "vllm")
    assert config["architectures"] == ["DFlash2DraftModel"] and config["is_causal"] is False
    assert {key: config["dflash_config"][key] for key in (*OWN, "block_size")} == OWN | {"block_size": 5}
    assert weights["candidate_selector.successor_codebook"].shape == (tiny.VOCAB_SIZE, 8)
    assert weights["layers.1.mlp_conv.base_kernel"].shape == (2, 2, tiny.HIDDEN_SIZE)
    text = (tmp_path / "vllm" / "README.md").read_text()
    assert '"method": "dflash"' in text and "algorithm DFLASH " in text and "DFlash2DraftModel.from_pretrained" in text
    assert "is a DFlash2 head for the official code and vLLM and SGLang, " in check(
        tmp_path / "vllm", None, target.name
    )
    export(head, "speculators", tmp_path / "speculators")
    config, _ = written(tmp_path / "speculators")
    assert config["speculators_model_type"] == "dflash2" and {key: config[key] for key in OWN} == OWN
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert "for vLLM and speculators, " in check(tmp_path / "speculators", None, target.name)


Change = Callable[[Config, Weights], object]


def group(**changes: Any) -> Change:
    return lambda config, weights: config["dflash_config"].update(changes)


WRONG: dict[str, tuple[Change, str]] = {
    "no codebooks": (
        lambda c, w: [w.pop(name) for name in [*w] if name.endswith("_codebook")],
        "a DFlash2 head without candidate_selector.predecessor_codebook, candidate_selector.successor_codebook; the",
    ),
    "no selector": (
        lambda c, w: [w.pop(name) for name in [*w] if name.startswith("candidate_selector")],
        "without candidate_selector.predecessor_codebook",
    ),
    "no convolutions": (
        lambda c, w: [w.pop(name) for name in [*w] if "_conv." in name], "without layers.0.attention_conv.base_kernel"
    ),
    "codebooks of another vocabulary": (
        lambda c, w: w.update({"candidate_selector.successor_codebook": torch.ones(60, 8)}),
        r"successor_codebook is \[60, 8\], and must have a row for each of the target's 97 tokens",
    ),
    "rank": (group(selector_rank=16), "selector_rank is 16, and its tensors are those of 8"),
    "no candidates": (group(selector_top_k=None), "selector_top_k must be a whole number of at least 1, found None"),
    "more candidates than tokens": (group(selector_top_k=98), "selector_top_k is 98, and the target's vocabulary"),
    "DFlash's class": (lambda c, w: c.update(architectures=["DFlashDraftModel"]), "and a DFlash2 head DFlash2Draft"),
    "anchor first": (group(sample_from_anchor=True), None),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_contradictions_are_refused(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches a folder that is imported or served as another head: acceptance falls, nothing fails."""
    config, weights = released(tmp_path / "released", target)
    change, message = WRONG[case]
    change(config, weights)
    rewrite(tmp_path / "released", config, weights)
    with pytest.raises(ValueError, match=message or "predicts no token at the anchor"):
        check(tmp_path / "released", "vllm", target.name)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            convert(str(tmp_path / "released"), target.name, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (torch.zeros(47), r"must hold the mask token's embedding of 48 numbers, found \[47\]"),
        ({"embedding": torch.zeros(48), "mask_token_id": 3}, "is for the token 3, and mask_token_id is 2"),
        ({"mask_token_id": 2}, "must hold the mask token's embedding of 48 numbers"),
        (torch.zeros(48, dtype=torch.int64), "must hold the mask token's embedding"),
        (released, "holds more than tensors, or is cut off"),
    ],
)
def test_another_mask_embedding_is_refused(content: Any, told: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches an embedding of another width or token that is broadcast or taken, and a pickle that is run."""
    released(tmp_path / "released", target)
    torch.save(content, tmp_path / "released" / "mask_embedding.pt")
    for program in (lambda: convert(str(tmp_path / "released"), target.name, tmp_path / "out"),
                    lambda: check(tmp_path / "released", None, target.name)):  # fmt: skip
        with pytest.raises(ValueError, match=f"mask_embedding.pt {told}"):
            program()


def test_two_mask_embeddings_are_refused(target: TargetModel, tmp_path: Path) -> None:
    """Catches a tensor that the file replaces without a word."""
    config, weights = released(tmp_path / "released", target, mask="bare")
    rewrite(tmp_path / "released", config, weights)
    with pytest.raises(ValueError, match="has mask_embedding.pt and a tensor mask_embedding; remove the wrong one"):
        convert(str(tmp_path / "released"), target.name, tmp_path / "out")


def test_sizes_follow_from_the_tensors(target: TargetModel, tmp_path: Path) -> None:
    """Catches a rank or group that is a default where config.json leaves it out."""
    config, weights = released(tmp_path / "released", target)
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank"):
        del config["dflash_config"][key]
    rewrite(tmp_path / "released", config, weights)
    convert(str(tmp_path / "released"), target.name, tmp_path / "ours")
    options = load_checkpoint(tmp_path / "ours")[0]["drafter"]
    assert {key: options[key] for key in SELECTOR} == SELECTOR and options["block_size"] == BLOCK["block_size"]
