"""Block heads in the forms of their trainers and engines: there and back, one reading each, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from block_reference import block_states
from rigged import BLOCK, SELECTOR, block_drafter
from test_eagle3_layouts import LAYERS, rewrite, save_target, written

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.heads.block.shape import BlockShape, DSparkShape
from drafters.heads.dflash2.shape import DFlash2Shape
from drafters.heads.state_forms import told_state
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export, served_by, serving
from drafters.methods import drafter_class

SHAPES: dict[str, type[BlockShape]] = {"dflash": BlockShape, "dspark": DSparkShape, "dflash2": DFlash2Shape}
FIRST = {"layout": "anchor-first"}
RELEASED = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40}
# Program, method, options.
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "z-lab": ("official", "dflash", {"taps": [0, 3, 5], "causal": True}),
    "vllm dflash": ("vllm", "dflash", {"taps": [0, 3, 7], "draft_vocab_size": 60}),
    "vllm dflash, all tokens": ("vllm", "dflash", {"draft_vocab_size": tiny.VOCAB_SIZE}),
    "sglang dflash": ("sglang", "dflash", {"taps": [2, 4], "shape": RELEASED | {"rms_norm_eps": 1e-3}}),
    "speculators dflash": ("speculators", "dflash", {"draft_vocab_size": 60}),
    "speculators dflash, anchor first": ("speculators", "dflash", FIRST),
    "llama.cpp dflash": ("llama.cpp", "dflash", {"layers": 1}),
    "vllm dspark": ("vllm", "dspark", FIRST | {"draft_vocab_size": 60, "causal": True}),
    "vllm dspark, fill in": ("vllm", "dspark", {"layout": "fill-in", "confidence_head": False}),
    "sglang dspark": ("sglang", "dspark", FIRST | {"markov_head": "rnn"}),
    "speculators dspark": ("speculators", "dspark", {"markov_head": "gated", "draft_vocab_size": 60, **FIRST}),
    "speculators dspark, fill in": ("speculators", "dspark", {"layout": "fill-in", "confidence_head": False}),
    "llama.cpp dspark": ("llama.cpp", "dspark", FIRST | {"draft_vocab_size": 60}),
    "vllm dflash, own mask": ("vllm", "dflash", {"mask_embedding": True}),
    "z-lab dflash2": ("official", "dflash2", {"conv_kernel_size": 3, "causal": True}),
    "vllm dflash2": ("vllm", "dflash2", {"sliding_window": 8, "mask_embedding": True}),
    "sglang dflash2": ("sglang", "dflash2", {"sliding_window": 8, "selector_top_k": 3}),
    "speculators dflash2": ("speculators", "dflash2", {"selector_rank": 5}),
    "speculators dflash2, anchor first": ("speculators", "dflash2", FIRST),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


def save_head(
    folder: Path, method: str, target: TargetModel, dtype: torch.dtype = torch.float32, **options: Any
) -> str:
    """A head with weights of its own everywhere."""
    small: dict[str, Any] = {"dflash": {}, "dspark": {"markov_rank": 8}, "dflash2": SELECTOR}[method]
    given = BLOCK | {"layout": "fill-in"} | small | options
    head = block_drafter(method, target, None, "chain", **given).module
    weights = {name: value.to(dtype) if value.is_floating_point() else value.clone()
               for name, value in head.state_dict().items()}  # fmt: skip
    if given.get("draft_vocab_size") == target.vocab_size:
        weights["d2t"].zero_()
    save_checkpoint(folder, weights, make_config(method, given, target), dtype=None)
    return str(folder)


def same(one: str | Path, other: str | Path) -> None:
    """Two checkpoints agree bit for bit."""
    before, after = load_checkpoint(str(one)), load_checkpoint(str(other))
    method = before[0]["drafter_type"]
    assert method == after[0]["drafter_type"]
    assert SHAPES[method](**before[0]["drafter"]) == SHAPES[method](**after[0]["drafter"])
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(value, after[1][name]) and value.dtype == after[1][name].dtype
               for name, value in before[1].items())  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_there_and_back_is_bit_for_bit(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches a renamed, cast or lost tensor, states shifted by one, another layout, a key that the import ignores."""
    to, method, options = FORMS[case]
    dtype = (torch.float32, torch.bfloat16)[list(FORMS).index(case) % 2]
    head = save_head(tmp_path / "head", method, target, dtype, **options)
    export(head, to, tmp_path / "there")
    assert check(tmp_path / "there", to, target.name).endswith(f", for {target.name}")
    convert(str(tmp_path / "there"), target.name, tmp_path / "back")
    same(head, tmp_path / "back")


def test_the_contract_of_each_reader(target: TargetModel, tmp_path: Path) -> None:
    """Catches states by the other numbers, a layout that no key states, keys of DSpark below the top, where engines do
    not look, positions cut off, RoPE for new readers only, ids where offsets belong."""
    keys: dict[str, dict[str, Any]] = {
        "z-lab": {"architectures": ["DFlashDraftModel"], "is_causal": True, "block_size": 5},
        "vllm dflash": {"architectures": ["DFlashDraftModel"], "draft_vocab_size": 60, "is_causal": False},
        "vllm dspark": {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1, 2], "mask_token_id": 2,
                        "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
                        "confidence_head_with_markov": True, "sample_from_anchor": True, "draft_vocab_size": 60},
        "sglang dspark": {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "rnn", "block_size": 5},
    }  # fmt: skip
    ids = {"z-lab": [-1, 2, 4], "vllm dflash": [-1, 2, 6]}
    for case, expected in keys.items():
        to, method, options = FORMS[case]
        export(save_head(tmp_path / f"{case}-head", method, target, **options), to, tmp_path / case)
        config, weights = written(tmp_path / case)
        assert {key: config[key] for key in expected} == expected
        assert config["model_type"] == "qwen3" and config["max_position_embeddings"] == 4096
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
        assert config["num_target_layers"] == LAYERS and config["layer_types"] == ["full_attention"] * 2
        if method == "dflash":
            assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": ids[case],
                                               "sample_from_anchor": False, "causal": case == "z-lab"}  # fmt: skip
        taps = options.get("taps", BLOCK["taps"])
        made = config["made_from"]
        assert made["taps"] == taps and made["states"] == [told_state(tap, LAYERS) for tap in taps]
        assert made["layout"] == options.get("layout", "fill-in")
        assert {"fc.weight", "hidden_norm.weight", "layers.1.self_attn.q_norm.weight"} <= weights.keys()
        assert ("lm_head.weight" in weights) == ("d2t" in weights) == ("draft_vocab_size" in options)


def test_the_contract_of_speculators(target: TargetModel, tmp_path: Path) -> None:
    """Catches keys on the wrong level, states by outputs of layers, blocks that vLLM would make causal."""
    for case, tokens in (("speculators dflash", 4), ("speculators dspark", 5)):
        to, method, options = FORMS[case]
        export(save_head(tmp_path / f"{case}-head", method, target, **options), to, tmp_path / case)
        config, weights = written(tmp_path / case)
        settings = config["speculators_config"]
        assert config["speculators_model_type"] == settings["algorithm"] == method
        assert settings["proposal_methods"][0]["speculative_tokens"] == tokens
        assert config["aux_hidden_state_layer_ids"] == BLOCK["taps"] and "dflash_config" not in config
        assert config["sample_from_anchor"] is (method == "dspark") and config["sliding_window_non_causal"] is True
        assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (5, 2, 60)
        assert config["transformer_layer_config"]["max_position_embeddings"] == 4096
        assert "t2d" in weights and "rope_theta" not in config


@pytest.mark.parametrize(
    ("method", "options", "written_for"),
    [("dspark", FIRST, ("sglang", "vllm")), ("dspark", FIRST | {"confidence_head": False}, ()), ("dflash", {}, ())],
)
def test_sglang_gets_the_temperatures(
    method: str, options: dict[str, Any], written_for: tuple[str, ...], target: TargetModel, tmp_path: Path
) -> None:
    """Catches a calibrated head that SGLang serves with the confidence of before, a README without the option, and
    temperatures of max q given as those of a confidence head."""
    temperatures = [1.0 + place / 4 for place in range(5 if method == "dspark" else 4)]
    head = save_head(tmp_path / "head", method, target, **options, confidence_temperatures=temperatures)
    for to in ("sglang", "vllm"):  # one folder for both
        out = tmp_path / to
        export(head, to, out)
        readme, file = (out / "README.md").read_text(), out / "confidence.json"
        assert file.is_file() == (to in written_for)
        assert (f"--speculative-dspark-confidence-sts-path {out.name}/{file.name}" in readme) == (to in written_for)
        draft = 4 if method == "dflash" else 5  # and the anchor
        assert f"--speculative-num-draft-tokens {draft + 1} " in f"{readme} ".replace("\n", " ")
        assert f'"num_speculative_tokens": {draft}' in readme
        if file.is_file():
            assert json.loads(file.read_text()) == {"temperatures": temperatures}
        check(out, to, target.name)
    plain = save_head(tmp_path / "plain", method, target, **options)
    export(plain, "sglang", tmp_path / "plain-sglang")
    assert not (tmp_path / "plain-sglang" / "confidence.json").exists()
    card = serving(Path(head), "user/mine", "someone/target")
    assert ("sts-path mine-sglang/confidence.json" in card) == bool(written_for)


UNSERVED: list[tuple[str, str, dict[str, Any], str]] = [
    *((to, "dflash", FIRST, "predicts no token at the anchor") for to in ("official", "vllm", "sglang", "llama.cpp")),
    ("vllm", "dspark", FIRST | {"markov_head": "rnn"}, "no Markov head of the kind 'rnn'"),
    ("llama.cpp", "dspark", FIRST | {"markov_head": "gated"}, "no Markov head of the kind 'gated'"),
    ("official", "dspark", FIRST, "is of the method 'dspark'; the official code loads a DFlash head"),
    ("official", "dflash", {"draft_vocab_size": 60}, "drafts with the target's LM head"),
    ("official", "dflash", {"taps": [1, 7]}, "transformers norms the state after the last layer"),
    ("sglang", "dflash", {"taps": [0, 2]}, "hands over no embeddings"),
    ("sglang", "dflash", {"taps": [2, 7]}, "no state after the target's last layer"),
    ("sglang", "dspark", FIRST | {"draft_vocab_size": 60}, "drafts with the target's LM head"),
    ("sglang", "dspark", {"layout": "fill-in"}, "takes block_size for the tokens of a draft"),
    ("speculators", "dflash", {"causal": True}, "attend in both directions"),
    ("speculators", "dspark", FIRST | {"draft_vocab_size": tiny.VOCAB_SIZE}, "of all tokens it drafts with the target"),
    ("llama.cpp", "dflash", {"draft_vocab_size": 60}, "drafts with the target's LM head"),
    ("llama.cpp", "dflash", {"causal": True}, "attend in both directions"),
    ("llama.cpp", "dspark", FIRST | {"causal": True}, "attend in both directions"),
    ("vllm", "dflash", {"layer": "llama"}, "norms of queries and keys"),
    ("official", "dflash", {"mask_embedding": True}, "embeds the mask token as the target does .mask_embedding: false"),
    ("sglang", "dflash2", {"mask_embedding": True}, "embeds the mask token as the target does"),
    ("vllm", "dspark", FIRST | {"mask_embedding": True}, "embeds the mask token as the target does"),
    ("vllm", "dflash2", FIRST, "predicts no token at the anchor"),
    ("llama.cpp", "dflash2", {}, "is of the method 'dflash2'; llama.cpp loads a DFlash head"),
    ("vllm", "dflash", {"taps": [3, 1]}, r"taps are \[3, 1\]; train one with \[1, 3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("to", "method", "options", "reason"), UNSERVED)
def test_what_a_program_cannot_serve_is_refused(
    to: str, method: str, options: dict[str, Any], reason: str, target: TargetModel, tmp_path: Path
) -> None:
    """Catches a head that a program loads and computes otherwise: it accepts less and says nothing."""
    with pytest.raises(ValueError, match=reason):
        export(save_head(tmp_path / "head", method, target, **options), to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    given = BLOCK | {"layout": "fill-in"} | options
    refused = served_by(method, given, target.config)
    assert refused[to] is not None
    if to in drafter_class(method).forms.readers:
        assert refused[to] == drafter_class(method).forms.why_not(to, SHAPES[method](**given), target.config)


def test_a_released_head_of_another_shape_computes_as_published(target: TargetModel, tmp_path: Path) -> None:
    """Catches the target's RoPE, heads, MLP or epsilon in a head of other ones: tensors have the same shapes, and
    acceptance falls. In the form of SpecForge: no origin, RoPE by the older keys."""
    shape = RELEASED | {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    made = block_drafter("dflash", target, None, "chain", **BLOCK, shape=shape)
    weights = {name: value.clone() for name, value in made.module.state_dict().items()}
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 5}
    config |= {"hidden_size": tiny.HIDDEN_SIZE, "vocab_size": tiny.VOCAB_SIZE, "max_position_embeddings": 2048}
    config |= {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1, 2]}, "num_target_layers": LAYERS}
    config |= {key: value for key, value in shape.items() if key != "rope_parameters"}
    (tmp_path / "released").mkdir()
    rewrite(tmp_path / "released", config, weights)
    notes = convert(str(tmp_path / "released"), target.name, tmp_path / "ours")
    assert any("max_position_embeddings is 2,048" in note for note in notes)
    options = BlockShape(**load_checkpoint(tmp_path / "ours")[0]["drafter"])
    assert options.shape.model_dump() == shape and options.taps == BLOCK["taps"] and options.layout == "fill-in"
    same_target = TargetModel.from_pretrained(target.name, "float32", "cpu")
    drafter: Any = load_drafter(str(tmp_path / "ours"), same_target, tree="chain")
    known = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    taps = same_target.features(known, taps=drafter.taps).taps
    states = torch.cat([taps[tap] for tap in drafter.taps], dim=-1)
    block = same_target.embed(torch.tensor([[12, 2, 2, 2, 2]]))
    found = drafter.module(states, block, torch.arange(12)[None])[0]
    torch.testing.assert_close(
        found, block_states(weights, made.module.config, states[0], block[0]), atol=1e-5, rtol=1e-5
    )
    plain = generate(same_target, make_drafter("autoregressive", same_target), [[5, 6, 7]], max_new_tokens=12).tokens
    assert torch.equal(generate(same_target, drafter, [[5, 6, 7]], max_new_tokens=12).tokens, plain)
