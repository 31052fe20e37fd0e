"""data_prep/gguf.py: a GGUF file's weights as transformers reads them, in a folder that a target is loaded from."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import status
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


def replaced(at: int, value: int, size: int = 8) -> Callable[[Path], None]:
    """Makes a file whose number at byte ``at`` is ``value``: after the magic the version, tensors, keys, a length."""

    def make(file: Path) -> None:
        write(file)
        data = file.read_bytes()
        file.write_bytes(data[:at] + value.to_bytes(size, "little") + data[at + size :])

    return make


def cut_at(bytes_left: int) -> Callable[[Path], None]:
    return lambda file: (write(file), file.write_bytes(file.read_bytes()[:bytes_left]), None)[-1]


BAD: dict[str, tuple[Any, str]] = {
    "another kind": (lambda file: file.write_bytes(b"PK\3\4" + bytes(100)), r"is no GGUF file: it begins with b'PK"),
    **{f"cut at {left}": (cut_at(left), "tiny.gguf cannot be converted") for left in (4, 20, 100, -5000)},
    "too many tensors": (replaced(8, 1 << 40), "tiny.gguf cannot be converted"),
    "too long a key": (replaced(24, 1 << 40), "tiny.gguf cannot be converted"),
    "no template": (lambda file: write(file, template=None), "has no chat template"),
    "NaN": (lambda file: write(file, Kind.F16, bad=float("nan")), r"weights hold NaN or infinity, first model"),
    "a weight that is missing": (lambda file: write(file, left_out="blk.1.ffn_up"), "1 weights of the model are"),
    "more than is read": (lambda file: write(file, more="rope_freqs.weight"), r"it holds [\d,]+ numbers, and"),
    "a family that is not read": (lambda file: write(file, architecture="rwkv6"), "tiny.gguf cannot be converted"),
    "a family that is not decoded": (lambda file: write(file, architecture="phi3"), "tiny.gguf cannot be converted"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(tmp_path, capsys, name):
    """Catches a traceback, a model that is not the file's, and a folder left behind."""
    make, message = BAD[name]
    make(tmp_path / "tiny.gguf")
    assert status(gguf.main, str(tmp_path / "tiny.gguf"), "--out", str(tmp_path / "target")) == 1
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert "Traceback" not in said and [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
