"""The target's hidden states: two numberings, one place that converts them, and the states that each method reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from drafters import TargetModel
from drafters.common import states
from drafters.methods import taps_for
from train.run.inputs import states_asked


def test_both_numberings() -> None:
    """Catches ids of one convention read by the other: acceptance falls, and nothing else shows it."""
    assert states.from_inputs([2, 16, 29]) == [2, 16, 29] == states.to_inputs([2, 16, 29])
    assert states.from_outputs([1, 9, 17, 25, 33]) == [2, 10, 18, 26, 34]
    assert states.to_outputs([2, 10, 18, 26, 34]) == [1, 9, 17, 25, 33]
    assert states.from_outputs([-1, 0]) == [0, 1] and states.to_outputs([0, 1]) == [-1, 0]
    # The same state by both: the output of layer 1 is the input of layer 2.
    assert states.from_outputs([1]) == states.from_inputs([2])
    for convert, wrong in ((states.from_inputs, -1), (states.from_outputs, -2), (states.to_outputs, -1)):
        with pytest.raises(ValueError, match=rf"{wrong}, and the least is {wrong + 1}"):
            convert([3, wrong])


def test_a_tap_is_what_its_name_says() -> None:
    """Catches a target that hands out other states than the names and both conversions say, by hooks on its layers."""
    model = tiny.build("llama")
    ids, layers = torch.tensor([[5, 6, 7, 8]]), len(model.model.layers)
    outputs = [  # "fused" first: it takes no model with hooks, and transformers' own recorder leaves some
        TargetModel(model, engine=engine).features(ids, taps=tuple(range(layers))) for engine in ("fused", "stock")
    ]
    seen: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):

        def note(module: Any, given: Any, out: torch.Tensor, number: int = number) -> None:
            seen.update({f"input {number}": given[0], f"output {number}": out})

        layer.register_forward_hook(note)
    recorded = model(input_ids=ids, output_hidden_states=True).hidden_states
    seen["output -1"] = model.model.embed_tokens(ids)
    for output in outputs:
        for tap in range(layers):
            (entered,), (left,) = states.to_inputs([tap]), states.to_outputs([tap])
            for expected in (recorded[tap], seen[f"input {entered}"], seen[f"output {left}"]):
                torch.testing.assert_close(output.taps[tap], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(output.features, recorded[-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (32, [2, 16, 29]), (36, [2, 18, 33]), (48, [2, 24, 45]), (30, [2, 15, 27]), (7, [2, 3, 4]),
        (6, [1, 3, 5]), (5, [1, 2, 4]), (4, [1, 2, 3]),
    ],
)  # fmt: skip
def test_eagle3_defaults(layers: int, expected: list[int]) -> None:
    """Catches other layers than those of released heads, and taps of a shallow target that repeat ([2, 3, 3] of 6)."""
    assert states.eagle3_taps(layers) == expected


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (48, 5, [1, 12, 23, 34, 45]),
        (30, 5, [1, 8, 14, 20, 27]),  # 7.5 and 20.5: each to the even number
        (36, 1, [18]),
        (36, 3, [1, 17, 33]),
        (8, 5, [1, 2, 3, 4, 5]),
        (7, 5, [0, 1, 2, 3, 5]),
        (6, 5, [0, 1, 2, 3, 4]),
        (4, 2, [0, 2]),
        (3, 1, [0]),
    ],
)
def test_dflash_defaults(layers: int, count: int, expected: list[int]) -> None:
    """Catches other layers than z-lab's, whose numbers are outputs, and rounding that differs from the engines'."""
    assert states.to_outputs(states.dflash_taps(layers, count)) == expected


@pytest.mark.parametrize("layers", range(1, 81))
def test_defaults_are_states_that_exist(layers: int) -> None:
    """Catches a default that repeats, falls, or is the embeddings' output or no layer's of the target."""
    for rule, least in ((states.eagle3_taps, 4), (states.dflash_taps, 6)):
        if layers < least:
            with pytest.raises(ValueError, match=rf"has {layers} layers, and \d different taps need at least {least};"):
                rule(layers)
        else:
            taps = rule(layers)
            assert taps == sorted(set(taps)) and taps[0] >= 1 and taps[-1] < layers


def test_a_union() -> None:
    """Catches a state that is stored twice, or left out because two methods read it."""
    assert taps_for(["eagle", "medusa"], 36) == []
    assert taps_for(["eagle3", "dflash", "dspark"], 36, [3]) == [2, 3, 10, 18, 26, 33, 34]
    with pytest.raises(ValueError, match="dflash: the target has 4 layers"):
        taps_for(["eagle", "dflash"], 4)


def test_the_keys_that_add_states() -> None:
    """Catches advice that drops states of the store, or names a method whose default is not what the drafter reads."""
    store: Any = SimpleNamespace(taps=[3])

    def asked(drafter: str, taps: tuple[int, ...], layers: int = 36) -> str:
        config: Any = SimpleNamespace(drafter=drafter, taps=taps)
        return states_asked(config, store, layers)

    assert asked("eagle3", (2, 18, 33)) == "'for=[eagle3]' 'exit_layers=[3]'"
    assert asked("eagle3", (2, 18, 30)) == "'exit_layers=[2, 3, 18, 30]'"
    assert asked("kangaroo", (2,)) == "'exit_layers=[2, 3]'"
    assert asked("dflash", (1, 2), layers=4) == "'exit_layers=[1, 2, 3]'"  # too shallow for the default
    assert asked("a_method_of_mine", (5,)) == "'exit_layers=[3, 5]'"


def test_the_order_of_states() -> None:
    """Catches a state that is read twice, beside another one too, and an order that no engine hands over."""
    assert states.disorder([0]) is states.disorder([2, 5, 9]) is None
    assert states.disorder([2, 5, 2]) == "tap 2 is named 2 times; name each state once"
    assert states.disorder([5, 2]) == "taps are not in ascending order; give [2, 5]"
