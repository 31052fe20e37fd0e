"""Windows in stored forms of block heads: keys that are read and written, and what each program cannot serve."""

from pathlib import Path
from typing import Any

import pytest
from test_block_layouts import FIRST, same, save_head
from test_eagle3_layouts import rewrite, save_target, written

from drafters import TargetModel
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export, served_by

MIXED = {"sliding_window": 8, "full_layers": [1], "causal": "sliding"}
ANCHORED = {"sliding_window": 8, "window_edge": "anchor", "causal": "sliding"}
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "z-lab": ("official", "dflash", MIXED),
    "z-lab, both ways": ("official", "dflash", {"sliding_window": 8}),
    "vllm, causal": ("vllm", "dflash", MIXED | {"causal": True}),
    "sglang": ("sglang", "dflash", MIXED),
    "sglang, both ways": ("sglang", "dflash", {"sliding_window": 8}),
    "vllm dspark": ("vllm", "dspark", FIRST | MIXED),
    "speculators": ("speculators", "dflash", ANCHORED),
    "speculators, both ways": ("speculators", "dflash", ANCHORED | {"causal": False}),
    "speculators dspark": ("speculators", "dspark", FIRST | ANCHORED | {"full_layers": [0]}),
    "speculators dflash2": ("speculators", "dflash2", ANCHORED | {"causal": False}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("case", FORMS)
def test_there_and_back(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches a window, its edge, its layers or what rows see of one another that a form loses."""
    to, method, options = FORMS[case]
    head = save_head(tmp_path / "head", method, target, **options)
    export(head, to, tmp_path / "there")
    assert check(tmp_path / "there", to, target.name)
    convert(str(tmp_path / "there"), target.name, tmp_path / "back")
    same(head, tmp_path / "back")
    export(str(tmp_path / "back"), to, tmp_path / "again")
    one, other = written(tmp_path / "there"), written(tmp_path / "again")
    assert {**one[0], "made_from": 0} == {**other[0], "made_from": 0}


SLIDING = ["sliding_attention", "full_attention"]
# Keys that a released folder has, and the head that its authors' code trains.
READ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "z-lab since Qwen3.6": ("official", {"layer_types": SLIDING, "sliding_window": 8}, MIXED),
    "z-lab, causal": (
        "official", {"layer_types": SLIDING, "sliding_window": 8, "is_causal": True}, MIXED | {"causal": True}
    ),
    "Model-Optimizer": (
        "official", {"use_swa": True, "swa_window_size": 8, "causal": False}, {"sliding_window": 8}
    ),
    "speculators": ("speculators", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, ANCHORED),
    "speculators, some": (
        "speculators", {"layer_types": SLIDING, "sliding_window": 8}, ANCHORED | {"full_layers": [1]}
    ),
    "speculators, both ways": (
        "speculators",
        {"layer_types": SLIDING, "sliding_window": 8, "sliding_window_non_causal": True},
        ANCHORED | {"full_layers": [1], "causal": False},
    ),
    "a window of no layer": ("official", {"sliding_window": 8, "use_sliding_window": False}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_released_folders_mean(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches an edge or a causality of another program's, or of another default."""
    to, keys, expected = READ[case]
    export(save_head(tmp_path / "head", "dflash", target), to, tmp_path / "there")
    config, weights = written(tmp_path / "there")
    layer = config["transformer_layer_config"] if to == "speculators" else config
    layer |= {key: keys[key] for key in keys if key in ("layer_types", "sliding_window", "use_sliding_window")}
    for key in ("is_causal", "sliding_window_non_causal"):
        config.pop(key, None)
        config |= {key: keys[key]} if keys.get(key) is not None else {}
    if to != "speculators":
        grouped = {key: keys[key] for key in keys if key in ("use_swa", "swa_window_size", "causal")}
        config["dflash_config"].pop("causal")
        config["dflash_config"] |= grouped
    rewrite(tmp_path / "there", config, weights)
    notes = convert(str(tmp_path / "there"), target.name, tmp_path / "back")
    options = load_checkpoint(str(tmp_path / "back"))[0]["drafter"]
    found = {key: options[key] for key in ("sliding_window", "full_layers", "window_edge", "causal") if key in options}
    assert found == {key: value for key, value in expected.items() if value not in (False, "slot")}
    assert any("windows end at the anchor" in note for note in notes) is (to == "speculators")


REFUSED = {
    "vllm an anchored edge": ("vllm", "dflash", ANCHORED, "windows move with the rows of a block .window_edge: slot"),
    "z-lab an anchored edge": ("official", "dflash", ANCHORED, "window_edge: slot"),
    "sglang both ways": ("sglang", "dspark", FIRST | {"sliding_window": 8}, "sliding layers are causal, its full ones"),
    "speculators a moving edge": ("speculators", "dflash", MIXED, "windows end at the anchor .window_edge: anchor"),
    "speculators causal full layers": (
        "speculators", "dflash", ANCHORED | {"full_layers": [0], "causal": True}, "attend in both directions"
    ),
    "llama.cpp": ("llama.cpp", "dflash", {"sliding_window": 8}, "attend to all tokens .sliding_window: null"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_form_cannot_say_is_refused(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches a head that is served with other windows than it was trained with, which lowers acceptance silently."""
    to, method, options, message = REFUSED[case]
    head = save_head(tmp_path / "head", method, target, **options)
    with pytest.raises(ValueError, match=message):
        export(head, to, tmp_path / "out")
    assert served_by(method, load_checkpoint(head)[0]["drafter"], target.config)[to] is not None


TRAPS: dict[str, tuple[str, dict[str, Any], bool | None, str | None]] = {
    "mixed": (
        "dflash",
        ANCHORED | {"full_layers": [1]},
        False,
        "is false, so that .* see earlier rows only in all layers",
    ),
    "all": ("dflash", ANCHORED, False, None),
    "absent": ("dflash", ANCHORED, None, "is absent, so that the rows of a block would see one another in all layers"),
    "both ways": ("dflash", ANCHORED | {"causal": False}, True, None),
    "dflash2, absent": ("dflash2", ANCHORED | {"causal": False, "full_layers": [1]}, None, None),
    "dflash2, causal": ("dflash2", ANCHORED | {"full_layers": [1]}, False, "is false, so that .* earlier rows only"),
    "dspark, mixed": ("dspark", FIRST | ANCHORED | {"full_layers": [1]}, False, None),
    "dspark, both ways": ("dspark", FIRST | ANCHORED | {"causal": False}, True, "its sliding layers would be causal"),
}


@pytest.mark.parametrize("case", TRAPS)
def test_what_vllm_makes_of_speculators_folders(case: str, target: TargetModel, tmp_path: Path) -> None:
    """Catches vLLM's one causality for all layers of a DFlash folder of speculators, which is not that of training."""
    method, options, non_causal, message = TRAPS[case]
    export(save_head(tmp_path / "head", method, target, **options), "speculators", tmp_path / "out")
    config, weights = written(tmp_path / "out")
    assert config["sliding_window_non_causal"] is (options["causal"] is False)
    if non_causal is None:
        config.pop("sliding_window_non_causal")
    rewrite(tmp_path / "out", config, weights)
    assert "for speculators" in check(tmp_path / "out", "speculators", target.name).replace("vLLM and ", "")
    if message is None:
        assert "vLLM's move with the rows" in check(tmp_path / "out", "vllm", target.name)
        return
    with pytest.raises(ValueError, match=f"is not for vLLM: .*{message}"):
        check(tmp_path / "out", "vllm", target.name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_swa": True, "swa_window_size": 8}, "windows with two edges: those of use_swa move .* remove use_swa"),
        ({"sliding_window": 16}, "sliding_window is 8 in transformer_layer_config and 16 beside it"),
    ],
)
def test_two_windows_of_one_folder_are_refused(
    keys: dict[str, Any], message: str, target: TargetModel, tmp_path: Path
) -> None:
    """Catches a folder that states two edges or two lengths, and is read by one of them."""
    export(save_head(tmp_path / "head", "dflash", target, **ANCHORED), "speculators", tmp_path / "out")
    config, weights = written(tmp_path / "out")
    rewrite(tmp_path / "out", config | keys, weights)
    with pytest.raises(ValueError, match=message):
        check(tmp_path / "out", None, target.name)
    with pytest.raises(ValueError, match=message):
        convert(str(tmp_path / "out"), target.name, tmp_path / "back")
