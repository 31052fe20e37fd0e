"""Damaged config.json files of targets: each loads, or one line names the key."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import prompt
from families import DECODED, build
from test_families import VISION
from test_loading import change
from transformers import AutoModelForImageTextToText, Mistral3Config

from drafters import TargetModel, load_frozen_ends
from drafters.model.files import load_config_only, meta_model

# The key, its value, and what the message must have beside the key.
WRONG: dict[str, list[tuple[str, Any, str]]] = {
    "llama": [
        ("dtype", "torch.bfloat16", "is 'torch.bfloat16'"),
        ("dtype", [], r"is \[\]"),
        ("dtype", {"a": 1}, "no attribute"),
        ("max_position_embeddings", None, "is null"),
        ("max_position_embeddings", "2048", "is '2048'"),
        ("tie_word_embeddings", None, "is null"),
        ("auto_map", None, "is null"),
        ("auto_map", 5, "is 5"),
        ("rms_norm_eps", None, "is null"),
        ("rms_norm_eps", "1e-6", "is '1e-6'"),
        ("vocab_size", "97", "is '97'"),
        ("vocab_size", -1, "is -1"),
        ("num_hidden_layers", 0, "1 or more"),
        ("num_hidden_layers", True, "is True"),
        ("num_hidden_layers", 1_000_000, "at most 4,096"),
        ("num_attention_heads", 0, "is 0"),
        ("num_key_value_heads", -2, "is -2"),
        ("intermediate_size", -1, "negative dimension"),
        ("head_dim", 1.5, r"is 1\.5"),
        ("hidden_act", "swish-glu", "is 'swish-glu'"),
        ("rope_parameters", "text", "is 'text'"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "rope_theta is null"),
        ("rope_scaling", [2], r"is \[2\]"),
        ("layer_types", -1, "is -1"),
        ("sliding_window", "8", "is '8'"),
        ("text_config", {"a": 1}, r"is \{'a': 1\}"),
        ("text_config", [], r"is \[\]"),
        ("quantization_config", "int4", "is 'int4'"),
        ("quantization_config", {}, "without quant_method"),
        ("quantization_config", {"bits": 4}, "without quant_method"),
        ("model_type", "lama", "does not recognize"),
        ("model_type", [], r"is \[\]"),
    ],
    "gpt2": [
        ("n_positions", None, "is null"),
        ("n_layer", "3", "is '3'"),
        ("resid_pdrop", 7, "dropout probability"),
        ("rope_scaling", "text", "is 'text'"),
        ("head_dim", "16", "is '16'"),
        ("head_dim", True, "is True"),
    ],
    "gemma3_text": [
        ("rope_scaling", 0, "is 0"),
        ("query_pre_attn_scalar", 0, "is 0"),
        ("num_attention_heads", 0, "is 0"),
        ("sliding_window", [4], r"is \[4\]"),
    ],
}


@pytest.mark.parametrize("family", WRONG)
def test_a_wrong_value_is_named(family: str, tmp_path: Path) -> None:
    """Catches tracebacks from inside transformers, and errors that do not say which key is wrong."""
    build(family, DECODED[family]).save_pretrained(tmp_path)
    raw = (tmp_path / "config.json").read_text()
    for key, value, said in WRONG[family]:
        change(str(tmp_path), **{key: value})
        with pytest.raises(ValueError, match=f"^{tmp_path}: {key}.*{said}") as caught:
            meta_model(load_config_only(str(tmp_path)))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
        (tmp_path / "config.json").write_text(raw)
    meta_model(load_config_only(str(tmp_path)))


def test_values_that_belong_together(tmp_path: Path) -> None:
    """Catches a key blamed for another's value, and a message without transformers' reason."""
    tiny.build("llama").save_pretrained(tmp_path)
    change(str(tmp_path), hidden_size=50)  # not a multiple of the heads: only the reason names it
    with pytest.raises(ValueError, match="hidden size .50. is not a multiple"):
        load_config_only(str(tmp_path))


@pytest.mark.parametrize("metadata", ["missing", None, []])
def test_an_index_without_metadata(metadata: Any, tmp_path: Path) -> None:
    """Catches a model that is trained for, and whose decoding fails in transformers."""
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text()) | {"metadata": metadata}
    if metadata == "missing":
        del index["metadata"]
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"^{file}: metadata is .* expected an object.* add "):
        load_frozen_ends(str(tmp_path))


@pytest.mark.parametrize(("whole", "text", "own"), [(None, None, True), (False, True, True), (True, False, False)])
def test_whose_flag_ties_a_multimodal_folder(whole: bool | None, text: bool | None, own: bool, tmp_path: Path) -> None:
    """Catches Mistral 3's released folders, whose LM head is their own, tied by the default of transformers' class, and
    the text model's flag before the file's."""
    inner = {**tiny._COMMON, "model_type": "mistral", "num_hidden_layers": 2}
    config = Mistral3Config(text_config=inner, vision_config=VISION, tie_word_embeddings=not own)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for part, tied in ((raw, whole), (raw["text_config"], text)):
        part.pop("tie_word_embeddings")
        part |= {} if tied is None else {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = TargetModel.from_pretrained(str(tmp_path), "float32", "cpu")
    ids = torch.tensor([prompt(9)])
    torch.testing.assert_close(target.lm_head(target.features(ids).features), model(ids).logits, atol=1e-4, rtol=1e-4)
    ends = load_frozen_ends(str(tmp_path), "float32")
    assert torch.equal(ends.lm_head.weight, ends.embed.weight) != own
    assert ends.fingerprint == target.fingerprint()
