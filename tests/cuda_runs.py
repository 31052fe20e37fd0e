"""Every method on the CPU and on the simulated GPU: what it decodes, and what crosses between the two a step."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
from conformance import NO_EOS, prompt, rows_of
from mtp_layers import mtp
from rigged import dflash, dflash2, dspark, eagle, eagle3, kangaroo, medusa, peagle, perturbed, quiet_depths
from simulated_cuda import SimulatedCuda

from data_prep.answers.datastore import datastore_of, save_datastore
from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.drafting.token_file import vocabulary_facts
from drafters.loop import generate as loop

RATES = [0.8, 0.6, 0.4]
NEAR = 0.05  # of a draft model: some of its drafts are accepted, not all


class Models:
    """Targets and draft models of one device, made once: a tiny Llama, and for Kangaroo one with quiet deep layers."""

    def __init__(self, device: str, engine: str | None) -> None:
        self.device, self.engine = device, engine
        self._targets: dict[bool, TargetModel] = {}

    def target(self, method: str) -> TargetModel:
        """A method's target."""
        quiet = method == "kangaroo"
        if quiet not in self._targets:
            model = quiet_depths(0.1)("llama") if quiet else tiny.build("llama")
            self._targets[quiet] = TargetModel(model.to(self.device), engine=self.engine, name="tiny")  # type: ignore
        return self._targets[quiet]

    def near(self, target: TargetModel, seed: int = 0) -> TargetModel:
        """A draft model near a target."""
        return perturbed(target, NEAR, seed)


def _near(name: str, **options: Any) -> Callable[[TargetModel, Models], Drafter]:
    return lambda target, models: make_drafter(name, target, draft_model=models.near(target), **options)


def _specinfer(target: TargetModel, models: Models) -> Drafter:
    return make_drafter("specinfer", target, draft_models=[models.near(target, seed) for seed in (0, 3)], gamma=4)


def _cascade(target: TargetModel, models: Models) -> Drafter:
    draft_model = models.near(target)
    inner = {"drafter": "speculative", "draft_model": models.near(draft_model, 1), "gamma": 2}
    return make_drafter("cascade", target, draft_model=draft_model, inner=inner, gamma=4)


def _rest(target: TargetModel, models: Models) -> Drafter:
    """Of texts that have nothing to do with the answers."""
    facts = vocabulary_facts(target.name, target.vocab_size, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.safetensors"
        save_datastore(path, datastore_of([prompt(60, seed) for seed in range(8)]), facts)
        return make_drafter("rest", target, datastore=str(path), min_ngram=1, nodes=8)


# Each as a user has it, with a draft model near the target or a head that is an oracle with noise: drafts are accepted
# in part. EAGLE three times, for each kind of tree.
METHODS: dict[str, Callable[[TargetModel, Models], Drafter]] = {
    "autoregressive": lambda target, _: make_drafter("autoregressive", target),
    "prompt_lookup": lambda target, _: make_drafter("prompt_lookup", target, gamma=3),
    "suffix": lambda target, _: make_drafter("suffix", target, nodes=4),
    "rest": _rest,
    "hybrid": lambda target, _: make_drafter("hybrid", target, head=eagle(target, 0.4, "static"), match=2),
    "lookahead": lambda target, _: make_drafter("lookahead", target),
    "speculative": _near("speculative", gamma=4),
    "cascade": _cascade,
    "specinfer": _specinfer,
    "spectr": _near("spectr", gamma=4, drafts=3, draft_temperature=0.5),
    "ouroboros": _near("ouroboros", gamma=3, window=3),
    "llmcad": _near("llmcad", nodes=9, branches=3, alpha=1e-3),
    "mjsd": _near("mjsd", gamma=3, beams=3, threshold=0.5),
    "mjgd": lambda target, _: make_drafter("mjgd", target, k=3, beams=3),
    "bild": _near("bild", gamma=5, fallback=0.1, rollback=1.5),
    "eagle chain": lambda target, _: eagle(target, 0.4, "chain"),
    "eagle static": lambda target, _: eagle(target, 0.4, "static"),
    "eagle dynamic": lambda target, _: eagle(target, 0.4, "dynamic", top_k=4, nodes=12),
    "eagle3": lambda target, _: eagle3(target, 0.4, "dynamic", top_k=4, nodes=12),
    "medusa": lambda target, _: medusa(target, 0.4, "static", nodes=12),
    "mtp": lambda target, _: mtp(target, "chain", 0.4),
    "mtp of two layers": lambda target, _: mtp(target, "dynamic", 0.4, layers=2, top_k=4, nodes=12),
    "peagle tree": lambda target, _: peagle(target, "tree", 0.4, nodes=12, top_k=4),
    "dflash chain": lambda target, _: dflash(target, 0.4, "chain"),
    "dflash tree": lambda target, _: dflash(target, 0.4, "tree", nodes=12, top_k=4),
    "dflash2 tree": lambda target, _: dflash2(target, 0.4, "tree", nodes=12, top_k=4),
    "dspark chain": lambda target, _: dspark(target, 0.2, "chain"),
    "dspark tree": lambda target, _: dspark(target, 0.2, "tree", nodes=12, top_k=4, markov_head="rnn"),
    "kangaroo": lambda target, _: kangaroo(target, True, eta=0.05),
    "replay": lambda target, _: make_drafter("replay", target, inner=eagle(target, None, "static"), profile=RATES),
}
GREEDY_ONLY = {"replay"}
PROMPTS = [prompt(9), prompt(14, 1), prompt(6, 2)]


@dataclass
class Decoded:
    """What a method gave.

    Attributes:
        tokens: of each prompt. accepted: draft tokens, of each step.
        reads, uploads: of each step, how often the host waited for a copy from the device, or to it.
        waits: synchronisations that were asked for. replays: of captured forwards. where: of all, by kind and line.
    """

    tokens: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    uploads: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    replays: int = 0
    where: Counter[tuple[str, str]] = field(default_factory=Counter)


def decode(
    method: str, models: Models, temperature: float, prompts: list[list[list[int]]], new_tokens: int = 18
) -> Decoded:
    """Run a method over batches of prompts, one after the other."""
    target = models.target(method)
    drafter = METHODS[method](target, models)
    found = Decoded()
    with _counted_steps(found):
        for batch in prompts:
            result = generate(
                target, drafter, batch, max_new_tokens=new_tokens, temperature=temperature, seed=3, eos_token_id=NO_EOS
            )
            found.tokens += rows_of(result)
            found.accepted += [step.accepted for step in result.trace.steps]
    return found


@contextmanager
def _counted_steps(found: Decoded) -> Iterator[None]:
    """Note what crosses in each step of the loop; what only a rig does, an oracle's peeping, is left out."""
    step, gpu = loop.step, SimulatedCuda.active
    inside = False

    def counted(*args: Any) -> Any:
        nonlocal inside
        if inside or gpu is None:  # a cascade's inner steps are part of the outer one
            return step(*args)
        inside, first = True, len(gpu.log)
        try:
            return step(*args)
        finally:
            inside = False
            events = [event for event in gpu.log[first:] if not event.where.startswith("tests/")]
            kinds = Counter(event.kind for event in events)
            found.reads.append(kinds["read"])
            found.uploads.append(kinds["upload"])
            found.waits.append(kinds["wait"])
            found.replays += kinds["replay"]
            found.where.update((event.kind, event.where) for event in events)

    with mock.patch.object(loop, "step", counted):
        yield
