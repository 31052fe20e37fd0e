"""Released DFlash and DSpark heads: one reading of each, or an error that says which key to add."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import status
from rigged import BLOCK
from safetensors.torch import load_file
from test_block_layouts import FIRST, FORMS, same, save_head
from test_eagle3_layouts import LAYERS, rewrite, save_target, written
from test_eagle3_released import changed
from torch import Tensor

import drafters.convert
import drafters.export
from drafters import TargetModel
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export

Config, Weights = dict[str, Any], dict[str, Tensor]
Change = Callable[[Config, Weights], object]
MOVED = "markov_rank markov_head_type enable_confidence_head confidence_head_with_markov mask_token_id target_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def ends(target: TargetModel) -> Weights:
    """Copies of the target's embedding and LM head."""
    stored = load_file(Path(target.name) / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    return {"embed_tokens.weight": embedding, "lm_head.weight": stored.get("lm_head.weight", embedding).clone()}


def zlab(config: Config, weights: Weights) -> None:
    """As z-lab and SpecForge write DFlash: no origin, no layout, the block's size among the keys of the group."""
    for key in ("made_from", "num_target_layers", "draft_vocab_size", "is_causal", "rope_parameters"):
        del config[key]
    config["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": config["dflash_config"]["target_layer_ids"],
                               "block_size": config.pop("block_size")}  # fmt: skip
    for name in [*weights]:
        weights[f"model.{name}"] = weights.pop(name)


def deepspec(config: Config, weights: Weights) -> None:
    """As DeepSpec writes both methods: one class, no layout, copies of the target's embedding and LM head."""
    for key in ("made_from", "sample_from_anchor", "draft_vocab_size", "is_causal"):
        config.pop(key, None)
    config |= {"num_anchors": 512, "architectures": ["Qwen3DSparkModel"]}


def specforge(config: Config, weights: Weights) -> None:
    """As SpecForge writes DSpark: another class, its keys in the group."""
    deepspec(config, weights)
    config["architectures"] = ["DSparkDraftModel"]
    config["dflash_config"] = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    config["dflash_config"] |= {key: config.pop(key) for key in MOVED.split()}


def block7(config: Config, weights: Weights) -> None:
    """DeepSpec's DFlash: anchor-first, in the class of DSpark."""
    group = config.pop("dflash_config")
    deepspec(config, weights)
    config |= {"markov_rank": 0, "enable_confidence_head": False, "mask_token_id": 2}
    config["target_layer_ids"] = group["target_layer_ids"]


# Form that is exported, options of the head, the change, what is given, copies of the target's are in the file.
READ: dict[str, tuple[str, dict[str, Any], Change, str | None, bool]] = {
    "z-lab": ("sglang dflash", {}, zlab, None, False),
    "DeepSpec's DSpark": ("sglang dspark", {"markov_head": "vanilla"}, deepspec, None, True),
    "DeepSpec's gated DSpark": ("sglang dspark", {"markov_head": "gated"}, deepspec, None, True),
    "DeepSpec's block 7": ("speculators dflash, anchor first", {}, block7, None, True),
    "SpecForge's DSpark": ("sglang dspark", {"markov_head": "rnn"}, specforge, "anchor-first", False),
    "speculators' DFlash": ("speculators dflash", {}, lambda c, w: c.pop("sample_from_anchor"), None, False),
    "speculators' DSpark": ("speculators dspark", {}, lambda c, w: c.pop("sample_from_anchor"), "anchor-first", False),
}


@pytest.mark.parametrize("case", READ)
def test_a_released_head_is_read_as_it_was_trained(
    case: str, target: TargetModel, ends: Weights, tmp_path: Path
) -> None:
    """Catches the other layout, states shifted by one, a lost Markov head, and a copy of the target's LM head that is
    taken for the head's own."""
    form, more, change, layout, copies = READ[case]
    to, method, options = FORMS[form]
    head = save_head(tmp_path / "head", method, target, **options | more)
    if case == "DeepSpec's block 7":  # no engine serves it, so that it has no export in this form
        to, options = "vllm", {}
        export(save_head(tmp_path / "other", method, target), to, tmp_path / "released")
    else:
        export(head, to, tmp_path / "released")
    config, weights = written(tmp_path / "released")
    if case == "DeepSpec's block 7":
        weights = {name: value.clone() for name, value in load_checkpoint(head)[1].items()}
    change(config, weights)
    if "transformer_layer_config" in config:
        del config["made_from"]
    rewrite(tmp_path / "released", config, weights | (ends if copies else {}))
    notes = convert(str(tmp_path / "released"), target.name, tmp_path / "ours", layout=layout)
    assert any("its lm_head.weight (float32) is the target's, and was left out" in note for note in notes) == copies
    same(head, tmp_path / "ours")


@pytest.mark.parametrize("form", ["speculators' DSpark", "SpecForge's DSpark"])
def test_an_ambiguous_folder_names_the_key(
    form: str, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a guess, and advice that does not help: 1% of the drafts are accepted with the other layout."""
    exported, more, change, _, _ = READ[form]
    to, method, options = FORMS[exported]
    export(save_head(tmp_path / "head", method, target, **options | more), to, tmp_path / "released")
    config, weights = written(tmp_path / "released")
    change(config, weights)
    config.pop("made_from", None)
    rewrite(tmp_path / "released", config, weights)
    line = [str(tmp_path / "released"), "--target", target.name, "--out", str(tmp_path / "ours")]
    assert status(drafters.convert.main, *line) == 1
    told = capsys.readouterr().err
    advice = "--out OUT --layout anchor-first (and --layout fill-in). Then python -m eval.parity --checkpoint OUT"
    for part in ("does not say its layout", 'State it by "sample_from_anchor": true (anchor-first)', advice):
        assert part in told
    assert status(drafters.export.main, "--check", str(tmp_path / "released"), "--target", target.name) == 1
    assert "does not say its layout" in capsys.readouterr().err
    for layout in ("fill-in", "anchor-first"):
        assert status(drafters.convert.main, *line[:-1], str(tmp_path / layout), "--layout", layout) == 0
        assert load_checkpoint(tmp_path / layout)[0]["drafter"]["layout"] == layout
        rewrite(tmp_path / "released", config | {"sample_from_anchor": layout == "anchor-first"}, weights)
        convert(str(tmp_path / "released"), target.name, tmp_path / f"{layout}-by-key")
        same(tmp_path / layout, tmp_path / f"{layout}-by-key")
        rewrite(tmp_path / "released", config, weights)


def flash(**changes: Any) -> Change:
    return lambda config, weights: config["dflash_config"].update(changes)


# What is wrong in an export of a DFlash head with a draft vocabulary for vLLM, and what is said.
WRONG: dict[str, tuple[Change, str]] = {
    "DFlash2's class": (lambda c, w: c.update(architectures=["DFlash2DraftModel"]), "architectures is DFlash2DraftM"),
    "Gemma's class": (lambda c, w: c.update(architectures=["Gemma4DSparkModel"]), "architectures is Gemma4DSparkModel"),
    "DFlash2's convolution": (flash(conv_kernel_size=2), "conv_kernel_size is 2: it is a DFlash2 head without"),
    "DFlash2's selector": (flash(selector_rank=256), "selector_rank is 256: it is a DFlash2 head without"),
    "Domino": (flash(projector_type="domino"), "projector_type is 'domino': it is a head with another projector"),
    "scaled logits": (flash(output_multiplier=0.2), "output_multiplier is 0.2"),
    "RoPE in pairs": (lambda c, w: c.update(rope_is_neox_style=False), "rope_is_neox_style is False: .* interleaved"),
    "windows without a length": (
        lambda c, w: c.update(layer_types=["sliding_attention", "full_attention"]), "and sliding_window is None",
    ),
    "windows of some layer": (
        lambda c, w: c.update(use_sliding_window=True, sliding_window=64) or c.pop("layer_types"), "add them: .sliding",
    ),
    "types of too few layers": (
        lambda c, w: c.update(layer_types=["sliding_attention"], sliding_window=64), "1 entries for 2 layers",
    ),
    "a window below a block": (
        lambda c, w: c.update(layer_types=["sliding_attention"] * 2, sliding_window=4), "is 4, and a block has 5 rows",
    ),
    "windows of two lengths": (
        lambda c, w: c.update(sliding_window=8, use_swa=True, swa_window_size=16),
        "all layers have windows of 16, and beside it .* sliding_window 8; correct one",
    ),
    "windows of all layers and of some": (
        lambda c, w: c.update(use_swa=True, swa_window_size=8, layer_types=["sliding_attention", "full_attention"]),
        "all layers have windows of 8, and beside it layer_types is .*full_attention",
    ),
    "use_swa without a length": (lambda c, w: c.update(use_swa=True), "there is no swa_window_size"),
    "another method": (lambda c, w: c.update(speculators_model_type="dflash2"), "speculators_model_type is 'dflash2'"),
    "a group as a list": (lambda c, w: c.update(dflash_config=["x"]), r"dflash_config: .* an object .*\['x'\]"),
    "two values": (lambda c, w: (c.update(mask_token_id=3)), "mask_token_id is 2 in dflash_config and 3 beside it"),
    "two layouts": (flash(sample_from_anchor=True), r"two layouts: fill-in .made_from: layout., anchor-first .sample"),
    "a layout of no name": (lambda c, w: c["made_from"].update(layout="shifted"), "layout is 'shifted', and must be"),
    "layout as a number": (flash(sample_from_anchor=0), "dflash_config.sample_from_anchor: .* boolean .found 0"),
    "no mask": (flash(mask_token_id=None), "mask_token_id must be a whole number of at least 0, found None; add it"),
    "mask outside": (flash(mask_token_id=97), "mask_token_id is 97, and the target's vocabulary has 97 tokens"),
    "no block size": (lambda c, w: c.pop("block_size"), "block_size must be a whole number of at least 2, found None"),
    "no states": (
        lambda c, w: (c["dflash_config"].pop("target_layer_ids"), c["made_from"].pop("taps")),
        r'does not say which 3 hidden states .*usual ones: --taps 2,3,5.* as "target_layer_ids": \[...\], one less',
    ),
    "states by inputs": (flash(target_layer_ids=[1, 2, 3]), "means the hidden states .2, 3, 4., and made_from .1"),
    "two numberings": (
        lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        "target_layer_ids means the hidden states .1, 2, 3., and aux_hidden_state_layer_ids .0, 1, 2.",
    ),
    "too few states": (flash(target_layer_ids=[0, 1]), "names 2 states, .0, 1., and fc.weight takes 3"),
    "beyond the target": (
        lambda c, w: (c["made_from"].pop("taps"), flash(target_layer_ids=[0, 1, 7])(c, w)),
        "reads the hidden states .1, 2, 8., and the target has 0",
    ),
    "another depth": (lambda c, w: c.update(num_target_layers=36), f"layers is 36, and the target has {LAYERS}"),
    "causal twice": (lambda c, w: c.update(is_causal=True), "{.causal.: False, .is_causal.: True} must be alike"),
    "no d2t": (lambda c, w: w.pop("d2t"), "lm_head.weight has 60 rows for 97 tokens, and there is no d2t"),
    "no Markov head of a rank": (lambda c, w: c.update(markov_rank=8), "markov_rank is 8, and there is no markov_"),
}  # fmt: skip
# In an export of a DSpark head.
WRONG_DSPARK: dict[str, tuple[Change, str]] = {
    "z-lab's class": (lambda c, w: c.update(architectures=["DFlashDraftModel"]), "whose readers drop the Markov head"),
    "rank": (lambda c, w: c.update(markov_rank=16), "markov_rank is 16, and markov_w1.weight has 8 columns"),
    "kind": (lambda c, w: c.update(markov_head_type="rnn"), "markov_head_type is 'rnn', and its tensors .* vanilla"),
    "confidence off": (lambda c, w: c.update(enable_confidence_head=False), "holds a confidence_head.proj.weight, and"),
    "no confidence": (
        lambda c, w: (w.pop("confidence_head.proj.weight"), w.pop("confidence_head.proj.bias")),
        "holds no confidence_head.proj.weight, and enable_confidence_head is True",
    ),
    "confidence of the state": (
        lambda c, w: c.update(confidence_head_with_markov=False), "confidence head does not read the token before"
    ),
    "no Markov head": (
        lambda c, w: [w.pop(name) for name in [*w] if name.startswith("markov_head")],
        "has a confidence head and no Markov head",
    ),
    "bonus anchor": (lambda c, w: c.update(dspark_bonus_anchor=True), "has two layouts: anchor-first .* fill-in"),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    export(save_head(folder / "flash", "dflash", target, draft_vocab_size=60), "vllm", folder / "dflash")
    export(save_head(folder / "spark", "dspark", target, **FIRST), "vllm", folder / "dspark")
    return folder


@pytest.mark.parametrize("case", [*WRONG, *WRONG_DSPARK])
def test_contradictions_are_refused(case: str, served: Path, target: TargetModel, tmp_path: Path) -> None:
    """Catches a folder that is imported or served in the wrong one of its readings: acceptance falls, nothing fails."""
    change, message = (WRONG | WRONG_DSPARK)[case]
    folder = changed(served / ("dspark" if case in WRONG_DSPARK else "dflash"), change, tmp_path)
    with pytest.raises(ValueError, match=message):
        check(folder, None, target.name)
    with pytest.raises(ValueError, match=message):
        convert(str(folder), target.name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line_must_agree(served: Path, target: TargetModel, tmp_path: Path) -> None:
    """Catches --layout that overrides what the folder states, and one given for a head that has none."""
    with pytest.raises(ValueError, match=r"two layouts: .* anchor-first .--layout.; correct config\.json"):
        convert(str(served / "dflash"), target.name, tmp_path / "out", layout="anchor-first")
    with pytest.raises(ValueError, match=r"means the hidden states \[1, 2, 3\], and --taps \[2, 3, 4\]"):
        convert(str(served / "dflash"), target.name, tmp_path / "out", taps=[2, 3, 4])
    convert(str(served / "dflash"), target.name, tmp_path / "out", layout="fill-in", taps=[1, 2, 3])
    same(tmp_path / "out", served / "flash")


def test_the_check_names_who_serves_it(served: Path, target: TargetModel, tmp_path: Path) -> None:
    """Catches a folder that a program loads without its draft vocabulary, and a causal block of speculators."""
    assert "is a DSpark head for vLLM and SGLang and llama.cpp, " in check(served / "dspark", None, target.name)
    assert "is a DFlash head for vLLM, " in check(served / "dflash", "vllm", target.name)
    with pytest.raises(ValueError, match=r"is not for SGLang: it drafts with the target's LM head"):
        check(served / "dflash", "sglang", target.name)
    with pytest.raises(ValueError, match=r"checked against its target; add --target MODEL"):
        check(served / "dflash")
    export(save_head(tmp_path / "head", "dflash", target), "speculators", tmp_path / "out")
    config, weights = written(tmp_path / "out")
    rewrite(tmp_path / "out", config | {"sliding_window_non_causal": False}, weights)
    assert re.search("is a DFlash head for speculators, ", check(tmp_path / "out", None, target.name))
    with pytest.raises(ValueError, match="_non_causal is false, so that the rows of a block would see earlier rows"):
        check(tmp_path / "out", "vllm", target.name)
    assert BLOCK["block_size"] == config["block_size"]
