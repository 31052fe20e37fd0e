"""Check of a loaded model: one forward of the model itself against one of ours, layer by layer with the same inputs.

The model's own forward is recorded: what entered and left each layer, the final norm and the LM head. Then each layer
of ours gets the recorded input, so that rounding does not grow over the depth. It runs over a cache: a prompt, one
row, then a tree with a bystander that no other row may see. tests/test_families.py compares each family more closely.

Measured in 16 bits: ``error`` of a right layer is at most 2.6 eps (SmolLM2-135M: 0.8), of one whose attention scale is
1.5 times too large 7 eps, of a wrong norm, activation, RoPE, window or order of heads 10 eps or more.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.common.wording import dtype_name
from drafters.model.rows import Rows
from drafters.model.runner import Part
from drafters.model.stock import StockRunner, scopes

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

ROWS, PROMPT = 12, 4  # rows of the check, and how many of them are the prompt
WINDOW = 4  # rows of a sliding window during the check, so that it matters within ``ROWS``
TREE_BOUND = 16  # largest relative error of a feature over a tree, in units of the dtype's rounding
LOGITS = 1000.0  # the largest logit of the recorded forward: a cap or a scale changes it visibly

Seen = dict[Any, tuple[Tensor, Tensor]]  # layer number, "norm" or "head" -> what entered and left it, [1, R, ...]


def bound(dtype: torch.dtype) -> float:
    """Return the largest allowed ``error`` of a layer."""
    return max(1e-3, 5 * torch.finfo(dtype).eps)


def error(ours: Tensor, theirs: Tensor, before: Tensor) -> Tensor:
    """Return each row's error ``[B, R]`` relative to what the layer added to the states ``before [B, R, H]``.

    A channel's error counts relative to its own contribution and the row's median one: a massive activation must not
    set the scale of the other channels. The row's error is the 90% quantile of its channels'. nan counts as infinite.
    """
    rounding = torch.finfo(theirs.dtype).eps / 2
    ours, theirs, before = (states.to(theirs.device, torch.float32) for states in (ours, theirs, before))
    added = (theirs - before).abs()
    excess = ((ours - theirs).abs() - rounding * (before.abs() + theirs.abs())).clamp_min(0)  # of the sum's rounding
    scale = added + added.median(dim=-1, keepdim=True).values
    return torch.where(excess == 0, 0.0, excess / scale).nan_to_num(torch.inf).quantile(0.9, dim=-1).cpu()


def worst(errors: list[Tensor], limit: float) -> str | None:
    """Return the layer, or the row of all layers, whose median error is largest, and the error; None within ``limit``.

    Medians: in a mixture of experts rounding sends single rows to another expert.
    """
    each = torch.stack([rows.flatten() for rows in errors])  # [layers, rows]
    layers, rows = each.median(dim=1).values, each.median(dim=0).values
    most = max(layers.max().item(), rows.max().item())
    if most <= limit:
        return None
    what = f"layer {int(layers.argmax())} of {len(each)}" if most == layers.max() else f"row {int(rows.argmax())}"
    return f"{what} adds something else to the hidden states (off by {most:.2g} of what it adds, bound {limit:.2g})"


@torch.no_grad()
def check_layers_agree(target: "TargetModel") -> None:
    """Compare the target with the model's own forward.

    Raises:
        ValueError: the model cannot be run layer by layer, or it gives another output then.
    """
    name = f"{target.name} ({type(target.model).__name__})"
    try:
        with _settings(target):
            wrong = _difference(target)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, KeyError, IndexError) as failure:
        raise ValueError(f"{name} cannot be run layer by layer: {failure}; engine: stock may run it") from failure
    if wrong is not None:
        raise ValueError(f"{name} run layer by layer is not the model: {wrong}; engine: stock may run it")


@torch.no_grad()
def check_trees(target: "TargetModel") -> None:
    """Compare the model's own causal forward with itself over a cache: a prompt, then a tree with a bystander.

    Raises:
        ValueError: a path of the tree gets other features, or the model does not take a tree.
    """
    name = f"{target.name} ({type(target.model).__name__})"
    ids = torch.arange(1, ROWS + 1, device=target.device)[None] % target.vocab_size
    try:
        with _settings(target):
            expected, (scores, logits) = target.run(ids, None).features, _last_steps(target, ids)
            found = _over_a_tree(target, ids)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, KeyError, IndexError, ValueError) as failure:
        told = str(failure).splitlines()[0]
        raise ValueError(f"{name} does not take a tree of tokens: {type(failure).__name__}: {told}") from failure
    size = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)  # 0 for an embedding of zeros
    errors = (found - expected).float().norm(dim=-1) / size  # [1, ROWS]
    # By groups: the prompt, the root, what comes behind the bystander. Medians, for rounding sends single rows to other
    # experts.
    off = max(part.median().item() for part in errors[0].split([PROMPT, 2, 3, ROWS - PROMPT - 5]))
    if not off <= max(1e-3, TREE_BOUND * torch.finfo(target.dtype).eps):
        raise ValueError(f"{name} gives other features over a tree than over a text (off by {off:.2g})")
    if differ(scores if target.logit_change is None else target.logit_change(scores), logits, 1e-2):
        raise ValueError(f"{name}: its logits are not what its LM head gives")


def _last_steps(target: "TargetModel", ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values up to ``LOGITS`` in place of the LM head's output, and the logits that the model makes of them."""
    head = target.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, given, output: _replaced(output))
    try:
        logits = target.model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return _replaced(logits), logits


def _over_a_tree(target: "TargetModel", ids: Tensor) -> Tensor:
    """Features ``[1, ROWS, H]`` of a prompt, one row, and a tree whose second row is a bystander."""
    cache, found = target.new_cache(1, ROWS + 1), []
    for first, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
        found.append(target.run(ids[:, first:end], cache).features)
        cache.commit_first([end - first])
    tree = torch.cat([ids[:, end : end + 1], ids[:, 1:2], ids[:, end + 1 :]], dim=1)
    last = target.run(tree, cache, _bystander(tree.shape[1], target.device)).features
    return torch.cat([*found, last[:, :1], last[:, 2:]], dim=1)


def _bystander(count: int, device: torch.device) -> Rows:
    """A chain whose second row is a sibling of the third, seen by no other row."""
    see = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    see[2:, 1] = False
    return Rows(see[None], see[None].sum(-1) - 1)


def _difference(target: "TargetModel") -> str | None:
    """Return the first difference found, None without one."""
    ids = torch.arange(1, ROWS + 1, device=target.device)[None] % target.vocab_size
    seen, logits = _recorded(target, ids)
    # Between the modules: each gets what the one before it gave, and nothing scales or caps the logits.
    kind, exact = type(target.body.layers[0]).__name__, 4 * torch.finfo(target.dtype).eps
    entered, before = target.embed(ids), "its embedding"
    for key, (given, left) in seen.items():
        what = f"layer {key} of {target.num_layers} ({kind})" if isinstance(key, int) else f"its {key}"
        if differ(entered, given, exact):
            return f"{what} gets something else than {before} gives"
        if not left.isfinite().all():
            return f"{what} gives infinite values in {dtype_name(target.dtype)}; load it with dtype float32 or bfloat16"
        entered, before = left, what
    if differ(_replaced(logits), logits, exact):
        return "its logits are not what its LM head gives"
    # The modules, from the same inputs.
    (last, normed), (features, scores) = seen["final norm"], seen["LM head"]
    if differ(target.norm(last), normed, max(exact, 1e-3)):
        return f"its final norm gives something else ({kind}'s model)"
    if differ(target.lm_head(features), scores, 4 * max(exact, 1e-3)):
        return "its LM head gives something else"
    layers = [seen[index] for index in range(target.num_layers)]
    errors = [error(_ours(target, index, given), left, given) for index, (given, left) in enumerate(layers)]
    found = worst(errors, bound(target.dtype))
    return None if found is None else f"{found}, in {dtype_name(target.dtype)} and from the same input ({kind})"


def _recorded(target: "TargetModel", ids: Tensor) -> tuple[Seen, Tensor]:
    """Run the model itself on ``ids [1, R]``; the LM head's output is replaced by values up to ``LOGITS`` after it."""
    seen: Seen = {}
    head = target.model.get_output_embeddings()
    modules = [*enumerate(target.body.layers), ("final norm", target.body.norm), ("LM head", head)]

    def record(key: Any) -> Any:
        def hook(module: Any, given: Any, named: Any, output: Any) -> Tensor | None:
            if key in seen or len(seen) != [one for one, _ in modules].index(key):
                raise RuntimeError("its forward does not call layers, final norm and LM head once each, in this order")
            seen[key] = given[0] if given else named["hidden_states"], output[0] if type(output) is tuple else output
            return _replaced(output) if module is head else None

        return hook

    hooks = [module.register_forward_hook(record(key), with_kwargs=True) for key, module in modules]
    try:
        logits = target.model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != len(modules):
        raise RuntimeError(f"its forward calls {len(seen)} of its {len(modules)} layers, final norm and LM head")
    return seen, logits


def _replaced(logits: Tensor) -> Tensor:
    return torch.linspace(-LOGITS, LOGITS, logits.numel(), device=logits.device).to(logits).view_as(logits)


def differ(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Return True if a value differs by more than ``tolerance`` times itself and its row's root mean square."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    scale = theirs.abs() + theirs.pow(2).mean(-1, keepdim=True).sqrt()
    return not bool(((ours - theirs).abs() <= tolerance * scale).all())


def _ours(target: "TargetModel", index: int, hidden: Tensor) -> Tensor:
    """Run our layer ``index`` over ``hidden [1, ROWS, H]``: a prompt, one row, a tree; return what leaves it."""
    cache = target.new_cache(1, ROWS + 1)
    hidden, part, run = hidden.to(target.device), Part([target.part_layer(index)]), target.runner.run
    found = []
    for first, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
        found.append(run(part, [hidden[:, first:end]], cache)[0])
        cache.commit_first([end - first])
    tree = torch.cat([hidden[:, end : end + 1], hidden[:, 1:2], hidden[:, end + 1 :]], dim=1)
    last = run(part, [tree], cache, _bystander(tree.shape[1], target.device))[0]
    return torch.cat([*found, last[:, :1], last[:, 2:]], dim=1)


@contextlib.contextmanager
def _settings(target: "TargetModel") -> Iterator[None]:
    """Cut sliding windows and chunks of model and target to ``WINDOW``; multiply float32 in float32, not in TF32."""
    config, precision = target.config, torch.get_float32_matmul_precision()
    sizes = {key: size for key in ("sliding_window", "attention_chunk_size") if (size := getattr(config, key, None))}
    own: Any = target.runner if isinstance(target.runner, StockRunner) else target
    name = "windows" if own is target else "scopes"
    kept = getattr(own, name)
    try:
        torch.set_float32_matmul_precision("highest")
        for key in sizes:  # models read theirs from their config
            setattr(config, key, WINDOW)
        setattr(own, name, scopes(config) if name == "scopes" else [size and WINDOW for size in kept])
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for key, size in sizes.items():
            setattr(config, key, size)
        setattr(own, name, kept)
