"""data_prep/gguf.py: a GGUF file's weights as transformers reads them, in a folder that a target is loaded from."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import Kind, write

from data_prep import gguf
from data_prep.common.gguf import FACTS
from drafters import TargetModel
from drafters.model.files import load_bare_tokenizer


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "float32"), ("Q4_1", "bfloat16"), ("F16", "float16")])
def test_weights_are_those_of_the_file(tmp_path, kind, dtype):
    """Catches weights rounded twice, or left packed; queries and keys in llama.cpp's order; a folder nothing loads; a
    template from another file in the folder."""
    made = write(tmp_path / "tiny.gguf", Kind[kind])
    (tmp_path / "chat_template.jinja").write_text("of another model")
    out = tmp_path / "target"
    gguf.main([str(tmp_path / "tiny.gguf"), "--out", str(out), "--dtype", dtype])
    found = load_file(out / "model.safetensors")
    for name, weights in made.items():
        assert torch.equal(found[name], weights.to(getattr(torch, dtype))), name
    target, tokenizer = TargetModel.from_pretrained(str(out), "float32", "cpu"), load_bare_tokenizer(str(out))
    said = tokenizer.apply_chat_template([{"role": "user", "content": "the the"}], tokenize=False)
    assert "<|im_start|>user" in said and "quantization" not in (out / "config.json").read_text()
    assert target.features(torch.tensor([tokenizer(said)["input_ids"]])).features.isfinite().all()
    facts = json.loads((out / FACTS).read_text())
    assert facts["tensors"][kind] == len(made) and facts["dtype"] == dtype and len(facts["sha256"]) == 64
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert {path.suffix for path in out.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat_template.jinja", "target", "tiny.gguf"]
