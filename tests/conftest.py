"""What every test shares: no network, one thread, fixed seeds, tiny models.

``tiny_model(family)`` is a model, ``tiny_checkpoint(family)`` a folder that ``from_pretrained`` reads; both are made
once per session and shared, so a test must not change them (build its own with ``tiny.build`` if it must).
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported, so before anything else
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # no test needs the chunked upload service
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start
os.environ.setdefault("DRAFTERS_CACHE", "/nonexistent")  # costs measured on a busy machine are not cached

import ast
import gc
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nursery
import pytest
import tiny
import tiny_run
import torch
from chat_formats import CHAT_VOCAB, CHATML, CHATML_SPECIALS, byte_level
from programs import without_pictures
from test_eval_prompts import write, write_target
from transformers import PreTrainedModel

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from drafters.model.ends import FrozenEnds, load_frozen_ends
from drafters.policy import costs as cost

tiny_run.without_pictures()
nursery.start(tiny_run.import_deepspeed)
cost.SECONDS = 0.0  # two rounds of measurement are enough for tests
torch.set_num_threads(1)  # tiny models gain nothing from more, and threads that wait for a busy core cost seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers share the files, those with slow tests come first: else one worker waits for the other's last."""
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays: Python's collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Seeds every global generator, so that a test's numbers do not depend on which tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(family, seed=0, **config_changes)``, cached for the session."""
    made: dict[tuple[object, ...], PreTrainedModel] = {}

    def get(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
        key = (family, seed, *sorted(changes.items()))
        if key not in made:
            made[key] = tiny.build(family, seed, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``tiny_checkpoint(family, seed=0, **config_changes)``: the folder of that model in Hugging Face format."""
    saved: dict[tuple[object, ...], Path] = {}

    def get(family: str, seed: int = 0, **changes: object) -> Path:
        key = (family, seed, *sorted(changes.items()))
        if key not in saved:
            folder = tmp_path_factory.mktemp("tiny") / f"{family}-{seed}"
            tiny_model(family, seed, **changes).save_pretrained(folder)
            saved[key] = folder
        return saved[key]

    return get


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that models are loaded from, as they are."""
    paths: list[str] = []
    load = TargetModel.from_pretrained

    def counted(path: str, *arguments: Any, **options: Any) -> TargetModel:
        paths.append(path)
        return load(path, *arguments, **options)

    monkeypatch.setattr(TargetModel, "from_pretrained", counted)
    return paths


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than most reports of tests."""
    without_pictures(monkeypatch)


@pytest.fixture
def speed_config(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``speed_config(records, prompts, **keys)``: a config of eval.speed on a tiny target, with prompts of records."""

    def config(records: Iterable[Any], prompts: dict[str, Any], **keys: Any) -> dict[str, Any]:
        target = {"path": write_target(tmp_path, tiny_model("llama")), "dtype": "float32", "device": "cpu"}
        prompts = {"file": str(write(tmp_path / "prompts.jsonl", records)), **prompts}
        return {"target": target, "prompts": prompts, "out": str(tmp_path / "out"), "warmup": 1, **keys}

    return config


@pytest.fixture(scope="session")
def small_stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few dozen modules of the standard library: all of it takes ten seconds to read."""
    folder = tmp_path_factory.mktemp("stdlib")
    for file in sorted(Path(ast.__file__).parent.glob("[a-d]*.py")):
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A tiny Llama, saved in the folder that its name gives, for tests of training."""
    return tiny_run.save_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="session")
def features(target: TargetModel) -> Path:
    """The feature stores train/ and heldout/ of ``target``."""
    return tiny_run.write_stores(Path(target.name).with_name("features"), target)


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    """A run config of a few steps on them."""
    return tiny_run.settings(target.name, features, tmp_path / "run")


@pytest.fixture(scope="session")
def folder(features: Path) -> Path:
    """What holds ``target/`` and ``features/``."""
    return features.parent


@pytest.fixture(scope="session")
def store(features: Path) -> FeatureStore:
    """The training store."""
    return FeatureStore.open(features / "train")


@pytest.fixture(scope="session")
def ends(target: TargetModel) -> FrozenEnds:
    """The frozen ends of ``target``, in float32."""
    return load_frozen_ends(target.name, dtype="float32")


@pytest.fixture(scope="session")
def target_folder(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a ChatML template."""
    folder = tmp_path_factory.mktemp("target") / "llama"
    shutil.copytree(tiny_checkpoint("llama", vocab_size=CHAT_VOCAB), folder)
    byte_level(CHATML, CHATML_SPECIALS, None, "<|im_end|>", vocab_size=CHAT_VOCAB).save_pretrained(folder)
    return folder


LEVELS_HERE = {
    "avx512": True,
    "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    "amx": torch.cpu._is_amx_tile_supported(),
}


@pytest.fixture(params=LEVELS_HERE)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction level of the CPU kernels that this machine has, for one test each."""
    from drafters.cpu import kernels  # the suite also runs without that folder

    if not LEVELS_HERE[request.param]:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv(kernels.SWITCH, request.param)
    kernels.library.cache_clear()
    yield request.param
    kernels.library.cache_clear()
