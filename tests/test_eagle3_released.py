"""Released EAGLE-3 heads: one reading of each, or an error that says which key to add."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import status
from test_eagle3_layouts import IDS, USUAL, V31, rewrite, save_head, save_target, written
from torch import Tensor
from transformers import Qwen3Config

import drafters.convert
import drafters.export
from drafters import TargetModel
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export
from drafters.model.layers import layer_kind

Config, Weights = dict[str, Any], dict[str, Tensor]
Change = Callable[[Config, Weights], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def specforge(config: Config, weights: Weights) -> None:
    """As SpecForge writes a head: no origin, and the usual states under the numbers of layers' outputs."""
    del config["made_from"], config["target_hidden_size"], config["num_aux_hidden_states"], config["rope_parameters"]
    config["eagle_config"] = {IDS: [tap - 1 for tap in USUAL]}
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if not config[flag]:
            del config[flag]


def former_names(config: Config, weights: Weights) -> None:
    """SGLang's former names of the norms, and its former key."""
    del config["fc_norm"]
    config["use_aux_norm"] = True
    for place, name in enumerate(("low", "mid", "high")):
        weights[f"aux_norm_{name}.weight"] = weights.pop(f"fc_norm.{place}.weight")


def with_ids(*ids: int, key: str = "eagle_config") -> Change:
    def change(config: Config, weights: Weights) -> None:
        specforge(config, weights)
        config.pop("eagle_config")
        config[IDS if key == IDS else key] = list(ids) if key == IDS else {IDS: list(ids)}

    return change


# What changes in an export for SGLang; options of the head that was exported; what the import says; how it reads it.
READ: dict[str, tuple[Change, dict[str, Any], str, list[int]]] = {
    "SpecForge": (specforge, {"draft_vocab_size": 60}, "are outputs of layers, as in SpecForge and SGLang", USUAL),
    "SpecForge 3.1": (specforge, V31, 'SpecForge up to 0.3.0 fed back .* set "norm_output": false', USUAL),
    "former names": (former_names, V31, "", USUAL),
    "inputs": (with_ids(*USUAL), {}, r"inputs of layers, .* SGLang would read the states \[3, 4, 5\]", USUAL),
    "up to the end": (with_ids(3, 5, 7), {}, "are inputs of layers", [3, 5, 7]),
    "the embeddings": (with_ids(-1, 3, 5), {}, "are outputs of layers", [0, 4, 6]),
    "key at the top": (with_ids(1, 3, 5, key=IDS), {}, "", [1, 3, 5]),
    "none": (lambda c, w: (specforge(c, w), c.pop("eagle_config")), {}, "names no states: it reads", USUAL),
    "a window": (lambda c, w: c.update(use_sliding_window=True, sliding_window=512), {}, "window of 512", USUAL),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_how_released_heads_are_read(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches states shifted by one, which keep half of the acceptance, and feedback that was not trained."""
    change, options, note, taps = READ[case]
    head = save_head(tmp_path / "head", target, **options)
    export(head, "sglang", tmp_path / "released")
    config, weights = written(tmp_path / "released")
    change(config, weights)
    rewrite(tmp_path / "released", config, weights)
    notes = convert(str(tmp_path / "released"), target.name, tmp_path / "ours")
    assert re.search(note, "".join(notes))
    read, kept = load_checkpoint(tmp_path / "ours")
    assert read["drafter"] == {"taps": taps, **options}
    before = load_checkpoint(head)[1]
    assert before.keys() == kept.keys() and all(torch.equal(value, kept[name]) for name, value in before.items())


@pytest.mark.parametrize("null", [False, True])
def test_the_nested_form_fills_in_the_defaults_of_its_family(null: bool, target: TargetModel, tmp_path: Path) -> None:
    """Catches a head of speculators read with other heads or another epsilon: it stores only what differs, or null."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "head_dim": 128}
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    head = save_head(tmp_path / "head", target, layer="qwen3", layers=2, shape=shape)
    export(head, "speculators", tmp_path / "released")
    config, weights = written(tmp_path / "released")
    del config["made_from"]
    layer, defaults = config["transformer_layer_config"], Qwen3Config()
    for key in [key for key, value in layer.items() if getattr(defaults, key, None) == value]:
        if key != "model_type":
            layer[key] = None
    assert {key for key, value in layer.items() if value is None} >= {"head_dim", "rms_norm_eps", "rope_parameters"}
    if not null:
        config["transformer_layer_config"] = {key: value for key, value in layer.items() if value is not None}
    rewrite(tmp_path / "released", config, weights)
    convert(str(tmp_path / "released"), target.name, tmp_path / "ours")
    folders = (head, tmp_path / "ours")

    def kind(shape: Eagle3Shape) -> dict[str, Any]:
        return layer_kind(target.config, shape.layer, shape.shape).config.to_dict()

    made, read = (Eagle3Shape(**load_checkpoint(folder)[0]["drafter"]) for folder in folders)
    assert (made.taps, made.layer, made.layers) == (read.taps, read.layer, read.layers)
    assert kind(made) == kind(read)


def shifted(weights: Weights) -> None:
    weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))  # ids where offsets belong


# What is wrong in an export for vLLM of an EAGLE-3.1 head with a draft vocabulary, and what is said.
WRONG: dict[str, tuple[Change, str]] = {
    "no d2t": (lambda c, w: w.pop("d2t"), "lm_head.weight has 60 rows for 97 tokens, and there is no d2t"),
    "ids in d2t": (lambda c, w: shifted(w), "d2t: draft tokens .* holds offsets|d2t: draft tokens mean"),
    "t2d": (lambda c, w: w["t2d"].copy_(~w["t2d"]), r"t2d \[97\] marks 37 tokens, which are not the 60 of d2t"),
    "draft_vocab_size": (lambda c, w: c.update(draft_vocab_size=61), "draft_vocab_size is 61, and lm_head.w.* 60"),
    "no lm_head": (lambda c, w: w.pop("lm_head.weight"), "a draft vocabulary .*, and no lm_head.weight"),
    "fc's width": (lambda c, w: w.update({"fc.weight": w["fc.weight"][:, :100].clone()}), "must be a multiple of 48"),
    "too few ids": (lambda c, w: c["eagle_config"].update({IDS: [2, 3]}), "names 2 states, .2, 3., and fc.* takes 3"),
    "count": (lambda c, w: c.update(num_aux_hidden_states=4), "num_aux_hidden_states is 4, and fc.weight"),
    "two lists": (lambda c, w: c.update({IDS: [1, 2, 3]}), "is .1, 2, 3., and .2, 3, 4. in eagle_config"),
    "made from others": (lambda c, w: c["made_from"].update(taps=[1, 3, 5]), "means the hidden states .2, 3, 4., and"),
    "beyond the target": (
        lambda c, w: (c["eagle_config"].update({IDS: [2, 3, 8]}), c.pop("made_from")),
        "reads the hidden states .2, 3, 8., and the target has 0 .embeddings. to 7",
    ),
    "hidden size": (lambda c, w: c.update(hidden_size=96), "hidden_size is 96 in config.json, and 48 in the target"),
    "own width": (lambda c, w: c.update(target_hidden_size=96), "target_hidden_size is 96, and hidden_size 48"),
    "both norms": (
        lambda c, w: (c.update(norm_before_fc=True), c["eagle_config"].update(norm_before_fc=True),
                      w.update({"input_norm.weight": torch.ones(144)})), "norm_before_fc and fc_norm are both true"
    ),
    "two flags": (lambda c, w: c.update(norm_before_fc=True), "is False in eagle_config and True beside"),
    "a norm too many": (lambda c, w: c.update(fc_norm=False), 'holds fc_norm.0.weight, .* set "fc_norm": true'),
    "a norm too few": (lambda c, w: w.pop("fc_norm.0.weight"), 'not hold fc_norm.0.weight, .* set "fc_norm": false'),
    "biases": (lambda c, w: c.update(attention_bias=True), "has biases"),
    "activation": (lambda c, w: c.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "no RoPE of ours": (lambda c, w: c.update(rope_parameters={"rope_type": "longrope"}), "RoPE is of type 'longrope'"),
    "ambiguous": (
        lambda c, w: (c.update(architectures=["LlamaForCausalLMEagle3"]), c.pop("made_from"),
                      c["eagle_config"].update({IDS: [1, 3, 5]})),
        r"may mean the hidden states \[2, 4, 6\] \(SGLang.* or \[1, 3, 5\] \(vLLM.*\{.taps.: \[...\]\}.*"
        r"--out OUT --taps 2,4,6 \(and --taps 1,3,5\)\. Then python -m eval\.parity --checkpoint OUT",
    ),
    "a group as text": (lambda c, w: c.update(eagle_config="x"), "eagle_config: .* an object of keys .*found 'x'"),
    "steps as text": (lambda c, w: c["made_from"].update(trained_steps="x"), "trained_steps"),
}  # fmt: skip
# What an import can do without, and an engine cannot.
SERVED_WRONG: dict[str, tuple[Change, str]] = {
    "positions": (lambda c, w: c.update(max_position_embeddings=2048), "max_position_embeddings is 2,048, and 4,096"),
    "no positions": (lambda c, w: c.pop("max_position_embeddings"), "max_position_embeddings is 2,048, and 4,096"),
    "older RoPE": (lambda c, w: c.update(rope_theta=1e4), "is 500000 in rope_parameters and 10000 for readers"),
    "another RoPE": (
        lambda c, w: c.update(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "RoPE is .*10000.*, and was .*500000.* in training",
    ),
    "missing": (lambda c, w: w.pop("norm.weight"), "missing tensors: norm.weight .they would be left random"),
    "unknown": (lambda c, w: w.update({"scale": torch.ones(1)}), "unknown tensors: scale"),
    "NaN": (lambda c, w: w["norm.weight"][3:4].fill_(torch.nan), "norm.weight holds NaN"),
    "shape": (lambda c, w: w.update({"norm.weight": torch.ones(47)}), r"norm.weight is \[47\], and .* \[48\]"),
    "dtype": (lambda c, w: w.update({"norm.weight": w["norm.weight"].double()}), "the tensors are float32, float64"),
    "architecture": (lambda c, w: c.update(architectures=["Llama"]), "architectures is Llama; known: LlamaForCausalLM"),
    "another target": (lambda c, w: c["made_from"].update(target_fingerprint="x"), "for .* is another model"),
}  # fmt: skip
# What an import only notes, and an engine may serve otherwise than it was trained.
DOUBTFUL: dict[str, tuple[Change, str]] = {
    "a window": (
        lambda c, w: c.update(use_sliding_window=True, sliding_window=512), "its window of 512 tokens is not that of"
    ),
    "windows of some layers": (
        lambda c, w: c.update(layer_types=["sliding_attention", "full_attention"], sliding_window=512),
        "its window of 512 tokens is not that of all",
    ),
    "SpecForge's norm_output": (
        lambda c, w: (c.update(architectures=["LlamaForCausalLMEagle3"]), c.pop("made_from"),
                      c["eagle_config"].update({IDS: [1, 2, 3]})),
        'SpecForge up to 0.3.0 fed back .* set "norm_output": false in config.json, else state it with "made_from"',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    export(save_head(folder / "head", target, draft_vocab_size=60, **V31), "vllm", folder / "vllm")
    return folder / "vllm"


def changed(served: Path, change: Change, tmp_path: Path) -> Path:
    """A copy of an exported head with ``change``."""
    config, weights = written(served)
    change(config, weights)
    folder = tmp_path / "changed"
    folder.mkdir()
    rewrite(folder, config, weights)
    return folder


@pytest.mark.parametrize("case", [*WRONG, *SERVED_WRONG, *DOUBTFUL])
def test_contradictions_are_refused(case: str, served: Path, target: TargetModel, tmp_path: Path) -> None:
    """Catches a folder that is imported or served in the wrong one of its readings: acceptance falls, nothing fails."""
    change, message = (WRONG | SERVED_WRONG | DOUBTFUL)[case]
    folder = changed(served, change, tmp_path)
    with pytest.raises(ValueError, match=message):
        check(folder, None, target.name)
    if case in WRONG:
        with pytest.raises(ValueError, match=message):
            convert(str(folder), target.name, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    if case in DOUBTFUL:
        assert any(re.search(message, note) for note in convert(str(folder), target.name, tmp_path / "out"))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("a window", {"layer_types": ["sliding_attention"]}),
        ("SpecForge's norm_output", {"made_from": {"norm_output": True}}),
    ],
)
def test_a_doubt_can_be_settled(case: str, keys: Config, served: Path, target: TargetModel, tmp_path: Path) -> None:
    """Catches a head that was trained as its folder says, and is refused for ever."""
    config, weights = written(served)
    DOUBTFUL[case][0](config, weights)
    rewrite(tmp_path, config | keys, weights)
    assert "is an EAGLE-3 head for " in check(tmp_path, None, target.name)


def test_what_the_user_states_settles_what_is_ambiguous(
    served: Path, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches advice of an error that does not help, and --taps that override what the folder says."""
    config, weights = written(served)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 5]}}
    line = ["--target", target.name, "--out"]
    for taps in ([2, 4, 6], [1, 3, 5]):
        folder, option = tmp_path / f"{taps[0]}", ["--taps", ",".join(map(str, taps))]
        folder.mkdir()
        rewrite(folder, config | {"made_from": {"taps": taps}}, weights)
        convert(str(folder), target.name, tmp_path / f"{taps[0]}-ours")
        assert load_checkpoint(tmp_path / f"{taps[0]}-ours")[0]["drafter"]["taps"] == taps
        assert status(drafters.convert.main, str(folder), *line, str(tmp_path / f"{taps[0]}-both"), *option) == 0
        rewrite(folder, {key: value for key, value in config.items() if key != "made_from"}, weights)
        assert status(drafters.convert.main, str(folder), *line, str(tmp_path / f"{taps[0]}-given"), *option) == 0
        assert load_checkpoint(tmp_path / f"{taps[0]}-given")[0]["drafter"]["taps"] == taps
    rewrite(folder, config | {"made_from": {"taps": [1, 3, 5]}}, weights)
    for given, told in (
        ("2,4,6", "means the hidden states [1, 3, 5], and --taps [2, 4, 6]; correct one"),
        ("1,3", "--taps names 2 states, [1, 3], and fc.weight takes 3"),
    ):
        assert status(drafters.convert.main, str(folder), *line, str(tmp_path / "no"), "--taps", given) == 1
        assert told in capsys.readouterr().err


def test_the_check_names_who_would_read_other_states(
    target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a folder that two programs load, with states one layer apart."""
    head = save_head(tmp_path / "head", target, taps=[1, 3, 6])
    export(head, "sglang", tmp_path / "sglang")
    line = ["--check", str(tmp_path / "sglang"), "--target", target.name]
    assert status(drafters.export.main, *line) == 0
    assert "is an EAGLE-3 head for SGLang, " in capsys.readouterr().out
    assert status(drafters.export.main, *line, "--to", "vllm") == 1
    assert "would read the hidden states [0, 2, 5], and the head was trained on [1, 3, 6]" in capsys.readouterr().err
    assert status(drafters.export.main, *line[:2]) == 1
    assert "checked against its target; add --target MODEL" in capsys.readouterr().err
    config, weights = written(tmp_path / "sglang")
    specforge(config, weights)
    rewrite(tmp_path / "sglang", config, weights)
    assert status(drafters.export.main, *line) == 0
    assert "note: its eagle_aux_hidden_state_layer_ids [1, 2, 3] are outputs of layers" in capsys.readouterr().out
    export(head, "vllm", tmp_path / "vllm")
    assert "for vLLM and llama.cpp, " in check(tmp_path / "vllm", "vllm", target.name)
    status(drafters.convert.main, str(tmp_path / "vllm"), "--target", target.name, "--out", str(tmp_path / "ours"),
           "--exit-layer", "2")  # fmt: skip
    assert "is an EAGLE-3 head, which has none; leave it out" in capsys.readouterr().err
