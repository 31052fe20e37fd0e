"""Keys of released heads' config.json: every value of every key imports, or is refused by the key's name."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_block_layouts as block
import test_eagle3_layouts as eagle3
import test_export as eagle
from test_eagle3_layouts import IDS, rewrite, save_target, written

import drafters.layouts.convert
from drafters import TargetModel
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts import files
from drafters.layouts.convert import convert
from drafters.layouts.export import export
from drafters.methods.eagle import EagleDrafter

VALUES = (None, [], "text", 7, -1, 10**30, True, {})
EAGLE3 = ("official", "sglang", "speculators")
BLOCKS = ("z-lab", "sglang dspark", "speculators dspark")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"), rms_norm_eps=1e-5)  # not what an absent key means


@pytest.fixture(scope="module")
def released(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads in all forms."""
    root = tmp_path_factory.mktemp("released")
    heads = {"eagle": ("vllm", eagle.save_head(root / "eagle head", target))}
    for form in EAGLE3:
        heads[form] = (form, eagle3.save_head(root / f"{form} head", target, **eagle3.FORMS[form]))
    for case in BLOCKS:
        to, method, options = block.FORMS[case]
        heads[case] = (to, block.save_head(root / f"{case} head", method, target, **options))
    for name, (to, head) in heads.items():
        export(head, to, root / name)
    return {name: root / name for name in heads}


def paths(config: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    group = found
    for key in path[:-1]:
        group = group[key]
    group[path[-1]] = value
    return found


def test_every_value_of_every_key(
    released: dict[str, Path], target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback, and a message that does not say which key to correct."""
    module: Any = drafters.layouts.convert
    ends, seen, refused = module.load_frozen_ends(target.name, "float32", "meta"), set[tuple[str, ...]](), 0
    monkeypatch.setattr(module, "load_frozen_ends", lambda *given: ends)
    monkeypatch.setattr(module, "save_checkpoint", lambda *given, **options: None)
    one_head = EagleDrafter.build_module(target.config, {})  # it builds a whole model: 20 ms each
    monkeypatch.setattr(EagleDrafter, "build_module", lambda *given: one_head)
    for name, folder in released.items():
        (tmp_path / name).mkdir()
        read = files.read_weights(folder, name)
        with monkeypatch.context() as reading:
            reading.setattr(files, "read_weights", lambda *given, read=read: (read[0], dict(read[1])))
            config = written(folder)[0]
            for path in [path for path in paths(config) if path not in seen]:
                seen.add(path)
                for value in VALUES:
                    (tmp_path / name / "config.json").write_text(json.dumps(changed(config, path, value)))
                    try:
                        convert(str(tmp_path / name), target.name, tmp_path / "out")
                    except ValueError as error:
                        refused += 1
                        absent = value in (None, {})  # then it names a key that is missing
                        assert absent or path[-1] in str(error), (name, path, value)
    assert len(seen) > 90 and refused > 200


Change = dict[str, Any]
# What a config.json of a form says, and the error.
REFUSED: dict[str, tuple[str, Change, str]] = {
    "no hidden states": ("sglang", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    "none at the top": ("official", {"use_aux_hidden_state": False}, "use_aux_hidden_state is false: .* final norm"),
    "eps": ("z-lab", {"rms_norm_eps": "1e-6"}, r"config.json: rms_norm_eps: .* valid number .found '1e-6'."),
    "eps of 2": ("z-lab", {"rms_norm_eps": 2}, "rms_norm_eps: .* less than 1 .found 2."),
    "rope": ("sglang dspark", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type: .* string"),
    "layers": ("z-lab", {"layer_types": 7}, "layer_types: .* valid list .found 7."),
    "4,095 layers": ("official", {"num_hidden_layers": 4095}, "num_hidden_layers is 4095 .* tensors are of 1"),
    "heads": ("z-lab", {"num_attention_heads": 8}, r"num_attention_heads \* head_dim is 96 .*q_proj has 48 rows"),
    "wide": ("sglang", {"intermediate_size": 1_000_000}, "intermediate_size is 1,000,000 .*gate_proj has 80 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(case: str, released: dict[str, Path], target: TargetModel, tmp_path: Path) -> None:
    """Catches a head that reads another state than in training, and a hang on a number that no tensor has."""
    form, change, message = REFUSED[case]
    config, weights = written(released[form])
    rewrite(tmp_path, config | change, weights)
    with pytest.raises(ValueError, match=message):
        convert(str(tmp_path), target.name, tmp_path / "out")


def import_of(form: Path, target: TargetModel, folder: Path, change: Change, **options: Any) -> tuple[Change, str]:
    """Options and notes of the import of a head without origin, with a ``change`` of its config.json."""
    config, weights = written(form)
    del config["made_from"]
    folder.mkdir()
    rewrite(folder, config | change, weights)
    notes = convert(str(folder), target.name, folder / "ours", **options)
    return load_checkpoint(folder / "ours")[0]["drafter"], " ".join(notes)


def test_an_empty_list_of_states(released: dict[str, Path], target: TargetModel, tmp_path: Path) -> None:
    """Catches a folder that --taps cannot settle, because its list is compared with them."""
    empty = {"sglang": {"eagle_config": {IDS: []}}, "sglang dspark": {"target_layer_ids": []}}
    for form, change in empty.items():
        read, _ = import_of(released[form], target, tmp_path / form, change, taps=[1, 3, 6])
        assert read["taps"] == [1, 3, 6]
    with pytest.raises(ValueError, match=r"does not say which 3 .* --taps 2,3,5"):
        import_of(released["sglang dspark"], target, tmp_path / "none", empty["sglang dspark"])


@pytest.mark.parametrize(
    ("ids", "note"), [([2, 2, 4], "tap 2 is named 2 times"), ([4, 3, 2], "taps are not in ascending order")]
)
def test_an_unusual_order_of_states_is_told(
    ids: list[int], note: str, released: dict[str, Path], target: TargetModel, tmp_path: Path
) -> None:
    """Catches a head that reads one state twice, or the deepest one first, without a word."""
    block_ids = {"target_layer_ids": [tap - 1 for tap in ids]}
    for form, change in (("official", {"eagle_config": {IDS: ids}}), ("sglang dspark", block_ids)):
        read, told = import_of(released[form], target, tmp_path / form, change)
        assert read["taps"] == ids and f"({note}); engines hand over each once" in told
    for form in ("official", "sglang dspark"):
        config, weights = written(released[form])
        del config["made_from"]
        usual = tmp_path / f"{form} usual"
        usual.mkdir()
        rewrite(usual, config, weights)
        assert not any("engines hand over" in one for one in convert(str(usual), target.name, usual / "ours"))


def test_qwen3_without_its_norms(released: dict[str, Path], target: TargetModel, tmp_path: Path) -> None:
    """Catches a damaged head that is read as another kind of layer, and a model_type that hides norms from engines."""
    for name, form in (("sglang", "sglang"), ("dspark", "sglang dspark")):
        config, weights = written(released[form])
        bare = {key: value for key, value in weights.items() if not key.endswith(("q_norm.weight", "k_norm.weight"))}
        folder = tmp_path / name
        folder.mkdir()
        rewrite(folder, config | {"model_type": "qwen3"}, bare)
        with pytest.raises(ValueError, match=r"model_type is .qwen3., .* no layers.0.self_attn.q_norm.weight"):
            convert(str(folder), target.name, tmp_path / "out")
        rewrite(folder, config | {"model_type": "llama"}, bare)
        convert(str(folder), target.name, folder / "ours")
        assert load_checkpoint(folder / "ours")[0]["drafter"].get("layer", "llama") == "llama"
    read, told = import_of(released["sglang dspark"], target, tmp_path / "said", {"model_type": "llama"})
    assert read.get("layer", "qwen3") == "qwen3" and "its layers have Qwen3's norms" in told


@pytest.mark.parametrize("given", ["absent", None])
def test_an_absent_epsilon(given: str | None, released: dict[str, Path], target: TargetModel, tmp_path: Path) -> None:
    """Catches another default than 1e-6, which the configurations of Llama and Qwen3 have."""
    for form in ("official", "sglang dspark"):
        config, weights = written(released[form])
        config["rms_norm_eps"] = given
        if given == "absent":
            del config["rms_norm_eps"]
        folder = tmp_path / form
        folder.mkdir()
        rewrite(folder, config, weights)
        convert(str(folder), target.name, folder / "ours")
        shape = load_checkpoint(folder / "ours")[0]["drafter"]["shape"]
        assert shape["rms_norm_eps"] == 1e-6
    config, weights = written(released["eagle"])  # whose layer is the target's
    del config["rms_norm_eps"]
    rewrite(tmp_path, config | ({} if given else {"rms_norm_eps": given}), weights)
    notes = convert(str(tmp_path), target.name, tmp_path / "ours")
    assert "rms_norm_eps is 1e-06 in its config.json and 1e-05 in the layer that it gets" in notes
