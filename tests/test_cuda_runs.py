"""Every method, the feature dump, a training step and a speed test on the simulated GPU: what a CPU cannot show."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import cuda_runs
import pytest
from cuda_runs import GREEDY_ONLY, METHODS, PROMPTS, Decoded, Models
from host_reads import ALLOWED
from rigged import eagle
from simulated_cuda import simulated_cuda
from test_candidates import with_pair

from drafters import drafter_class, load_drafter
from drafters.loop import acceptance
from drafters.methods import method_names
from drafters.model.candidates import Candidates

RUNS = [(method, temperature) for method in METHODS for temperature in (0.0, 1.0)]
RUNS = [(method, temperature) for method, temperature in RUNS if temperature == 0 or method not in GREEDY_ONLY]
ONE = [PROMPTS[:1]]
BATCHED = [run for run in RUNS if drafter_class(run[0].split()[0]).max_batch is None]


@dataclass
class Outcomes:
    """What each run gave on the CPU and on the simulated GPU, or the error that it ended with."""

    plain: dict[tuple[str, float], Decoded] = field(default_factory=dict)
    there: dict[tuple[str, float], Decoded | Exception] = field(default_factory=dict)
    graphs: int = 0


def outcomes(engine: str, runs: list[tuple[str, float]], prompts: list[list[list[int]]], new_tokens: int) -> Outcomes:
    found = Outcomes()
    decode = partial(cuda_runs.decode, prompts=prompts, new_tokens=new_tokens)
    models = Models("cpu", engine)
    # Without a CPU's short cuts, so that both draw the same random numbers.
    with mock.patch.object(acceptance, "FEW_ROWS", 0):
        for method, temperature in runs:
            found.plain[method, temperature] = decode(method, models, temperature)
    with simulated_cuda() as gpu:
        models = Models("cuda", engine)
        for method, temperature in runs:
            gpu.log.clear()
            try:
                found.there[method, temperature] = decode(method, models, temperature)
            except Exception as error:  # the test of this run shows it, not that of all others
                found.there[method, temperature] = error
            found.graphs += gpu.count("replay")
    return found


# make test decodes greedily with one drafter of each kind, and samples with each method that can.
KINDS = ("autoregressive", "eagle dynamic")
LESS = ("eagle chain", "eagle static", "dflash chain", "dspark chain")  # than a tree of the same method


def in_time(run: tuple[str, float]) -> Any:
    """Of make test, or of make test-long."""
    method, temperature = run
    chosen = (temperature > 0 and method not in LESS) or method in GREEDY_ONLY or method in KINDS
    return run if chosen else pytest.param(run, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def on_graphs(request: pytest.FixtureRequest) -> Outcomes:
    """The runs that tests of this session ask for, with captured forwards."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {given["run"] for given in asked if "run" in given}
    return outcomes("graphs", [run for run in RUNS if run in wanted], ONE, 9)


def same(found: Outcomes, run: tuple[str, float]) -> Decoded:
    there = found.there[run]
    if isinstance(there, Exception):
        raise there
    assert there.tokens == found.plain[run].tokens and there.accepted == found.plain[run].accepted
    return there


def test_every_method_is_here() -> None:
    """Catches a new method that never runs on the simulated GPU."""
    assert {name.split()[0] for name in METHODS} == set(method_names())


@pytest.mark.parametrize("run", [in_time(run) for run in RUNS], ids=lambda run: f"{run[0]} {run[1]:g}")
def test_graphs_give_the_cpus_tokens(on_graphs: Outcomes, run: tuple[str, float]) -> None:
    """Catches a tensor made on the wrong device, a read in a capture, a value that Python puts in at capture only, and
    a second copy to the host in a step of the loop: each waits for all work that was queued before it."""
    there = same(on_graphs, run)
    assert there.replays > 0
    hardly = ("autoregressive", "prompt_lookup", "suffix", "rest", "lookahead", "bild")
    assert sum(there.accepted) > 0 or run[0] in hardly
    most = ALLOWED[run[0].split()[0]].reads if run[0].split()[0] in ALLOWED else 1
    assert max(there.reads) <= most, there.where
    assert min(there.reads) >= 1


@pytest.mark.parametrize("engine", ["fused", "stock"])
def test_without_graphs(engine: str) -> None:
    """Catches what the graphs' engine hides: masks, positions and RoPE are made outside of any graph here."""
    found = outcomes(engine, [(method, 1.0) for method in ("autoregressive", "kangaroo", "eagle dynamic")], ONE, 8)
    for run in found.there:
        same(found, run)
    assert found.graphs == 0


def test_batches() -> None:
    """Catches lengths that differ by row and are put into a captured graph, or copied where they must not be."""
    found = outcomes("graphs", BATCHED[::5], [PROMPTS], 6)
    for run in found.there:
        there = same(found, run)
        assert max(there.reads) == 1


def test_candidates_are_chosen_on_the_device(tmp_path: Path) -> None:
    """Catches a pair or rows of the LM head on another device, and candidates that are copied to the host."""
    with_pair(eagle(Models("cpu", "graphs").target("eagle"), None, "dynamic"), 12).save_pretrained(tmp_path)
    runs = [("eagle candidates", 0.0), ("eagle candidates", 1.0)]
    made = {runs[0][0]: lambda target, _: load_drafter(str(tmp_path), target, tree="dynamic", top_k=4, nodes=12)}
    with mock.patch.dict(METHODS, made), mock.patch.object(Candidates, "reads_less", lambda *given: True):
        found = outcomes("graphs", runs, ONE, 9)
    for run in runs:
        assert max(same(found, run).reads) == 1
