"""tau on held-out prompts by the real decoding loop, measured during training."""

import time

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from drafters.base import Drafter
from drafters.loop.generate import Trace, generate
from drafters.model.files import collect_memory
from drafters.model.target import TargetModel
from train.core.config import TrainConfig
from train.core.runtime import dtype_of
from train.core.task import Task
from train.data.packing import Source

CTAR_WIDTHS = range(1, 6)
SHORTER = "lower tau_new_tokens, or set tau_every: null"  # where no prompt fits
MOST_SECONDS = 480.0  # the other ranks wait idle meanwhile


def tau_prompts(config: TrainConfig, target: PretrainedConfig, store: Source) -> list[list[int]]:
    """``config.tau_prompts`` prompts that leave room for an answer of ``tau_new_tokens``; raises ValueError if none."""
    context = getattr(target, "max_position_embeddings", None) or 1 << 30
    return held_out_prompts(store, config.tau_prompts, room("tau_new_tokens", config.tau_new_tokens, context))


def room(key: str, new_tokens: int, context: int) -> int:
    """Tokens of the longest prompt before an answer of ``new_tokens``; raises ValueError, with ``key``, if none."""
    if new_tokens >= context:
        raise ValueError(
            f"{key} is {new_tokens:,}, and the context has {context:,} tokens, the prompt's included; give at most "
            f"{context - 1:,}"
        )
    return context - new_tokens


def held_out_prompts(
    store: Source, count: int, longest: int, key: str = "tau_every", fix: str = SHORTER
) -> list[list[int]]:
    """Token ids up to the first answer of ``count`` dialogues, spread over the store by a fixed shuffle; at most
    ``longest`` tokens. Raises ValueError, with ``key`` and ``fix``, if no dialogue has such a prompt."""
    prompts: list[list[int]] = []
    for index in torch.randperm(len(store), generator=torch.Generator().manual_seed(0)).tolist():
        dialogue = store[index]
        answers = dialogue.loss_mask.nonzero()
        if len(answers) and 1 <= int(answers[0]) <= longest:
            prompts.append(dialogue.input_ids[: int(answers[0])].tolist())
        if len(prompts) == count:
            break
    if not prompts:
        raise ValueError(
            f"{key}: none of the {len(store)} held-out dialogues has a prompt of 1 to {longest} tokens before its "
            f"first answer; {fix}"
        )
    return prompts


class HeldoutTau:
    """Measures tau on one rank. The target is loaded for it, and released afterwards unless the config keeps it.

    The training's module and random numbers do not change: the drafters get a copy of the weights, and random numbers
    come from a fork of the generators. A given ``target`` is not released.
    """

    def __init__(self, task: Task, store: Source, device: torch.device, target: TargetModel | None = None) -> None:
        self.task, self.config = task, (config := task.config)
        self.device = torch.device(config.tau_device) if config.tau_device else device
        self.prompts = tau_prompts(config, task.ends.config, store)
        self._target, self._given = target, target is not None

    def figures(self, weights: dict[str, Tensor]) -> dict[str, float]:
        """``heldout_tau`` (of EAGLE's chain, of Kangaroo), ``heldout_tau_tree`` (EAGLE), and by kind of draft
        ``heldout_<kind>_ctar_<w>`` and ``heldout_<kind>_alpha_<n>``, all as drafters.loop.generate defines them.

        These pool the steps of all prompts. In ``heldout_tau_by_prompt`` and ``heldout_tau_tree_by_prompt``, means of
        the prompts' own tau, a short answer counts as much as a long one.

        Raises:
            ValueError: the target cannot be loaded.
            torch.OutOfMemoryError: target and training do not fit together.
        """
        began = time.monotonic()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            with torch.random.fork_rng(devices=devices):
                by_prompt = self._decode(self.task.drafters(self._load(), weights))  # the drafters hold the target
        finally:
            if not (self.config.tau_keep_target or self._given):
                self._target = None
            collect_memory()
        figures = {"tau_seconds": round(time.monotonic() - began, 2)}
        for kind, traces in by_prompt.items():
            figures |= trace_figures(kind, traces)
        return figures

    def _decode(self, drafters: dict[str, Drafter]) -> dict[str, list[Trace]]:
        """One trace per drafter and prompt, all over the same prompts, as many as the time allows."""
        traces: dict[str, list[Trace]] = {kind: [] for kind in drafters}
        began = time.monotonic()
        for number, prompt in enumerate(self.prompts):
            if number and time.monotonic() - began > MOST_SECONDS:
                del self.prompts[number:]  # so that later measurements are on the same ones
                break
            for kind, drafter in drafters.items():
                result = generate(drafter.target, drafter, [prompt], max_new_tokens=self.config.tau_new_tokens)
                traces[kind].append(result.trace)
        return traces

    def _load(self) -> TargetModel:
        if self._target is None:
            disable_progress_bar()  # transformers' own: there is one already, the training's
            config = self.config
            self._target = TargetModel.from_pretrained(config.target, dtype_of(config), self.device, config.revision)
        return self._target


def trace_figures(kind: str, traces: list[Trace]) -> dict[str, float]:
    """The figures of one kind of draft, "chain" or "tree", for metrics.jsonl; ``traces``: one for each prompt."""
    name = "heldout_tau" if kind == "chain" else f"heldout_tau_{kind}"
    trace = Trace([step for each in traces for step in each.steps])
    figures = {name: trace.tau, f"{name}_by_prompt": sum(each.tau for each in traces) / len(traces)}
    figures |= {f"heldout_{kind}_ctar_{w}": trace.ctar(w) for w in CTAR_WIDTHS}
    alphas = ((n, trace.n_alpha(n)) for n in range(len(CTAR_WIDTHS)))
    return figures | {f"heldout_{kind}_alpha_{n}": alpha for n, alpha in alphas if alpha is not None}
