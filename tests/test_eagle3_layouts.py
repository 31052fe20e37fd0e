"""EAGLE-3 heads in the forms of their trainers and engines: there and back, one reading each, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rigged import eagle3
from safetensors.torch import load_file, save_file
from test_eagle3 import described, first_features, rms, shaken
from torch import Tensor
from transformers import AutoConfig

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.heads.eagle3.forms import EAGLE3_FORMS
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.heads.state_forms import told_state, with_draft_vocabulary
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export, served_by
from drafters.model.draft_head import D2T

LAYERS, USUAL = 7, [2, 3, 4]  # n layers; the states 2, n // 2 and n - 3
IDS = "eagle_aux_hidden_state_layer_ids"
V31 = {"fc_norm": True, "norm_output": True}
FORMS: dict[str, dict[str, Any]] = {
    "official": {"draft_vocab_size": 60},
    "vllm": {"taps": [0, 3, 6, 7], "layers": 2, "layer": "qwen3", "norm_before_residual": True, **V31},
    "sglang": {"taps": [0, 3, 6], "draft_vocab_size": 60, "trained_steps": 7, **V31},
    "speculators": {"draft_vocab_size": 60, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "llama.cpp": {"taps": [1, 3, 7], "own_lm_head": False, "norm_before_fc": True},
}
WINDOW = {"sliding_window": 512, "layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def save_target(path: Path, **more: Any) -> TargetModel:
    """A tiny Llama of ``LAYERS`` layers whose RoPE has another base than an absent key means."""
    given: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, **more}
    model = tiny.build("llama", head_dim=12, num_hidden_layers=LAYERS, max_position_embeddings=4096, **given)
    model.save_pretrained(path)
    return TargetModel(model, name=str(path))


def save_head(folder: Path, target: TargetModel, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    """A head with weights of its own everywhere."""
    given = {"taps": USUAL} | options
    kept = given.pop("draft_vocab_size", None)
    drafter = eagle3(target, None, "chain", kept=kept, **given)
    shaken(drafter)
    config = make_config("eagle3", given | ({"draft_vocab_size": kept} if kept else {}), target)
    weights = {name: value.to(dtype) if value.is_floating_point() else value
               for name, value in drafter.module.state_dict().items()}  # fmt: skip
    save_checkpoint(folder, weights, config, dtype=None)
    return str(folder)


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def rewrite(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_there_and_back_is_bit_for_bit(form: str, dtype: torch.dtype, target: TargetModel, tmp_path: Path) -> None:
    """Catches a renamed, cast or lost tensor, states shifted by one, an option that the way back reads otherwise."""
    head = save_head(tmp_path / "head", target, dtype, **FORMS[form])
    export(head, form, tmp_path / "there")
    assert check(tmp_path / "there", form, target.name).endswith(f", for {target.name}")
    convert(str(tmp_path / "there"), target.name, tmp_path / "back")
    before, after = load_checkpoint(head), load_checkpoint(tmp_path / "back")
    ours, read = (Eagle3Shape(**config["drafter"]) for config, _ in (before, after))
    assert ours == read
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(value, after[1][name]) and value.dtype == after[1][name].dtype
               for name, value in before[1].items())  # fmt: skip


def test_the_contract_of_each_reader(target: TargetModel, tmp_path: Path) -> None:
    """Catches the two meanings of one key (SGLang counts outputs of layers), an embedding that the official code leaves
    random, positions cut at 2,048, draft ids that are no offsets, and an architecture that another program misreads."""
    keys: dict[str, dict[str, Any]] = {
        "official": {"architectures": ["LlamaForCausalLM"], "rope_scaling": None, "num_aux_hidden_states": 3},
        "vllm": {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2,
                 "draft_vocab_size": tiny.VOCAB_SIZE, "num_aux_hidden_states": 4, **V31},
        "sglang": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 60, "bias": False, **V31},
        "llama.cpp": {"architectures": ["Eagle3LlamaForCausalLM"], "norm_before_fc": True, "num_hidden_layers": 1},
    }  # fmt: skip
    ids = {"official": [2, 3, 4], "vllm": [0, 3, 6, 7], "sglang": [-1, 2, 5], "llama.cpp": [1, 3, 7]}
    for form, expected in keys.items():
        export(save_head(tmp_path / f"{form}-head", target, **FORMS[form]), form, tmp_path / form)
        config, weights = written(tmp_path / form)
        assert {key: config[key] for key in expected} == expected
        assert config["eagle_config"] == {IDS: ids[form], "use_aux_hidden_state": True,
                                          "norm_before_fc": form == "llama.cpp"}  # fmt: skip
        assert config["max_position_embeddings"] == 4096 and config["rope_theta"] == 500000.0
        assert ("target_hidden_size" in config) == (form != "official")
        taps = FORMS[form].get("taps", USUAL)
        assert config["made_from"]["taps"] == taps
        assert config["made_from"]["states"] == [told_state(tap, LAYERS) for tap in taps]
        assert any(name.startswith("midlayer.") for name in weights) == (form in ("official", "sglang"))
        assert ("lm_head.weight" in weights) == (form != "llama.cpp")
        assert ("d2t" in weights) == ("t2d" in weights) == (FORMS[form].get("draft_vocab_size") == 60)
        if "d2t" in weights:
            chosen = torch.arange(60) + weights["d2t"]
            assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
            assert weights["t2d"].nonzero()[:, 0].tolist() == chosen.tolist()
    assert told_state(3, LAYERS) == "input of layer 3 = output of layer 2 = hidden_states[3]"


def test_a_head_without_a_vocabulary_of_its_own(target: TargetModel, tmp_path: Path) -> None:
    """Catches a size with which SGLang looks for an LM head in the folder, and a d2t of the whole vocabulary, which
    engines would read as a draft vocabulary."""
    export(save_head(tmp_path / "head", target, own_lm_head=False), "sglang", tmp_path / "sglang")
    config, weights = written(tmp_path / "sglang")
    assert config["draft_vocab_size"] is None and "lm_head.weight" not in weights
    for rows in (tiny.VOCAB_SIZE - 1, tiny.VOCAB_SIZE):
        found = with_draft_vocabulary({D2T: torch.zeros(rows, dtype=torch.int64)}, tiny.VOCAB_SIZE)
        assert [int(found["t2d"].sum())] == [rows] if rows < tiny.VOCAB_SIZE else found == {}


def test_the_contract_of_speculators(target: TargetModel, tmp_path: Path) -> None:
    """Catches keys on the wrong level, and names of states where its own trainer does not look."""
    export(save_head(tmp_path / "head", target, **FORMS["speculators"]), "speculators", tmp_path / "out")
    config, weights = written(tmp_path / "out")
    layer, method = config["transformer_layer_config"], config["speculators_config"]
    assert config["speculators_model_type"] == method["algorithm"] == "eagle3"
    assert method["verifier"]["architectures"] == ["LlamaForCausalLM"] and "rope_theta" not in config
    assert (config[IDS], config["draft_vocab_size"]) == (USUAL, 60) and "eagle_config" not in config
    assert layer["max_position_embeddings"] == 4096 and layer["hidden_size"] == tiny.HIDDEN_SIZE
    assert {"layers.0.hidden_norm.weight", "input_norm.weight", "t2d"} <= weights.keys()


@pytest.mark.parametrize(("form", "layer"), [("vllm", "llama"), ("vllm", "qwen3"), ("speculators", "llama")])
def test_a_window(form: str, layer: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches a window that a program does not read: vLLM does by the kind of each layer, and Qwen3's configuration
    drops it unless it is told to use it."""
    head = save_head(tmp_path / "head", target, layer=layer, **WINDOW)
    export(head, form, tmp_path / "out")
    config, _ = written(tmp_path / "out")
    keys = config.get("transformer_layer_config", config)
    assert keys["layer_types"] == ["sliding_attention"] * 2 and keys["sliding_window"] == 512
    read = AutoConfig.for_model(**{key: value for key, value in keys.items() if key != "architectures"})
    assert read.sliding_window == 512 and read.layer_types == keys["layer_types"]
    assert check(tmp_path / "out", form, target.name)
    convert(str(tmp_path / "out"), target.name, tmp_path / "back")
    assert load_checkpoint(tmp_path / "back")[0]["drafter"]["sliding_window"] == 512


UNSERVED = [
    ("official", {"taps": [1, 3, 6]}, r"reads the hidden states \[2, 3, 4\] of this target, and the head reads"),
    ("official", V31, "does not know fc_norm, norm_output"),
    ("official", {"own_lm_head": False}, "needs an LM head of the head's own"),
    ("official", {"shape": {"head_dim": 16}}, "heads are hidden_size / num_attention_heads wide, and these 16"),
    ("sglang", {"norm_before_residual": True}, "does not know norm_before_residual"),
    ("sglang", {"layers": 2}, "has one layer, and the head 2"),
    ("official", {"sliding_window": 512}, "attends to all tokens, and the head's has a window"),
    ("sglang", {"sliding_window": 512}, "attends to all tokens"),
    ("llama.cpp", {"sliding_window": 512}, "attends to all tokens"),
    ("sglang", {"taps": [1, 3, 7]}, "hands over no state after the target's last layer"),
    ("speculators", {"own_lm_head": False}, "needs an LM head"),
    ("llama.cpp", {"taps": [1, 6]}, "reads three hidden states, and the head 2"),
    ("llama.cpp", V31, "no fc_norm and no norm_output"),
    ("llama.cpp", {"layer": "qwen3"}, "no norms of queries and keys"),
    ("vllm", {"taps": [3, 1]}, r"in the order of the layers, and taps are \[3, 1\]; train one with \[1, 3\]"),
]


@pytest.mark.parametrize(("to", "options", "reason"), UNSERVED)
def test_what_a_program_cannot_serve_is_refused(
    to: str, options: dict[str, Any], reason: str, target: TargetModel, tmp_path: Path
) -> None:
    """Catches a head that a program loads and computes otherwise: it accepts less and says nothing."""
    with pytest.raises(ValueError, match=reason):
        export(save_head(tmp_path / "head", target, **options), to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    refused = served_by("eagle3", {"taps": USUAL} | options, target.config)
    assert refused[to] == EAGLE3_FORMS.why_not(to, Eagle3Shape(**{"taps": USUAL} | options), target.config) is not None
    assert served_by("eagle3", {"taps": USUAL}, target.config) == dict.fromkeys(refused)


def test_a_head_of_another_shape_drafts_as_published(target: TargetModel, tmp_path: Path) -> None:
    """Catches the target's RoPE, heads, MLP or epsilon in a head of other ones: its authors' has base 10,000 beside a
    Llama 3 of 500,000, and the tensors have the same shapes."""
    shape = {"intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    shape |= {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    made = eagle3(target, None, "chain", kept=60, taps=USUAL, shape=shape)
    weights = {name.replace("layers.0.", "midlayer."): value.clone() for name, value in shaken(made).items()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"hidden_size": tiny.HIDDEN_SIZE, "vocab_size": tiny.VOCAB_SIZE, "draft_vocab_size": 60}
    config |= {"max_position_embeddings": 2048, **{key: shape[key] for key in shape if key != "rope_parameters"}}
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "config.json").write_text(json.dumps(config))
    embedding = {"embed_tokens.weight": target.body.embed_tokens.weight.detach().half()}
    torch.save(weights | embedding, tmp_path / "released" / "pytorch_model.bin")
    notes = convert(str(tmp_path / "released"), target.name, tmp_path / "ours")
    for told in (
        r"names no states: it reads [2, 3, 4]",
        "max_position_embeddings is 2,048",
        "is the target's, and was",
    ):
        assert any(told in note for note in notes), told
    options = Eagle3Shape(**load_checkpoint(tmp_path / "ours")[0]["drafter"])
    assert options.shape.model_dump() == shape
    same = TargetModel.from_pretrained(target.name, "float32", "cpu")
    drafter: Any = load_drafter(str(tmp_path / "ours"), same, tree="chain")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    taps = same.features(ids, taps=drafter.taps).taps
    states, tokens = [taps[tap][0, :-1] for tap in USUAL], same.embed(ids[0, 1:])
    own, layer = made.module.state_dict(), made.module.config
    expected = described(own, layer, options, first_features(own, layer, options, states), tokens)
    drafter.head.cache = same.new_cache(1, 32, 1, drafter.head.layer)
    found = drafter.head.extend(drafter.module.fused(torch.cat(states, dim=-1))[None], ids[:, 1:])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    logits = rms(expected, own["norm.weight"], 1e-3) @ own["lm_head.weight"].T
    torch.testing.assert_close(drafter.lm_head(found), logits, atol=1e-4, rtol=1e-4)
    plain = generate(same, make_drafter("autoregressive", same), [[5, 6, 7]], max_new_tokens=12).tokens
    assert torch.equal(generate(same, drafter, [[5, 6, 7]], max_new_tokens=12).tokens, plain)
