"""The engine "compiled": the same values as fused layers, few compilations, and what it refuses."""

from functools import cache, partial
from typing import Any

import pytest
import tiny
import torch
from families import DECODED, build
from simulated_cuda import simulated_cuda
from test_fused import forwards
from torch._dynamo.utils import counters
from torch.nn import functional as F

from drafters import TargetModel
from drafters.model import elementwise


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_compiled_equals_fused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a function that torch cannot trace whole, another order of its arguments, and a switch left on. Without
    Inductor, which takes seconds for each shape."""
    traced: list[str] = []
    whole = partial(torch.compile, fullgraph=True, backend="eager")

    def note(function: Any) -> Any:
        traced.append(function.__name__)
        return whole(function)

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(elementwise, "_compile", cache(elementwise._compile.__wrapped__))
    model = tiny.build(family)
    compiled = TargetModel(model, engine="compiled")
    assert compiled.engine == "compiled"
    ours = forwards(compiled)
    expected = {"rotate", "add_norm", "gate"} - ({"gate"} if family == "mixtral" else set())
    assert set(traced) == expected  # ``softmax`` is for CUDA
    traced.clear()
    for one, other in zip(ours, forwards(TargetModel(model, engine="fused")), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)
    assert not traced


def test_inductor_compiles_each_function_twice() -> None:
    """Catches a compilation for every number of rows, which would be a minute each, and other values."""
    torch.manual_seed(0)
    cos, sin, norm, bias = torch.randn(4, 1, 30, 1, 32)
    norm = norm[0, :12, 0]
    counters.clear()
    for rows in (1, 6, 17, 26, 30):
        heads = torch.randn(1, rows, 12, 32)
        hidden = heads.flatten(2)
        calls: list[tuple[Any, Any]] = [
            (elementwise.rotate, (heads, cos[:, :rows], sin[:, :rows], norm, 1e-6)),
            (elementwise.softmax, (torch.randn(1, 4, rows, 32), 0.1, bias[:, :rows, 0][:, None], torch.float32)),
            (elementwise.add_norm, (hidden, hidden.roll(1), torch.rand(384), 1e-6)),
            (elementwise.gate, (hidden, F.silu)),
        ]
        for function, arguments in calls:
            with elementwise.compiling(True):
                ours = function(*arguments)
            torch.testing.assert_close(ours, function(*arguments))
    assert counters["stats"]["unique_graphs"] == 2 * len(calls)


def test_targets_that_it_cannot_run() -> None:
    """Catches the model's own forward, or no graph at all, under the name of this engine."""
    model: Any = build("glm4", DECODED["glm4"] | {"num_hidden_layers": 2})
    with pytest.raises(ValueError, match="'compiled' cannot run .*: its layers are not rewritten.*use engine 'stock'"):
        TargetModel(model, engine="compiled")
    with simulated_cuda():
        llama: Any = tiny.build("llama").to("cuda")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'compiled' cannot run .*: no CUDA graph could be captured"):
            TargetModel(llama, engine="compiled")
        assert TargetModel(llama).engine == "graphs"
