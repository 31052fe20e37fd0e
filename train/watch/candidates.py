"""Fit a pair of candidates (``drafters/model/candidates.py``) on what a drafter's LM head reads; measure its recall.

The pair needs no training. With Sigma the mean of h h^T, the mean squared error of z is that of approximating
W Sigma^(1/2), which is smallest for its truncated SVD U S V^T: A = U S and C = V^T Sigma^(-1/2). EAGLE-4 (NVIDIA NeMo)
begins with the SVD of W and trains the pair. The inputs are those of real drafts: a head's own predictions are spread
differently from the target's features, and a pair that is fitted on the features alone recalls less.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from data_prep.common.progress import Bar
from data_prep.store.reader import FeatureStore
from drafters.common.threads import set_threads
from drafters.drafting.grow import Slots
from drafters.drafting.tree_plan import TreePlan
from drafters.hub import checkpoint
from drafters.loading import load_drafter
from drafters.loop.generate import generate
from drafters.loop.state import DecodeState
from drafters.methods import drafter_class
from drafters.model.candidates import TENSORS, Candidates, head_fingerprint, without_pair
from drafters.model.draft_head import DraftHead
from drafters.model.linear import Product, draft_dtype
from drafters.model.target import TargetModel
from train.watch.tau import held_out_prompts, room

OPTION = "candidates"
RANKS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)  # multiples of 32, which the CPU kernels need
COUNTS = (32, 64, 128, 256, 512, 1024)
PER_INPUT = 4  # least number of inputs for each of the H dimensions of Sigma
JUDGED = 4096  # most inputs that the recall is measured on
TIMED = 15  # calls of a pair and of the LM head, alternating; the median counts
BATCH = 8  # prompts decoded at once
CHUNK = 256  # inputs whose logits are in memory at once
RIDGE = 1e-3  # of Sigma's mean diagonal, added to the diagonal: some directions are rare among the inputs


class Choice(NamedTuple):
    """A pair: its rank, number of candidates, recall, and values read per draft token as a share of the LM head's."""

    rank: int
    candidates: int
    recall: float
    share: float


def fit_candidates(options: argparse.Namespace) -> None:
    """The steps of train.tools.candidates.

    Raises:
        ValueError: a drafter without candidates, another target, no store, too few inputs, a rank or count that the
            LM head does not have, or no pair with the recall.
    """
    drafter = load(options)
    lm_head, store = drafter.head.lm_head, FeatureStore.open(options.features / "heldout")
    if (there := store.manifest.vocab_size) != drafter.target.vocab_size:
        raise ValueError(
            f"--features: {store.path} was made for a vocabulary of {there:,} tokens, and {drafter.target.name} has "
            f"{drafter.target.vocab_size:,}; give features of the drafter's own target"
        )
    weight, bias = lm_head.whole_head
    ranks, counts = sizes(options, *weight.shape)
    longest = room("--new-tokens", options.new_tokens, drafter.max_context)
    prompts = held_out_prompts(store, options.prompts, longest, "--features", "lower --new-tokens")
    fitted, judged = (inputs_of(drafter, prompts[half::2], options.new_tokens) for half in (0, 1))
    if (least := min(len(fitted), len(judged))) < (needed := PER_INPUT * weight.shape[1]):
        raise ValueError(
            f"half of the {len(prompts)} prompts of {store.path} gave {least:,} inputs of the LM head, and Sigma of "
            f"{weight.shape[1]:,} dimensions needs {needed:,}; raise --prompts or --new-tokens, or store more dialogues"
        )
    factors = Factors(weight, second_moment(fitted, weight.device), max(ranks))
    places = torch.randperm(len(judged), generator=torch.Generator().manual_seed(0))[:JUDGED]
    choices = measured(factors, judged[places], weight, bias, ranks, counts)
    print(table(choices, ranks, counts, len(fitted), len(places)))
    chosen, took = fastest(choices, options, partial(time_share, lm_head, factors, judged[:1]))
    save(options, factors, chosen, head_fingerprint(weight, bias))
    print(
        f"{options.checkpoint} drafts with {chosen.candidates} candidates of rank {chosen.rank} now: recall "
        f"{chosen.recall:.4f}, {chosen.share:.3f} of the LM head's values and {took:.2f} of its time per draft token"
    )


def load(options: argparse.Namespace) -> Any:
    """The drafter, with its target; its drafts are chains over the whole LM head.

    Raises:
        ValueError: a drafter without candidates, an adapter, another target, or several LM heads.
    """
    set_threads(None)
    disable_progress_bar()  # transformers' own
    config = checkpoint.read_config(options.checkpoint)
    fields = drafter_class(config.drafter_type).options.model_fields
    if OPTION not in fields or isinstance(config, checkpoint.AdapterConfig):
        kind = "an adapter" if OPTION in fields else f"a drafter of type {config.drafter_type!r}"
        raise ValueError(
            f"--checkpoint: {options.checkpoint} holds {kind}, which takes no candidates; give an eagle, eagle3, "
            "peagle, dflash, dflash2, dspark or medusa"
        )
    name, revision = (options.target, None) if options.target else (config.target.name, config.target.revision)
    target = TargetModel.from_pretrained(name, revision=revision)
    plain: dict[str, Any] = {key: None for key in (OPTION, "draft_vocab") if key in fields}
    drafter: Any = load_drafter(str(options.checkpoint), target, tree="chain", **plain)
    if (heads := len(drafter.head.lm_heads)) > 1:
        raise ValueError(f"--checkpoint: {options.checkpoint} has {heads} LM heads of its own, and a pair is for one")
    return drafter


def sizes(options: argparse.Namespace, rows: int, width: int) -> tuple[list[int], list[int]]:
    """The ranks and counts to measure for an LM head ``[rows, width]``; raises ValueError for larger ones."""
    if options.rank is not None and options.rank > width:
        raise ValueError(f"--rank is {options.rank:,}, and the LM head reads {width:,} dimensions; give a smaller one")
    if options.count is not None and options.count > rows:
        raise ValueError(f"--count is {options.count:,}, and the LM head has {rows:,} tokens; give a smaller one")
    ranks, counts = [rank for rank in RANKS if 2 * rank <= width], [count for count in COUNTS if 4 * count <= rows]
    return (
        [options.rank] if options.rank else ranks or [max(width // 2, 1)],
        [options.count] if options.count else counts or [max(rows // 4, 1)],
    )


def inputs_of(drafter: Any, prompts: list[list[int]], new_tokens: int) -> Tensor:
    """Answer the prompts greedily and sampled; return the inputs of the LM head ``[N, H]`` in the target's dtype."""
    head, found = drafter.head, list[Tensor]()
    lm_head, slots, unfinished = head.lm_head, head.slots, list[int]()
    enter = lm_head.enter

    def of_unfinished(state: DecodeState, plan: TreePlan | None) -> Slots:
        unfinished[:] = [row for row, done in enumerate(state.finished) if not done]
        return slots(state, plan)

    def recorded(features: Tensor) -> Tensor:
        inputs = enter(features)
        found.append(inputs[unfinished].flatten(0, -2).cpu())
        return inputs

    head.slots, head.one_call, lm_head.enter = of_unfinished, None, recorded
    try:
        with Bar(total=2 * len(prompts), unit=" prompts", leave=False) as bar:
            for temperature in (0.0, 1.0):
                for start in range(0, len(prompts), BATCH):
                    some = prompts[start : start + BATCH]
                    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature}
                    generate(drafter.target, drafter, some, prompt_lengths=[*map(len, some)], seed=start, **settings)
                    bar.update(len(some))
    finally:
        head.slots, lm_head.enter = slots, enter
    return torch.cat(found) if found else torch.empty(0, drafter.target.hidden_size)


class Factors:
    """The best pairs for an LM head and the second moment of its inputs; a smaller rank is the first part of a larger.

    Args:
        weight: ``[W, H]``. sigma: ``[H, H]``, mean of h h^T over inputs h. rank: the largest.
    """

    def __init__(self, weight: Tensor, sigma: Tensor, rank: int) -> None:
        # Softmax and ranks ignore a constant that is added to all logits, so the pair need not have the mean row.
        weight = weight.float() - weight.float().mean(0)
        sigma = sigma.double()
        values, vectors = torch.linalg.eigh(sigma + RIDGE * sigma.diagonal().mean() * torch.eye(len(sigma)).to(sigma))
        root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
        # The right singular vectors of W Sigma^(1/2), by falling singular value.
        right = torch.linalg.eigh(root @ (weight.T @ weight).double() @ root).eigenvectors.flip(1)[:, :rank]
        self._a, self._c = weight @ (root @ right).float(), (right.T @ inverse).float()

    def pair(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return A ``[W, rank]`` and C ``[rank, H]`` in bf16, as a checkpoint stores them."""
        return self._a[:, :rank].bfloat16().contiguous(), self._c[:rank].bfloat16().contiguous()


def second_moment(inputs: Tensor, device: torch.device) -> Tensor:
    """Mean of h h^T over inputs h ``[N, H]``: ``[H, H]``, float32."""
    total = torch.zeros(inputs.shape[1], inputs.shape[1], device=device)
    for some in inputs.split(CHUNK):
        some = some.to(device).float()
        total += some.T @ some
    return total / len(inputs)


@torch.no_grad()
def measured(
    factors: Factors, inputs: Tensor, weight: Tensor, bias: Tensor | None, ranks: list[int], counts: list[int]
) -> list[Choice]:
    """The recall of each rank and count on ``inputs [N, H]``."""
    (rows, width), choices = weight.shape, []
    chunks = [some.to(weight) for some in inputs.split(CHUNK)]
    first = [torch.nn.functional.linear(some, weight, bias).argmax(-1, keepdim=True) for some in chunks]
    for rank in ranks:
        a, c = (part.to(weight) for part in factors.pair(rank))
        better = []  # for each input, the tokens that the pair ranks above the first choice
        for some, token in zip(chunks, first, strict=True):
            scores = torch.nn.functional.linear(some @ c.T, a, bias)
            better.append((scores > scores.gather(-1, token)).sum(-1))
        before = torch.cat(better)
        for count in counts:
            recall = float((before < count).double().mean())
            choices.append(Choice(rank, count, recall, (rank * (rows + width) + count * width) / (rows * width)))
    return choices


@torch.inference_mode()
def time_share(lm_head: DraftHead, factors: Factors, inputs: Tensor, choice: Choice) -> float:
    """Time of a draft token's candidates on this device, as a share of the whole LM head's; ``inputs``: ``[1, H]``."""
    weight, bias = lm_head.whole_head
    inputs = inputs.to(weight)
    pair = Candidates(*factors.pair(choice.rank), choice.candidates, weight, bias, lm_head.dtype)
    whole = Product(weight, bias)
    if (dtype := draft_dtype(lm_head.dtype, weight.device)) is not None:
        whole.quantize(dtype)
    calls: dict[str, Callable[[], Tensor]] = {"pair": lambda: pair(inputs)[0], "whole": lambda: whole(inputs)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TIMED):
        for name, call in calls.items():
            began = time.perf_counter()
            float(call()[0, 0])  # synchronises a GPU
            seconds[name].append(time.perf_counter() - began)
    return median(seconds["pair"]) / median(seconds["whole"])


def fastest(
    choices: list[Choice], options: argparse.Namespace, time_of: Callable[[Choice], float]
) -> tuple[Choice, float]:
    """The fastest choice among those with the recall, and its share of the LM head's time.

    With ``--rank`` and ``--count`` it is that one.

    Raises:
        ValueError: no pair has the recall and is faster than the LM head.
    """
    if options.rank and options.count:
        return choices[0], time_of(choices[0])
    # Of one rank, more candidates than the recall needs are slower.
    enough = {one.rank: one for one in reversed(choices) if one.recall >= options.recall and one.share < 1}
    times = {one: time_of(one) for one in enough.values()}
    chosen = min(times, key=times.__getitem__, default=None)
    if chosen is not None and times[chosen] < 1:
        return chosen, times[chosen]
    best = max(choices, key=lambda one: one.recall) if chosen is None else chosen
    took = "" if chosen is None else f" and {times[chosen]:.2f} of the LM head's time"
    raise ValueError(
        f"{options.checkpoint} is as it was: no pair with a recall of {options.recall} is faster than the LM head; the "
        f"best has rank {best.rank} and {best.candidates} candidates, a recall of {best.recall:.4f}{took}; lower "
        "--recall, or keep the whole LM head"
    )


def table(choices: list[Choice], ranks: list[int], counts: list[int], fitted: int, judged: int) -> str:
    """The recall in lines, one for each rank."""
    lines = [f"Recall of the first choice on {judged:,} inputs, fitted on {fitted:,}; by rank and candidates:"]
    lines.append("  rank" + "".join(f"{count:>9}" for count in counts) + "   values read")
    for rank in ranks:
        some = [one for one in choices if one.rank == rank]
        shares = f"{some[0].share:.3f} to {some[-1].share:.3f}"
        lines.append(f"{rank:>6}" + "".join(f"{one.recall:>9.4f}" for one in some) + f"   {shares}")
    return "\n".join(lines)


def save(options: argparse.Namespace, factors: Factors, chosen: Choice, fingerprint: Tensor) -> None:
    """Write the pair and the option; drafting with frequent tokens only, if it was set, ends."""
    config, weights = checkpoint.load_checkpoint(options.checkpoint)
    pair = dict(zip(TENSORS, (*factors.pair(chosen.rank), fingerprint), strict=True))
    config["drafter"] |= {OPTION: chosen.candidates}
    config["drafter"].pop("draft_vocab", None)
    checkpoint.save_checkpoint(options.checkpoint, without_pair(weights) | pair, config, dtype=None)
