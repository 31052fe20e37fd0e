"""Check of a loaded model: a tree of a few tokens over a short prompt gives what the model's own causal forward gives.

It runs with windows and chunks cut short, so that they matter within a few tokens. How far two right forwards may be
apart depends on the model, so a difference is compared with the model's own rounding. tests/test_families.py compares
each family more closely, in float32; in 16 bits a layer that is wrong by a few percent may pass here.

Nothing of the model is changed, because another thread may generate with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drafters.common.wording import dtype_name, first_line
from drafters.model.rows import Rows
from drafters.model.stock import StockRunner, body_of, scopes
from drafters.model.variants import StandIn, variant

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

ROWS, PROMPT = 12, 4  # tokens of the check, and how many of them are the prompt
SHORTER = 2  # the second sequence's prompt is shorter by this number of tokens
WINDOW = 4  # of a sliding window or a chunk during the check
LOGITS = 1000.0  # the largest logit of the recorded forward: a cap or a scale changes it visibly
DRAWS = 8  # forwards with moved results that measure a model's rounding
# Largest error of a group of tokens over the model's rounding there: of the worst group, and of the third worst, for a
# random model may amplify one rounding in one token. Tuned on 700 random models at three instruction levels: right
# ones reached 1.8 and 0.9; the third worst of the planted faults in tests/test_self_check.py has 1.5 or more.
LIMITS = {1: 3.0, 3: 1.25}
# Errors that a model's own code raises for arguments that it does not take.
FAILURES = (TypeError, AttributeError, RuntimeError, KeyError, IndexError, ValueError)


def off(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return each token's relative error ``[B, R]``; nan counts as infinite."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    size = theirs.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)  # 0 for an embedding of zeros
    return ((ours - theirs).norm(dim=-1) / size).nan_to_num(torch.inf)


def most_allowed(target: "TargetModel", ids: Tensor, error: float) -> float:
    """Return the largest error that two right forwards of ``ids [B, T]`` may have, in a median over tokens.

    The model's rounding is measured only if ``error`` is above that of a few roundings.
    """
    if error <= (least := _few_roundings(target)):
        return least
    whole = body_of(target.model)(input_ids=ids, use_cache=False).last_hidden_state
    return max(least, LIMITS[1] * _rounding(target, ids, whole).median(-1).values.max().item())


@torch.no_grad()
def check_target(target: "TargetModel") -> None:
    """Compare the target with the model's own forward.

    Raises:
        ValueError: features over a tree, or logits, are not the model's; or the model does not take a tree.
    """
    name = f"{target.name} ({type(target.model).__name__})"
    ids = _ordinary_tokens(target)
    texts = torch.cat([ids, ids.roll(-SHORTER, 1)])  # what follows in the second has no influence: causal
    try:
        short = _with_short_windows(target)
        body = body_of(short.model)
        expected = body(input_ids=texts, use_cache=False).last_hidden_state
        tree = _over_a_tree(short, texts)
        logits = short.model(input_ids=texts, use_cache=False).logits
        ramp, changed = _last_steps(short, ids)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as failure:
        reason = f"{type(failure).__name__}: {first_line(failure)}"
        raise ValueError(f"{name} does not take a tree of tokens on engine {target.engine!r}: {reason}") from failure
    if not expected.isfinite().all():
        others = {torch.float16: "; load it with float32 or bfloat16", torch.bfloat16: "; load it with float32"}
        advice = others.get(target.dtype, "")
        raise _refusal(target, f"{name} gives infinite values in {dtype_name(target.dtype)}{advice}")
    for error, limit in _errors_and_limits(short, texts, tree, expected):
        if error > limit:
            also = "" if target.engine == "stock" else "; engine: stock may run it"
            raise _refusal(
                target,
                f"{name} gives other features over a tree on engine {target.engine!r} than over a text (off by "
                f"{error:.2g}, bound {limit:.2g}, in {dtype_name(target.dtype)}){also}",
            )
    limit = max(1e-3, 8 * torch.finfo(target.dtype).eps)  # of one product
    ramp = ramp if target.logit_change is None else target.logit_change(ramp)
    for one, other in ((target.lm_head(expected), logits), (ramp, changed)):
        if off(one, other).median().item() > limit:
            raise _refusal(target, f"{name}: its logits are not what its LM head gives")


@torch.no_grad()
def check_parts(target: "TargetModel", layer: int) -> None:
    """Raise ValueError unless the first ``layer`` layers and the others, one after the other, are the target."""
    ids, reason = _ordinary_tokens(target), ""
    try:
        short, cache = _with_short_windows(target), None
        if target.chains_only:  # layers with a state are also given the mask of those with attention
            cache, first, ids = target.new_cache(1, ROWS), ids[:, :PROMPT], ids[:, PROMPT:]
            short.run(first, cache)
            cache.commit_first([PROMPT])
        whole, states = short.run(ids, cache).features, short.shallow(ids, cache, layer)
        error = off(short.run(states, cache, start=layer).features, whole).median().item()
        if error > most_allowed(short, ids, error):
            reason = "in two parts it gives something else"
    except FAILURES as failure:
        reason = first_line(failure)
    if reason:
        raise ValueError(f"{target.name} cannot be run in two parts, which Kangaroo needs: {reason}; use eagle")


def _errors_and_limits(
    target: "TargetModel", texts: Tensor, tree: Sequence[Tensor], expected: Tensor
) -> Iterator[tuple[float, float]]:
    """Yield the error of the worst group of tokens and that of the third worst, each with its limit."""
    pairs = [(rows, text[: len(rows)]) for rows, text in zip(tree, expected, strict=True)]
    errors, least = _by_group([off(*rows) for rows in pairs]), _few_roundings(target)
    rounding = torch.zeros_like(errors)
    if errors.max() > least:
        draws = _rounding(target, texts, expected)  # [DRAWS, 2, ROWS]
        rounding = torch.stack([_by_group([first, second[:-SHORTER]]) for first, second in draws]).amax(0)
    for place, times in LIMITS.items():
        limits = (times * rounding).clamp_min(least)
        group = (errors / limits).topk(place).indices[-1]
        yield errors[group].item(), limits[group].item()


def _refusal(target: "TargetModel", reason: str) -> ValueError:
    """Return the error for a model that fails the check; weights that are no numbers come before ``reason``."""
    for name, weights in target.model.named_parameters():
        if weights.is_floating_point() and not (finite := weights.isfinite()).all():
            wrong, kind = int((~finite).sum()), dtype_name(weights.dtype)
            fits = weights.dtype == torch.float16 and not weights.isnan().any()
            advice = "load it with bfloat16 or float32" if fits else "download or save the checkpoint again"
            return ValueError(
                f"{target.name}: {wrong} of the {weights.numel()} values of {name} are NaN or infinite in {kind}; "
                f"{advice}"
            )
    return ValueError(reason)


def _few_roundings(target: "TargetModel") -> float:
    """Return the relative error that any right forward may have."""
    return max(1e-3, 4 * torch.finfo(target.dtype).eps)


def _by_group(errors: Sequence[Tensor]) -> Tensor:
    """Return the median error of each group of tokens ``[8]``; rounding sends single tokens to other experts.

    Groups: each prompt, both roots, both tokens after them, and of each text three tokens and three further ones.

    Args:
        errors: errors of both texts' tokens, ``[ROWS]`` and ``[ROWS - SHORTER]``.
    """
    parts = [rows.split([len(rows) - ROWS + PROMPT, 1, 1, 3, 3]) for rows in errors]
    prompts, roots, first, *later = zip(*parts, strict=True)
    groups = [*prompts, torch.cat(roots), torch.cat(first), *later[0], *later[1]]
    return torch.stack([group.median() for group in groups])


class _Moved(TorchFunctionMode):
    """Moves each result of this thread's operations by a random part of a rounding, up to half a unit in the last
    place. Another right implementation rounds at other places and differs by that."""

    def __init__(self, dtype: torch.dtype, unit: float) -> None:
        super().__init__()
        self._dtype, self._unit = dtype, unit
        self._generators: dict[torch.device, torch.Generator] = {}  # not torch's own, which others draw from

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        plain = (Tensor, nn.Parameter)
        if type(result) not in plain or result.dtype != self._dtype:
            return result
        memory = result.untyped_storage().data_ptr()
        if any(type(one) in plain and one.untyped_storage().data_ptr() == memory for one in args):
            return result  # a view, or changed in place
        generator = self._generators.setdefault(
            result.device, torch.Generator(result.device).manual_seed(len(self._generators))
        )
        parts = torch.rand(result.shape, generator=generator, device=result.device, dtype=torch.float32) - 0.5
        moved = (result * (1 + self._unit * parts)).to(result.dtype)
        return torch.where(moved.isfinite(), moved, result)


def _rounding(target: "TargetModel", texts: Tensor, whole: Tensor) -> Tensor:
    """Errors ``[DRAWS, B, T]`` of the model's own forward of ``texts [B, T]`` with moved results.

    Args:
        whole: features ``[B, T, H]`` of that forward.
    """
    with _Moved(target.dtype, _unit(target)):
        states = body_of(target.model)(input_ids=texts.repeat(DRAWS, 1), use_cache=False).last_hidden_state
    errors = off(states.unflatten(0, (DRAWS, -1)), whole)
    return errors.masked_fill(errors.isinf(), 0.0)  # a result that overflows allows no error


def _unit(target: "TargetModel") -> float:
    """Return the distance of two numbers of the dtype beside 1; of its products, where those take fewer bits (TF32)."""
    numbers = torch.linspace(1, 2, 4096, dtype=torch.float32, device=target.device).to(target.dtype).view(64, 64)
    products = F.linear(numbers, torch.eye(64, device=target.device, dtype=target.dtype))
    return max(torch.finfo(target.dtype).eps, 2 * (products.float() / numbers.float() - 1).abs().max().item())


def _ordinary_tokens(target: "TargetModel") -> Tensor:
    """Return ids ``[1, ROWS]`` from the vocabulary's middle: on control tokens, rounding to bf16 may change all."""
    return (target.vocab_size // 4 + torch.arange(ROWS, device=target.device))[None] % target.vocab_size


def _last_steps(target: "TargetModel", ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values up to ``LOGITS`` in place of the LM head's output, and the logits that the model makes of them."""

    def ramp(output: Tensor, *arguments: Any) -> Tensor:
        return torch.linspace(-LOGITS, LOGITS, output.numel(), device=output.device).to(output).view_as(output)

    head = target.model.get_output_embeddings()
    logits = variant(target.model, {id(head): StandIn(head, ramp)})(input_ids=ids, use_cache=False).logits
    return ramp(logits), logits


def _over_a_tree(target: "TargetModel", texts: Tensor) -> list[Tensor]:
    """Features ``[ROWS, H]``, ``[ROWS - SHORTER, H]`` of prompts, one token, and trees whose second one is a bystander.

    Both texts ``[2, ROWS]`` are one batch, with prompts of unequal lengths.
    """
    cache, lengths = target.new_cache(2, ROWS + 2), [PROMPT, PROMPT - SHORTER]
    cache.expect(lengths)
    prompts = target.run(texts[:, :PROMPT], cache).features
    cache.commit_first(lengths)
    rest = torch.stack([text[n : n + ROWS - PROMPT] for text, n in zip(texts, lengths, strict=True)])
    root = target.run(rest[:, :1], cache).features
    cache.commit_first([1, 1])
    tree = torch.cat([rest[:, 1:2], texts[:, 1:2], rest[:, 2:]], dim=1)
    if target.chains_only:  # a chain whose second token is rejected
        first = target.run(tree[:, :3], cache).features[:, :1]
        cache.commit_first([1, 1])
        features = torch.cat([root, first, target.run(rest[:, 2:], cache).features], dim=1)
    else:
        last = target.run(tree, cache, _bystander(tree.shape[1], target.device)).features
        features = torch.cat([root, last[:, :1], last[:, 2:]], dim=1)  # [2, ROWS - PROMPT, H]
    return [torch.cat([prompts[row, :n], features[row]]) for row, n in enumerate(lengths)]


def _bystander(count: int, device: torch.device) -> Rows:
    """A chain whose second token is a sibling of the third, seen by no other token."""
    see = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    see[2:, 1] = False
    return Rows(see[None], see[None].sum(-1) - 1)


def _with_short_windows(target: "TargetModel") -> "TargetModel":
    """Return a copy of the target whose sliding windows and chunks are ``WINDOW`` tokens long."""
    short, config = copy(target), copy(target.config)
    short._parts = {}  # a part knows its windows and, on a CPU, the layout of its weights, which may yet be quantised
    keys = [key for key in ("sliding_window", "attention_chunk_size") if getattr(config, key, None)]
    if not keys:
        return short
    for key in keys:
        setattr(config, key, WINDOW)
    short.config, short.model = config, variant(target.model, {id(target.config): config})
    short.body = body_of(short.model)
    if not target.runner.rewrites:
        short.runner = StockRunner(short.model, scopes(config))
    else:
        short.windows = [size and WINDOW for size in target.windows]
    return short
