"""dtype: auto and precision: auto: bf16 where the device has instructions for it, and nowhere else."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml

from data_prep.answers.journal import check_identity
from data_prep.configs import FeaturesConfig, MagpieConfig, RegenerateConfig
from data_prep.store.manifest import read_manifest
from drafters import TargetModel
from drafters.common import precision
from drafters.model.files import resolve_dtype
from eval.configs import RooflineConfig, TargetEntry
from train.configs import EagleConfig, TargetConfig
from train.core.config import OnlineData
from train.core.runtime import dtype_of
from train.run.training import settle_precision

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def this_cpu(monkeypatch: pytest.MonkeyPatch, machine: str, level: str, onednn: bool, bf16: bool, amx: bool) -> None:
    """Make torch tell of a CPU of this kind."""
    monkeypatch.setattr(precision.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


@pytest.mark.parametrize(
    ("machine", "level", "onednn", "bf16", "amx", "fast"),
    [
        ("x86_64", "AVX512", True, True, False, True),
        ("x86_64", "AVX512", True, False, True, True),
        ("x86_64", "AVX512", True, False, False, False),  # Skylake: oneDNN says yes, and emulates
        ("x86_64", "AVX2", False, False, False, False),
        ("x86_64", "AVX2", False, True, True, False),  # a limit set by the user
        ("AMD64", "AVX512", True, False, False, False),
        ("aarch64", "DEFAULT", True, False, False, True),
        ("arm64", "SVE256", False, False, False, False),
    ],
)
def test_which_cpus_are_fast_in_bf16(
    machine: str, level: str, onednn: bool, bf16: bool, amx: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches bf16 on a CPU that emulates it, 5 to 60 times slower than float32; and x86's test asked of an Arm."""
    this_cpu(monkeypatch, machine, level, onednn, bf16, amx)
    assert precision.cpu_has_bf16() is fast
    assert precision.cpu_instructions().startswith(level) and ("BF16" in precision.cpu_instructions()) is fast
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if fast else torch.float32)


def test_limits_set_for_torch_count() -> None:
    """Catches a rule that reads the processor's flags and not what torch was told to use."""
    code = "from drafters.common.precision import cpu_has_bf16; print(cpu_has_bf16())"
    for limit in ({"ATEN_CPU_CAPABILITY": "avx2"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, **limit},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "False\n", limit


@pytest.mark.parametrize(
    ("capability", "hip", "dtype"),
    [((7, 5), None, torch.float16), ((8, 0), None, torch.bfloat16), ((9, 0), None, torch.bfloat16)]
    + [((9, 0), "6.2", torch.bfloat16)],
)
def test_which_gpus(capability: tuple[int, int], hip: str | None, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches bf16 on a T4, which emulates it, and float16 on a GPU that has bf16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert precision.fast_dtype(torch.device("cuda:0")) == dtype


def test_slow_bf16_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Catches hours in a dtype that is slow without a word, a warning for each model, and one where bf16 is fast."""
    precision.warn_if_slow.cache_clear()
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    with caplog.at_level(logging.WARNING):
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
            precision.warn_if_slow(dtype, CPU)
    assert len(caplog.messages) == 1 and "; set dtype (or precision) to auto or float32" in caplog.messages[0]
    precision.warn_if_slow.cache_clear()
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    precision.warn_if_slow(torch.bfloat16, CPU)
    assert len(caplog.messages) == 1


def test_auto_is_every_default() -> None:
    """Catches a program, or a config that ships, that asks for bf16 on every machine."""
    fields = [(schema, "dtype") for schema in (FeaturesConfig, RegenerateConfig, MagpieConfig, TargetEntry)]
    fields += [(RooflineConfig, "dtype"), (OnlineData, "target_dtype"), (EagleConfig, "precision")]
    for schema, key in [*fields, (TargetConfig, "precision")]:
        assert schema.model_fields[key].default == "auto", f"{schema.__name__}.{key}"

    def chosen(value: Any) -> list[Any]:
        if isinstance(value, dict):
            own = [value[key] for key in ("dtype", "target_dtype", "precision") if key in value]
            return own + [found for inner in value.values() for found in chosen(inner)]
        return [found for inner in value for found in chosen(inner)] if isinstance(value, list) else []

    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        assert not {"bfloat16", "bf16"} & set(chosen(yaml.safe_load(path.read_text()))), path


@pytest.mark.parametrize("fast", [True, False])
def test_a_target_runs_in_it(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a default that reaches the schemas and not the library."""
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: fast)
    tiny_run.save_target(tmp_path / "target")
    assert TargetModel.from_pretrained(str(tmp_path / "target")).dtype == (torch.bfloat16 if fast else torch.float32)


def test_stores_keep_what_they_began_with(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches float32 on the disk because a CPU is faster in it, and a store refused on a machine of another kind."""
    from test_features import run, write_config

    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    config = write_config(tmp_path, target_folder, dtype="auto", store_dtype=None)
    run(config)
    assert "runs in float32 (dtype: auto)" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "out" / "train")
    assert (manifest.target_dtype, manifest.dtype) == ("float32", "bfloat16")
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    run(config)
    assert read_manifest(tmp_path / "out" / "train") == manifest
    assert "runs in float32 (dtype: auto)" in capsys.readouterr().out


def test_a_run_goes_on_in_another(target: TargetModel, features: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Catches precision: auto that is written down as such, and a run that cannot go on where bf16 is slow."""
    values = tiny_run.settings(target.name, features, tmp_path / "run", precision="auto", save_every=3)
    for fast, steps, expected in ((True, 3, "bf16"), (False, 6, "float32")):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda fast=fast: fast)
        settled = settle_precision(tiny_run.read("eagle", values)).precision
        assert settled == expected
        run = tiny_run.train_here("eagle", {**values, "precision": settled, "steps": steps}, resume=steps > 3)
        assert run.progress.step == steps and dtype_of(run.config) == resolve_dtype("auto", CPU)


def test_answers_begun_in_another_dtype_go_on() -> None:
    """Catches answers refused because a config says auto now where it said bfloat16, and a dtype that is asked for and
    not heeded."""
    check_identity(Path("answers"), {"dtype": "bfloat16", "seed": 0}, {"dtype": "auto", "seed": 0})
    with pytest.raises(ValueError, match="dtype was 'auto', is 'float32'"):
        check_identity(Path("answers"), {"dtype": "auto"}, {"dtype": "float32"})
