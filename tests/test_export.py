"""Checkpoints in the form of their authors and of other engines."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from by_keys import new_head
from programs import status
from published import assert_equal, eagle_features, kangaroo_states, served_features
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen2Config

import drafters.export
from drafters import TargetModel
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.forms import in_one_dtype
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.export import check, export
from drafters.methods.eagle import EagleDrafter
from drafters.model.draft_head import DRAFT_IDS
from drafters.model.layers import default_layer

EXIT = 2
# What each reader's own loader makes of a head of this width: names, shapes, config.json. From its source, in words.
WIDE, QUERIES, KEYS, INNER = tiny.HIDDEN_SIZE, 48, 24, 80
LAYER = {
    "layers.0.self_attn.q_proj.weight": [QUERIES, WIDE],
    "layers.0.self_attn.k_proj.weight": [KEYS, WIDE],
    "layers.0.self_attn.v_proj.weight": [KEYS, WIDE],
    "layers.0.self_attn.o_proj.weight": [WIDE, QUERIES],
}
EAGLE = LAYER | {
    "fc.weight": [WIDE, 2 * WIDE],
    "layers.0.mlp.gate_proj.weight": [INNER, WIDE],
    "layers.0.mlp.up_proj.weight": [INNER, WIDE],
    "layers.0.mlp.down_proj.weight": [WIDE, INNER],
    "layers.0.post_attention_layernorm.weight": [WIDE],
}
CONTRACTS: dict[str, tuple[dict[str, list[int]], dict[str, Any]]] = {
    # vLLM: Eagle is put in front of the architecture; "bias" means the attention's. The official code: "bias" is fc's.
    "vllm": (EAGLE, {"architectures": ["LlamaForCausalLM"], "bias": False}),
    "official": (EAGLE, {"architectures": ["LlamaForCausalLM"], "bias": False, "rope_scaling": None}),
    "sglang": (EAGLE | {"fc.bias": [WIDE]}, {"architectures": ["LlamaForCausalLMEagle"], "bias": False}),
    "kangaroo": (LAYER | {"layers.0.input_layernorm.weight": [WIDE], "norm.weight": [WIDE]}, {"rope_scaling": None}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def save_target(path: Path, family: str = "llama") -> TargetModel:
    """A tiny target with heads of the width that Llama's have."""
    if family == "qwen2":
        small = tiny.tiny_config("llama", head_dim=12).to_dict()
        keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        model: Any = tiny.AutoModelForCausalLM.from_config(Qwen2Config(**{key: small[key] for key in keys.split()}))
    else:
        model = tiny.build(family, head_dim=12)
    model.save_pretrained(path)
    return TargetModel(model, name=str(path))


def save_head(folder: Path, target: TargetModel, **options: Any) -> str:
    """An EAGLE head with weights of its own everywhere; with an exit layer, a Kangaroo adapter."""
    torch.manual_seed(3)
    kangaroo = "exit_layer" in options
    module: nn.Module = (
        KangarooAdapter(target.config, KangarooShape(exit_layer=1))
        if kangaroo
        else new_head(EagleDrafter, target.config, **options)
    )
    with torch.no_grad():
        for value in module.parameters():
            value += 0.3 * torch.randn_like(value)
    config = make_config("kangaroo" if kangaroo else "eagle", options, target)
    save_checkpoint(folder, module, config, dtype=None)
    return str(folder)


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    file = folder / "model.safetensors"
    weights = load_file(file) if file.is_file() else torch.load(folder / "pytorch_model.bin", weights_only=True)
    return json.loads((folder / "config.json").read_text()), weights


def exported(form: str, target: TargetModel, folder: Path, **options: Any) -> Path:
    """A head exported in one of ``CONTRACTS``."""
    options |= {"exit_layer": EXIT} if form == "kangaroo" else {}
    head = save_head(folder / "head", target, **options)
    export(head, "official" if form == "kangaroo" else form, folder / form)
    return folder / form


@pytest.mark.parametrize("form", CONTRACTS)
def test_the_contract_of_each_reader(form: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches "bias": true, with which vLLM accepts nothing and says nothing; a layer count or a width of the target's;
    tensors renamed, left out or cast on the way; a file that the official Kangaroo code does not open."""
    out = exported(form, target, tmp_path)
    config, weights = written(out)
    shapes, keys = CONTRACTS[form]
    assert {name: list(value.shape) for name, value in weights.items()} == shapes
    assert {key: config[key] for key in keys} == keys
    read = LlamaConfig.from_pretrained(out)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rope_parameters"):
        assert getattr(read, name) == getattr(target.config, name), name
    assert read.num_hidden_layers == 1 and config["rope_theta"] == target.config.rope_parameters["rope_theta"]
    before = load_checkpoint(tmp_path / "head")[1]
    assert all(torch.equal(before[name], weights[name]) for name in before)
    assert not weights.get("fc.bias", torch.zeros(1)).any()
    readme = (out / "README.md").read_text()
    command = {"vllm": "vllm serve", "official": "EaModel.from_pretrained", "sglang": "sglang.launch_server"}
    assert command.get(form, f"--exitlayer {EXIT}") in readme
    assert f"--check {out.name} --target {Path(target.name).name} " in readme and str(tmp_path) not in readme
    assert check(out, "official" if form == "kangaroo" else form, target.name).endswith(f", for {target.name}")


@pytest.mark.parametrize("fc_bias", [False, True])
def test_the_published_head_gives_our_features(fc_bias: bool, target: TargetModel, tmp_path: Path) -> None:
    """Catches a head that trains and exports as something else than EAGLE: other inputs, positions or norms."""
    weights = written(exported("official", target, tmp_path, fc_bias=fc_bias))[1]
    assert ("fc.bias" in weights) == fc_bias
    head = EagleHead(target.config, EagleShape(fc_bias=fc_bias))
    head.load_state_dict(load_checkpoint(tmp_path / "head")[1])
    features, embeddings = torch.randn(2, 7, target.hidden_size).unbind()
    with torch.no_grad():
        ours = head(features[None], embeddings[None], torch.arange(7)[None])[0]
    assert_equal(ours, eagle_features(weights, target.config, features, embeddings))


def test_the_published_adapter_gives_our_states(target: TargetModel, tmp_path: Path) -> None:
    """Catches an adapter that is not Kangaroo's: a norm too few, an MLP, other positions."""
    weights = written(exported("kangaroo", target, tmp_path))[1]
    adapter = KangarooAdapter(target.config, KangarooShape(exit_layer=1))
    adapter.load_state_dict(load_checkpoint(tmp_path / "head")[1])
    states = torch.randn(7, target.hidden_size)
    with torch.no_grad():
        ours = adapter(states[None], torch.arange(7)[None])[0]
    assert_equal(ours, kangaroo_states(weights, target.config, states))


def test_a_bias_goes_where_it_is_read(target: TargetModel, tmp_path: Path) -> None:
    """Catches a bias left out by vLLM in silence, taken for the attention's, or dropped where it is read."""
    head = save_head(tmp_path / "head", target, fc_bias=True)
    with pytest.raises(ValueError, match="cannot be exported for vLLM: its fc has no bias: it would leave fc.bias out"):
        export(head, "vllm", tmp_path / "vllm")
    assert not (tmp_path / "vllm").exists()
    bias = load_checkpoint(head)[1]["fc.bias"]
    for to, said in (("official", True), ("sglang", False)):
        export(head, to, tmp_path / to)
        config, weights = written(tmp_path / to)
        assert config["bias"] is said and torch.equal(weights["fc.bias"], bias)
        assert "with fc.bias for" in check(tmp_path / to, to)
    assert written(tmp_path / "official")[0]["architectures"] != ["LlamaForCausalLM"]  # which vLLM would take
    with pytest.raises(ValueError, match="is not for vLLM: its fc has no bias"):
        check(tmp_path / "official", "vllm")
    state = load_checkpoint(head)[1] | {"fc.bias": torch.zeros_like(bias)}
    save_checkpoint(head, state, load_checkpoint(head)[0])
    export(head, "vllm", tmp_path / "vllm")  # nothing is lost


def test_qwen2_goes_there_with_its_biases(tmp_path: Path) -> None:
    """Catches the biases of Qwen2's attention lost, in the class of its own or in Llama's."""
    target = save_target(tmp_path / "qwen2", "qwen2")
    config, weights = written(exported("sglang", target, tmp_path))
    assert (config["architectures"], config["model_type"]) == (["Qwen2ForCausalLMEagle"], "qwen2")
    biases = {f"layers.0.self_attn.{name}_proj.bias": [KEYS if name in "kv" else QUERIES] for name in "qkv"}
    assert {name: list(value.shape) for name, value in weights.items()} == CONTRACTS["sglang"][0] | biases
    assert check(tmp_path / "sglang", "sglang", target.name)
    export(str(tmp_path / "head"), "vllm", tmp_path / "vllm")  # which has Llama's layer alone, and this key for biases
    config, weights = written(tmp_path / "vllm")
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert config["qkv_bias"] is True and config["bias"] is False and "sliding_window" not in config
    assert {name: list(value.shape) for name, value in weights.items()} == CONTRACTS["vllm"][0] | biases
    assert check(tmp_path / "vllm", "official", target.name)


def test_a_draft_vocabulary_where_it_is_known(
    target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a pruned vocabulary that is dropped without a word, one cut to what decoding here needs, which adds the
    text's own tokens, and an embedding pruned with SGLang's LM head."""
    head = save_head(tmp_path / "head", target, draft_vocab=4)
    config, state = load_checkpoint(head)
    save_checkpoint(head, state | {DRAFT_IDS: torch.tensor([9, 3, 5, 4, 8], dtype=torch.int32)}, config)
    for to in ("vllm", "sglang"):
        drafters.export.main([head, "--to", to, "--out", str(tmp_path / to)])
        assert DRAFT_IDS not in written(tmp_path / to)[1]
    said = capsys.readouterr().out
    assert "note: vLLM knows no draft vocabulary" in said
    assert torch.load(tmp_path / "sglang" / "hot_token_ids.pt", weights_only=True) == [9, 3, 5, 4, 8]
    assert written(tmp_path / "sglang")[0]["tie_word_embeddings"] is False
    assert "--speculative-token-map" in (tmp_path / "sglang" / "README.md").read_text()
    for wrong in ([9, 9], [-1, 3], [97], [1.5, 2.0], [10**8], "ids"):
        torch.save(wrong, tmp_path / "sglang" / "hot_token_ids.pt")
        with pytest.raises(ValueError, match="would be served as it is: "):
            check(tmp_path / "sglang", "sglang")


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in ROPES), ("yarn", "qwen3")])
def test_older_readers_find_the_same_rope(kind: str, family: str, tmp_path: Path) -> None:
    """Catches Llama 3.1's scaling dropped for readers of the old keys (transformers 4.57, SGLang), which then draft
    with other positions, and a --check that compares what these do not read."""
    turned = {"rope_type": kind, "rope_theta": 500000.0, **ROPES[kind]}
    model = tiny.build(family, head_dim=12, rope_parameters=turned)
    model.save_pretrained(tmp_path / "target")
    target = TargetModel(model, name=str(tmp_path / "target"))
    options: dict[str, Any] = {"layer": default_layer(target.config)}
    assert options["layer"] == ("target" if family == "llama" and kind != "dynamic" else "llama")
    head = save_head(tmp_path / "head", target, **options)
    ours = EagleHead(target.config, EagleShape(**options))
    ours.load_state_dict(load_checkpoint(head)[1])
    states = torch.randn(2, 1, 100, target.hidden_size)
    with torch.no_grad():
        features = ours(*states, torch.arange(100)[None])
    for to in ("vllm", "sglang"):
        export(head, to, tmp_path / to)
        config = written(tmp_path / to)[0]
        assert config["rope_theta"] == 500000.0
        # A Llama layer has no RoPE that changes with the length, which vLLM computes otherwise than transformers.
        if kind in ("default", "dynamic"):
            assert config["rope_scaling"] is None
        else:
            assert config["rope_scaling"].items() >= {"rope_type": kind, "type": kind, **ROPES[kind]}.items()
        assert_equal(served_features(tmp_path / to, *states), features)
        assert LlamaConfig.from_pretrained(tmp_path / to).rope_parameters.items() >= config["rope_parameters"].items()
        assert check(tmp_path / to, to, target.name)
        for older in ({"rope_theta": 10000.0}, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}):
            (tmp_path / to / "config.json").write_text(json.dumps(config | older))
            with pytest.raises(ValueError, match="in rope_parameters and .* for readers older than transformers 5"):
                check(tmp_path / to, to)
        only_older = {key: value for key, value in config.items() if key != "rope_parameters"}
        (tmp_path / to / "config.json").write_text(json.dumps(only_older))
        assert check(tmp_path / to, to, target.name)


def test_rope_that_engines_compute_otherwise_is_refused(tmp_path: Path) -> None:
    """Catches a head of the target's layer that engines draft with at other positions than it was trained with."""
    turned = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    tiny.build("llama", head_dim=12, rope_parameters=turned).save_pretrained(tmp_path / "dynamic")
    dynamic = TargetModel.from_pretrained(str(tmp_path / "dynamic"), "float32", "cpu")
    with pytest.raises(ValueError, match=r"'llama' with RoPE of type dynamic, and vLLM has .*; train one with layer=l"):
        export(save_head(tmp_path / "head", dynamic, layer="target"), "vllm", tmp_path / "vllm")


def test_an_adapter_with_another_base_is_refused(target: TargetModel, tmp_path: Path) -> None:
    """Catches an adapter whose code has a RoPE base of 10,000 and ignores its config.json."""
    other = tiny.build("llama", head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    other.save_pretrained(tmp_path / "other")
    head = save_head(tmp_path / "head", TargetModel(other, name=str(tmp_path / "other")), exit_layer=EXIT)
    with pytest.raises(ValueError, match="it has rope_theta 10000 for every config.json, and this one 5000"):
        export(head, "official", tmp_path / "out")


def test_what_others_would_load_wrongly_is_refused(target: TargetModel, tmp_path: Path) -> None:
    """Catches heads served beside another target, of another method or family, or with a weight left random."""
    head = save_head(tmp_path / "head", target)
    other = TargetModel.from_pretrained(target.name, "float32", "cpu")
    other.model.model.norm.weight.mul_(2)
    other.model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="was trained for .*target.* is another model"):
        export(head, "vllm", tmp_path / "out", str(tmp_path / "other"))
    adapter = save_head(tmp_path / "kangaroo", target, exit_layer=EXIT)
    with pytest.raises(
        ValueError, match="of the method 'kangaroo'; vLLM loads a DFlash head, a DFlash2 head, a DSpark head, an"
    ):
        export(adapter, "vllm", tmp_path / "out")
    save_checkpoint(tmp_path / "ffn", {}, make_config("kangaroo", {"exit_layer": EXIT, "ffn": True}, target))
    with pytest.raises(ValueError, match="its ffn is True, and the official code knows only False"):
        export(str(tmp_path / "ffn"), "official", tmp_path / "out")
    own = save_target(tmp_path / "qwen3", "qwen3")  # a checkpoint from before there were layers of another kind
    for to in ("official", "vllm", "sglang"):
        with pytest.raises(ValueError, match="layer is that of the family 'qwen3', and .*; train one with layer=llama"):
            export(save_head(tmp_path / "qwen3-head", own), to, tmp_path / "out")
        export(save_head(tmp_path / "llama-head", own, layer="llama"), to, tmp_path / f"qwen3-{to}")
    mistral = save_target(tmp_path / "mistral", "mistral")
    notes = export(save_head(tmp_path / "mistral-head", mistral), "official", tmp_path / "mistral-official")
    assert re.search("the official code cannot serve .* no targets of the family 'mistral'", "".join(notes))
    narrow = tiny_run.save_target(tmp_path / "narrow")
    with pytest.raises(
        ValueError, match="its heads are hidden_size / num_attention_heads wide, and these are head_dim 16"
    ):
        export(save_head(tmp_path / "narrow-head", narrow), "official", tmp_path / "out")
    save_checkpoint(
        tmp_path / "tokens",
        EagleHead(target.config, EagleShape(inputs="token")),
        make_config("eagle", {"inputs": "token"}, target),
    )
    with pytest.raises(ValueError, match=r"its inputs is 'token', and vLLM .* with inputs=feature\+shifted_token"):
        export(str(tmp_path / "tokens"), "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="is not empty"):
        export(head, "vllm", Path(target.name))


Plant = Callable[[dict[str, Any], dict[str, Tensor]], object]
QUERY = "layers.0.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Plant, str]] = {
    "bias": (lambda config, weights: config.update(bias=True), "bias is True, and must be false"),
    "architecture": (lambda config, weights: config.update(architectures=["Llama"]), "architectures is Llama"),
    "shape": (
        lambda config, weights: weights.update({QUERY: weights[QUERY][:24].clone()}),
        r"q_proj.weight is \[24, 48\], and config.json says \[48, 48\]",
    ),
    "missing": (lambda config, weights: weights.pop(QUERY), f"missing tensors: {QUERY} .they would be left random"),
    "NaN": (lambda config, weights: weights[QUERY].view(-1)[7:8].fill_(torch.nan), "q_proj.weight holds NaN"),
    "dtype": (
        lambda config, weights: weights.update({QUERY: weights[QUERY].double()}),
        "the tensors are float32, float64; all must be one of",
    ),
    "target": (
        lambda config, weights: config["made_from"].update(target_fingerprint="x"),
        "for .* is another model",
    ),
    "vocabulary": (lambda config, weights: config.update(vocab_size=98), "vocab_size is 98 in config.json, 97 in the"),
}


@pytest.mark.parametrize("form", CONTRACTS)
def test_planted_faults_fail_the_check(
    form: str, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that passes what an engine swallows: each of these drafts nonsense somewhere, without a word."""
    out = exported(form, target, tmp_path)
    line = ["--check", str(out), "--target", target.name]
    for fault, (plant, message) in FAULTS.items():
        if form == "kangaroo" and fault in ("bias", "architecture"):
            continue  # its code does not read them
        config, weights = written(out)
        before, file = {path.name: path.read_bytes() for path in out.iterdir()}, out / "pytorch_model.bin"
        plant(config, weights)
        (out / "config.json").write_text(json.dumps(config))
        if form == "kangaroo":
            torch.save(weights, file)
        else:
            save_file(weights, out / "model.safetensors")
        assert status(drafters.export.main, *line) == 1, fault
        assert re.search(message, capsys.readouterr().err), fault
        for name, content in before.items():
            (out / name).write_bytes(content)
    assert status(drafters.export.main, *line) == 0
    assert capsys.readouterr().out.startswith("OK: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mixture_of_dtypes_becomes_float32(dtype: torch.dtype) -> None:
    """Catches merged matrices that are rounded to the dtype of the norms, and draft ids that become fractions."""
    given = {"fc.weight": torch.rand(2, 2), "norm.weight": torch.rand(2).to(dtype), "d2t": torch.arange(3)}
    for weights in (given, dict(reversed(given.items()))):
        made = in_one_dtype(weights)
        assert {name: value.dtype for name, value in made.items()} == {
            "fc.weight": torch.float32, "norm.weight": torch.float32, "d2t": torch.int64
        }  # fmt: skip
        assert torch.equal(made["fc.weight"], given["fc.weight"])
    assert in_one_dtype({"norm.weight": given["norm.weight"]})["norm.weight"].dtype == dtype
