"""dtype: auto and precision: auto: bf16 where the device has instructions for it, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml

from data_prep.configs import FeaturesConfig, MagpieConfig, RegenerateConfig
from data_prep.store.manifest import read_manifest
from drafters import TargetModel
from drafters.common import precision
from drafters.model.files import resolve_dtype
from eval.configs import RooflineConfig, TargetEntry
from train.core.config import OnlineData
from train.core.runtime import dtype_of
from train.eagle import EagleConfig
from train.run.training import settle

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


@pytest.mark.parametrize(
    ("machine", "level", "amx", "dtype"),
    [
        ("x86_64", "AVX512", True, torch.bfloat16),
        ("x86_64", "AVX512", False, torch.float32),
        ("x86_64", "AVX2", True, torch.float32),
        ("aarch64", "DEFAULT", False, torch.bfloat16),
    ],
)
def test_which_cpus_train_in_bf16(
    machine: str, level: str, amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches training in bf16 on AVX-512 BF16 without AMX, which takes 1.5 times as long as float32."""
    this_cpu(monkeypatch, machine, level, True, True, amx)
    assert precision.training_dtype(CPU) == dtype


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


def test_auto_is_every_default() -> None:
    """Catches a program, or a config that ships, that asks for bf16 on every machine."""
    fields = [(schema, "dtype") for schema in (FeaturesConfig, RegenerateConfig, MagpieConfig, TargetEntry)]
    fields += [(RooflineConfig, "dtype"), (OnlineData, "target_dtype"), (EagleConfig, "precision")]
    for schema, key in fields:
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
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda fast=fast: fast)
        settled = settle(tiny_run.read("eagle", values)).precision
        assert settled == expected
        run = tiny_run.train_here("eagle", {**values, "precision": settled, "steps": steps}, resume=steps > 3)
        assert run.progress.step == steps and dtype_of(run.config) == resolve_dtype("auto", CPU)
