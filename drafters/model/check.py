"""What a target proves when it is loaded: that its layers, run one by one and by its engine, are the model.

Two right forwards of a trained model drift apart over its depth, and one channel of 1e4 (a massive activation) sets the
scale of all others. So nothing is compared across layers, nor by its largest value. The model's own forward is run once
and overheard: what enters and leaves each layer. Then each layer gets the input that it had there, and two things are
asked of it.

- Structure, in float32 whatever the model's dtype: what we add to the hidden states equals what the stock layer adds,
  in every channel. Rounding is 1e-7 there and what it grows to; another norm, scale, activation or mask is far more.
- Arithmetic, in 16 bits: our own instances and kernels are about as far from that float32 layer as the stock layer is.

What lies between the layers (embedding, final norm, LM head) only hands over, or is compared likewise. Measured on
SmolLM2-135M, whose activations reach 25,000: structure is off by 4e-5 at most (bound 1e-3), by 0.01 to 13 where one of
its 30 layers has an attention scale 2% off, another activation, norm or order of heads; arithmetic is 0.9 to 1.1 times
the stock layer's error (bound 4).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.common.wording import dtype_name
from drafters.model.cache import KVCache
from drafters.model.files import SUPPORTED
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import Part, PartLayer

if TYPE_CHECKING:
    from drafters.model.graphs import GraphRunner
    from drafters.model.target import TargetModel

STRUCTURE = 1e-3  # of a channel's contribution, or of the row's median one if that is more
ARITHMETIC = 4.0  # times the stock layer's own error
ROWS = 12  # six as a prompt, a chain of two, one alone, a tree of three and a bystander
WINDOW = 4  # what sliding windows are cut to meanwhile, so that so few rows see where they end
HALVES = (torch.bfloat16, torch.float16)


@dataclass
class _Overheard:
    """The model's own forward: each layer's arguments and output, and what passed the ends."""

    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [1, R, H], what left each layer
    norm: list[Tensor] = field(default_factory=list)  # what entered the final norm, and what left it
    head: list[Tensor] = field(default_factory=list)  # what entered the LM head, left it, and replaced that
    logits: Tensor | None = None  # [1, R, V], what the model made of the replacement

    @property
    def entered(self) -> list[Tensor]:
        """The hidden states that entered each layer."""
        return [given[0] if given else named["hidden_states"] for given, named in self.arguments]


@torch.no_grad()
def check_layers_agree(target: "TargetModel") -> list[float]:
    """Compare with the model's own forward: scaled embeddings or capped logits would decode garbage.

    Returns:
        Each layer's bound on the relative error of its contribution, in the target's dtype.

    Raises:
        ValueError: it cannot be run layer by layer, or gives something else then.
    """
    ids = _ids(target, ROWS)
    try:
        with _exact_products(), _short_windows(target):
            heard = _overhear(target, ids)
            found = _ends_differ(target, ids, heard) or _layers_differ(target, heard)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, KeyError, IndexError) as error:
        raise ValueError(f"{_named(target)} cannot be run layer by layer: {error}; supported: {SUPPORTED}") from error
    if isinstance(found, str):
        raise ValueError(f"{_named(target)} run layer by layer is not the model: {found}; supported: {SUPPORTED}")
    return found


@torch.no_grad()
def graphs_agree(target: "TargetModel", graphs: "GraphRunner", bounds: list[float]) -> str | None:
    """None if captured forwards agree with uncaptured ones of the fused layers, else what went wrong.

    Two prompts of unequal length, then a chain and a tree twice each, so that graphs are replayed with other values
    than they were captured with. Drivers and libraries differ; a wrong replay would be garbage nobody asked for. Here,
    too, each layer is compared from the same input, which the captured forward hands out as its taps.

    Args:
        bounds: ``check_layers_agree``'s.
    """
    tokens = _ids(target, 9).expand(2, -1)
    see = torch.eye(5, dtype=torch.bool, device=target.device)[None].repeat(2, 1, 1)
    see[:, :, 0] = True  # a root, its three children, and a grandchild
    see[:, 4, 2] = True
    steps = ((1, CHAIN, [[0], [0]]), (5, Rows(see, see.sum(-1) - 1), [[0, 2, 4], [0]]))
    depth = target.num_layers
    layers = [target.part_layer(index) for index in range(depth)]
    whole = Part(layers, target.embed, target.norm)
    errors: list[list[Tensor]] = [[] for _ in range(depth)]
    try:
        plain, captured = (one.new_cache(2, 32, target.dtype, target.device) for one in (target.runner, graphs))
        for runner, cache in ((target.runner, plain), (graphs, captured)):  # a prompt is never captured
            runner.run(whole, [tokens[:, :6]], cache)
            cache.commit_first([6, 4])
        for turn in range(2):
            for count, rows, kept in steps:
                fed = tokens[:, turn : turn + count]
                features, taps = graphs.run(whole, [fed], captured, rows, tuple(range(depth + 1)))
                ends = (target.embed(fed), taps[0]), (target.norm(taps[depth]), features)
                for what, (ours, theirs) in zip(("embedding", "final norm"), ends, strict=True):
                    if (off := _off(ours, theirs, STRUCTURE)) is not None:
                        return f"the {what} of a captured trial differs by {off}"
                for index in range(depth):
                    before, after = taps[index], taps[index + 1]
                    again, _ = target.runner.run(Part([layers[index]]), [before], plain, rows)
                    errors[index].append(_relative(again, after, before).flatten())
                for cache in (plain, captured):
                    cache.commit(kept)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        whole.captured.clear()  # which knows ``whole``: left to the collector, its graphs would outlive the trial
    if graphs.broken is not None:
        return graphs.broken
    both = torch.stack([torch.cat(rows) for rows in errors])
    bound = torch.tensor(bounds)[:, None].expand_as(both)
    worst = _worst(both, 2 * bound)  # both sides round
    return None if worst is None else f"in a captured trial {worst[0]} differs by {worst[1]:.2g}, bound {worst[2]:.2g}"


# ------------------------------------------------------------------------------------------- the model's own forward


def _overhear(target: "TargetModel", ids: Tensor) -> _Overheard:
    """Run the model on ``ids [1, R]``, its LM head's output replaced by values that no cap or scale leaves as they are.

    Raises:
        ValueError: it does not call its layers one after the other, or its values are not finite.
    """
    heard = _Overheard()

    def say(module: Any, given: Any, out: Tensor) -> Tensor:
        heard.head += [given[0], out, torch.linspace(-1000, 1000, out.numel(), device=out.device).to(out).view_as(out)]
        return heard.head[-1]

    hooks = [target.model.get_output_embeddings().register_forward_hook(say)]
    hooks.append(target.body.norm.register_forward_hook(lambda module, given, out: heard.norm.extend((given[0], out))))
    for layer in target.body.layers:
        keep = lambda module, given, named: heard.arguments.append((given, named))  # noqa: E731
        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
        hooks.append(layer.register_forward_hook(lambda module, given, out: heard.states.append(_states(out))))
    try:
        heard.logits = target.model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    counts = len(heard.arguments), len(heard.norm) // 2, len(heard.head) // 3
    if counts != (target.num_layers, 1, 1):
        raise ValueError(
            f"{_named(target)} cannot be run layer by layer: its own forward makes {counts[0]} calls of its "
            f"{target.num_layers} layers, {counts[1]} of its final norm and {counts[2]} of its LM head; supported: "
            f"{SUPPORTED}"
        )
    for index, states in enumerate([*heard.states, heard.head[1]]):
        if not states.isfinite().all():
            what = f"layer {index} of {target.num_layers}" if index < target.num_layers else "its LM head"
            raise ValueError(
                f"{_named(target)} gives infinite values by itself, in {dtype_name(target.dtype)} from {what} on; load "
                "it with dtype float32 or bfloat16"
            )
    return heard


def _ends_differ(target: "TargetModel", ids: Tensor, heard: _Overheard) -> str | None:
    """What differs between the layers: before the first, from one to the next, after the last; None if nothing does."""
    rounding = 4 * torch.finfo(target.dtype).eps
    into, (before, after), (features, expected, said) = heard.entered, heard.norm, heard.head
    assert heard.logits is not None
    before = before.to(target.body.norm.weight.device)  # where it comes from the last layer's
    pairs = [("its first layer gets something else than its embedding gives", target.embed(ids), into[0])]
    for index in range(1, target.num_layers):
        what = f"layer {index} of {target.num_layers} gets something else than layer {index - 1} gives"
        pairs.append((what, heard.states[index - 1], into[index]))
    pairs += [
        ("its final norm gets something else than its last layer gives", heard.states[-1], before),
        ("its LM head gets something else than its final norm gives", after, features),
        ("its logits are not what its LM head gives", said, heard.logits),
    ]
    for what, ours, theirs in pairs:
        if (off := _off(ours, theirs, rounding)) is not None:
            return f"{what} ({off})"
    if (off := _off(target.norm(before), after, max(rounding, STRUCTURE))) is not None:
        return f"its final norm gives something else ({off})"
    with _wide(target.body.norm):
        norm = target.runner.norm(target.body.norm)
        ours, theirs = norm(before.float()), target.body.norm(before.float())
    if (off := _off(ours, theirs, STRUCTURE)) is not None:
        return f"its final norm gives something else in float32 ({off})"
    ours = target.lm_head(features).float()  # which brings them to where the head lies
    gap = (ours - expected.to(ours.device).float()).abs().max().item()
    scale = expected.float().pow(2).mean(-1).sqrt().min().item()  # sums of products round by the row
    if not gap <= 4 * max(rounding, STRUCTURE) * scale:
        return f"its LM head gives something else (off by {gap:.2g}, logits of {scale:.2g} in root mean square)"
    return None


# ----------------------------------------------------------------------------------------------------- layer by layer


def _layers_differ(target: "TargetModel", heard: _Overheard) -> str | list[float]:
    """Which layer differs and by how much; where none does, each layer's bound."""
    half = target.dtype in HALVES
    kind = type(target.body.layers[0]).__name__
    ours: list[Tensor] = []
    stock: list[Tensor] = []
    for index, (given, named) in enumerate(heard.arguments):
        layer, before = target.body.layers[index], heard.entered[index]
        fitted = target.part_layer(index)
        if half:
            with _wide(layer):
                true = _states(layer(*_widened(given), **_widened(named)))
                anew = fitted._replace(layer=target.runner.layer(layer))
                same = _through(target, anew, _widened(before), torch.float32)
        else:
            true, same = heard.states[index], _through(target, fitted, before, target.dtype)
        off = _structure_off(same.float(), true.float(), before.float())
        if not off <= STRUCTURE:
            return (
                f"layer {index} of {target.num_layers} ({kind}) adds something else to the hidden states (off by "
                f"{off:.2g} of what it adds, in float32 and from the same input; bound {STRUCTURE:g})"
            )
        if half:
            ours.append(_relative(_through(target, fitted, before, target.dtype), true, before))
            stock.append(_relative(heard.states[index], true, before))
    if not half:
        return [STRUCTURE] * target.num_layers
    errors, own = torch.cat(ours), torch.cat(stock)
    floor = 4 * torch.finfo(target.dtype).eps
    worst = _worst(errors, ARITHMETIC * own + floor)
    if worst is None:
        bounds: list[float] = (ARITHMETIC * own.median(dim=1).values + floor).tolist()
        return bounds
    return (
        f"{worst[0]} of {target.num_layers} ({kind}) is off by {worst[1]:.2g} of what it adds to the hidden states, in "
        f"{dtype_name(target.dtype)} and from the same input (bound {worst[2]:.2g}: {ARITHMETIC:g} times what rounding "
        "makes of it in the model's own forward)"
    )


def _through(target: "TargetModel", layer: PartLayer, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What leaves one layer of ours, ``[1, ROWS, H]`` -> ``[1, ROWS, H]``: prompt, chain, one row, and a tree."""
    where = target._devices if target._devices is not None else target.device
    cache = KVCache.for_config(target.config, 1, ROWS + 1, dtype, where)
    hidden, part, run = hidden.to(target.device), Part([layer]), target.runner.run
    found = []
    for first, end in ((0, 6), (6, 8), (8, 9)):
        found.append(run(part, [hidden[:, first:end]], cache)[0])
        cache.commit_first([end - first])
    # The second row is a sibling of the third: nobody but itself may see it.
    see = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool, device=target.device)
    tree = torch.cat([hidden[:, 9:10], hidden[:, 1:2], hidden[:, 10:]], dim=1)
    found.append(run(part, [tree], cache, Rows(see[None], see[None].sum(-1) - 1))[0][:, [0, 2, 3]])
    return torch.cat(found, dim=1)


def _structure_off(ours: Tensor, theirs: Tensor, before: Tensor) -> float:
    """Largest error of a channel's contribution, relative to it or to its row's median; nan counts as infinite.

    The median, since a massive activation must not set the scale of the others; and no rounding of the sum with what
    was there before counts.
    """
    before, theirs = before.to(ours.device), theirs.to(ours.device)
    added = (theirs - before).abs()
    scale = added + added.median(dim=-1, keepdim=True).values
    rounding = 4 * torch.finfo(torch.float32).eps * (before.abs() + theirs.abs())
    excess = ((ours - theirs).abs() - rounding).clamp_min(0)  # clamp_min keeps nan
    return torch.where(excess == 0, 0.0, excess / scale).nan_to_num(torch.inf).max().item()


def _relative(ours: Tensor, theirs: Tensor, before: Tensor) -> Tensor:
    """``[B, R]`` on the CPU: each row's median error over its median contribution."""
    ours, theirs, before = (states.to("cpu", torch.float32) for states in (ours, theirs, before))
    error = (ours - theirs).abs().median(dim=-1).values
    scale = (theirs - before).abs().median(dim=-1).values
    return torch.where(error == 0, 0.0, error / scale).nan_to_num(torch.inf)


def _worst(errors: Tensor, bounds: Tensor) -> tuple[str, float, float] | None:
    """The layer, or row of all layers, whose typical error ``[L, R]`` is furthest beyond its bound; None if none is.

    Medians: in a mixture of experts rounding alone sends a row to another expert here and there, never most rows of a
    layer nor one row in most layers.
    """
    found = []
    for dim, what in ((1, "layer"), (0, "row")):
        typical, bound = errors.median(dim=dim).values, bounds.median(dim=dim).values
        index = int((typical / bound).argmax())
        name = f"layer {index}" if what == "layer" else f"row {index} in most layers"
        found.append((name, typical[index].item(), bound[index].item()))
    worst = max(found, key=lambda one: one[1] / one[2])
    return worst if not worst[1] <= worst[2] else None


def _off(ours: Tensor, theirs: Tensor, tolerance: float) -> str | None:
    """Where two tensors differ by more than ``tolerance`` of a value, by how much; None where they nowhere do."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    gap = (ours - theirs).abs()
    excess = gap - tolerance * theirs.abs()
    if (excess <= 1e-6 * theirs.abs().median()).all():
        return None
    place = int(excess.nan_to_num(torch.inf).argmax())
    return f"off by {gap.flatten()[place].item():.2g} from {theirs.flatten()[place].item():.2g}"


# --------------------------------------------------------------------------------------------------- small things


def _ids(target: "TargetModel", count: int) -> Tensor:
    return torch.arange(1, count + 1, device=target.device)[None] % target.vocab_size


def _named(target: "TargetModel") -> str:
    return f"{target.name} ({type(target.model).__name__})"


def _states(output: Any) -> Tensor:
    """The hidden states among a layer's outputs: the only one, or the first."""
    return output[0] if isinstance(output, tuple) else output


def _widened(value: Any) -> Any:
    """``value``, its tensors of 16 bits in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALVES else value
    if isinstance(value, tuple | list):
        return type(value)(_widened(one) for one in value)
    return {key: _widened(one) for key, one in value.items()} if isinstance(value, dict) else value


@contextlib.contextmanager
def _wide(module: torch.nn.Module) -> Iterator[None]:
    """A module's weights of 16 bits in float32 for a while: of one layer, so that no second model is in memory."""
    held = [(weights, weights.data) for weights in (*module.parameters(), *module.buffers())]
    try:
        for weights, data in held:
            weights.data = _widened(data)
        yield
    finally:
        for weights, data in held:
            weights.data = data


@contextlib.contextmanager
def _short_windows(target: "TargetModel") -> Iterator[None]:
    """Sliding windows cut to ``WINDOW``, the model's and the target's, for models read theirs off their config."""
    windows, config = target.windows, target.config
    if not any(windows):
        yield
        return
    size = config.sliding_window
    try:
        target.windows = [None if window is None else WINDOW for window in windows]
        config.sliding_window = WINDOW
        yield
    finally:
        target.windows, config.sliding_window = windows, size


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """float32 products in float32, where a program allows TF32 or bfloat16 for them."""
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
