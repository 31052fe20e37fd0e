"""Quantised targets as they are published: they decode as transformers runs them, or one line says what is missing."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import quantised_folders as published
import tiny
import tiny_run
import torch
from conformance import prompt
from families import DECODED, WIDE, build, decode
from test_features import run, write_config

from data_prep.store.reader import FeatureStore
from drafters import TargetModel, load_drafter, load_frozen_ends, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.model import loading, quantised
from drafters.model.files import load_config_only
from drafters.model.weights import quantised_bytes

SIZES = WIDE | {"intermediate_size": 128}  # multiples of a group, and of bitsandbytes' blocks
# The folder's maker, its family, the packages that it needs, and the engine that runs it.
KINDS: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...], str]] = {
    "fp8": (published.fp8, "llama", (), "fused"),
    "mxfp4": (published.mxfp4, "gpt_oss", (), "stock"),
    "compressed-tensors FP8": (published.compressed_fp8, "llama", ("compressed_tensors",), "stock"),
    "compressed-tensors W4A16": (published.compressed_w4a16, "llama", ("compressed_tensors",), "fused"),
    "gptq": (published.gptq, "llama", ("optimum", "gptqmodel"), "stock"),
    "awq": (published.awq, "llama", ("gptqmodel",), "stock"),
}


def saved(folder: Path, make: Callable[[Path], None], family: str = "llama") -> str:
    build(family, {**DECODED[family], **SIZES}).save_pretrained(folder)
    make(folder)
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_it_decodes_as_transformers_runs_it(kind: str, tmp_path: Path) -> None:
    """Catches packed values taken for weights, bf16 weights in a float32 model, and ends that are not the target's."""
    make, family, packages, engine = KINDS[kind]
    if missing := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    target = TargetModel.from_pretrained(saved(tmp_path, make, family), "float32", "cpu")
    assert target.engine == engine
    texts, ids = [prompt(12)], torch.tensor([prompt(12)])
    stock = target.model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
    eagle = EagleDrafter(target, EagleHead(target.config, EagleShape(layer="llama")), EagleOptions(tree="dynamic"))
    for drafter in (make_drafter("autoregressive", target), make_drafter("prompt_lookup", target), eagle):
        assert decode(target, drafter, texts, 16) == [stock[0, 12:].tolist()]
    states, ends = target.features(ids, taps=(1,)), load_frozen_ends(str(tmp_path), "float32")
    torch.testing.assert_close(ends.lm_head(states.features), target.model(ids).logits, atol=1e-4, rtol=1e-4)
    assert ends.fingerprint == target.fingerprint() and states.taps[1].isfinite().all()
    whole = sum(weights.nbytes for weights in build(family, {**DECODED[family], **SIZES}).parameters())
    assert (target.bytes_read() < 0.5 * whole) == (kind in ("gptq", "awq"))


MISSING = [*((make, packages) for make, _, packages, _ in KINDS.values() if packages)]
MISSING += [(published.bitsandbytes, ("bitsandbytes",))]


@pytest.mark.parametrize(("make", "packages"), MISSING)
def test_a_missing_package_is_named(
    make: Callable[[Path], None], packages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights read before a package is asked for, one package named at a time, a GPU asked for where only a
    package is missing, and a training from captured states that is refused, too."""
    folder = saved(tmp_path, make)
    monkeypatch.setattr(quantised, "find_spec", lambda package: None)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", None)
    named = " ".join(packages).replace("_", "-")
    with pytest.raises(ValueError, match=rf"is quantised \(.*\), and .*: pip install {named}; or give") as caught:
        TargetModel.from_pretrained(folder, "float32", "cpu")
    assert "\n" not in str(caught.value)
    assert load_frozen_ends(folder, "float32").lm_head.weight.shape == (97, 64)


def test_what_stays_quantised_needs_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a 70B model in 4 bits that is refused because it would not fit in 16."""
    folder = saved(tmp_path, published.awq)
    monkeypatch.setattr(quantised, "_check", lambda *_: None)  # no package is asked for

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loading, "SMALL", 0)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)
    stored = sum(part.nbytes for part in published.load_file(tmp_path / "model.safetensors").values())
    monkeypatch.setattr(loading, "free_memory", lambda _: stored)
    with pytest.raises(AssertionError, match="were read"):
        TargetModel.from_pretrained(folder, "float32", "cpu")
    monkeypatch.setattr(loading, "free_memory", lambda _: stored - 1)
    with pytest.raises(ValueError, match=r"its weights need [0-9.]+ kB, and cpu has"):
        TargetModel.from_pretrained(folder, "float32", "cpu")


def test_fp8_on_a_gpu_without_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches FP8 that loads on a GPU, and fails in its first product because its kernels are a package's."""
    config = load_config_only(saved(tmp_path, published.fp8))
    devices, sizes = (torch.device("cpu"), torch.device("cuda")), []
    monkeypatch.setattr(quantised, "_check", lambda *_: None)
    for package in (None, object()):
        monkeypatch.setattr(quantised, "find_spec", lambda _, package=package: package)
        given = [quantised.to_load(str(tmp_path), config, device) for device in devices]
        sizes += [quantised_bytes(str(tmp_path), None, one) for one in given]
    stored = sum(part.nbytes for part in published.load_file(tmp_path / "model.safetensors").values())
    assert sizes == [None, None, None, stored] and "dequantize" not in config.quantization_config


def test_float32_weights_of_a_dequantised_checkpoint_stay() -> None:
    """Catches a router's float32 bias rounded to the model's dtype, and weights of other checkpoints that are cast."""
    config = tiny.tiny_config("llama")
    given = {"router": torch.tensor([1.0001, 3.0]), "projection": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    asked: dict[str, Any] = {"quant_method": "fp8", "dequantize": True}
    for options, dtype in (
        (asked, torch.float16),
        (asked | {"dequantize": False}, torch.bfloat16),
        (None, torch.bfloat16),
    ):
        config.quantization_config = options
        module = torch.nn.ParameterDict(given)
        quantised.as_asked(module, config, torch.float16)
        assert module["projection"].dtype == dtype and module["projection"].tolist() == [1.0, 2.0]
        assert module["router"].dtype == torch.float32 and torch.equal(module["router"].data, given["router"])


PACKED, ROUNDED = {"weights": {"num_bits": 4}}, {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}


@pytest.mark.parametrize(
    ("groups", "plain"),
    [([PACKED], True), ([PACKED, PACKED], True), ([ROUNDED], False), ([PACKED, ROUNDED], False), ([], True)],
)
def test_rounded_activations_are_kept(
    groups: list[dict[str, Any]], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a checkpoint some of whose layers round their activations, run as plain weights: other outputs."""
    monkeypatch.setattr(quantised, "_check", lambda *_: None)
    config = tiny.tiny_config("llama")
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    config.quantization_config = {"quant_method": "compressed-tensors", "config_groups": named}
    found = quantised.to_load("x", config, torch.device("cpu"))
    assert found.quantization_config.get("dequantize", False) == plain
    assert "dequantize" not in config.quantization_config


def test_bytes_of_packed_weights(tmp_path: Path) -> None:
    """Catches bits counted as bytes, and a tensor's dtype counted for another's: the memory check reads this number."""
    config = tiny.tiny_config("llama", quantization_config={"quant_method": "awq"})
    values = {"a": torch.zeros(3, 5, dtype=torch.int32), "b": torch.zeros(7, dtype=torch.float16)}
    values |= {"c": torch.zeros(9, dtype=torch.float8_e4m3fn), "d": torch.zeros(11, dtype=torch.bool)}
    published.save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    assert quantised_bytes(str(tmp_path), None, config) == 15 * 4 + 7 * 2 + 9 + 11
    for other in ({"quant_method": "compressed-tensors"}, {"quant_method": "fp8", "dequantize": True}, None):
        config.quantization_config = other
        assert quantised_bytes(str(tmp_path), None, config) is None


def test_a_quantised_lm_head(tmp_path: Path) -> None:
    """Catches a message that calls the LM head of a quantised model missing, and does not say why."""
    folder = saved(tmp_path, published.gptq)
    found = published.load_file(tmp_path / "model.safetensors")
    found["lm_head.qweight"] = found.pop("lm_head.weight")
    published.save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensors named .*lm_head.weight.* \(but lm_head.qweight: .* quantised"):
        load_frozen_ends(folder)


def test_features_are_captured_and_trained_on(target_folder: Path, tmp_path: Path) -> None:
    """Catches a capture that another fingerprint or dtype stops, and features of other weights than decoding has."""
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    published.fp8(folder)
    run(write_config(tmp_path, folder))
    stored = FeatureStore.open(tmp_path / "out" / "train")[0]
    target = TargetModel.from_pretrained(str(folder), "float32", "cpu", engine="stock")
    torch.testing.assert_close(
        stored.features, target.features(stored.input_ids[None]).features[0], atol=1e-4, rtol=1e-3
    )
    values = tiny_run.settings(str(folder), tmp_path / "out", tmp_path / "run", steps=2, batch_tokens=256)
    tiny_run.train_here("eagle", values)
    assert load_drafter(str(tmp_path / "run"), target).target is target
