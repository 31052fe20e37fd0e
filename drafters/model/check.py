"""Check of a loaded model: a tree of a few rows over a short prompt gives what the model's own causal forward gives.

It runs with windows and chunks cut short, so that they matter within a few tokens. tests/test_families.py compares each
family more closely, in float32; in 16 bits a layer that is wrong by a few percent may pass here.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.common.wording import dtype_name
from drafters.model.rows import Rows
from drafters.model.stock import StockRunner, body_of, scopes

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

ROWS, PROMPT = 12, 4  # rows of the check, and how many of them are the prompt
SHORTER = 2  # tokens that the second batch row's prompt has fewer
WINDOW = 4  # of a sliding window or a chunk during the check
LOGITS = 1000.0  # the largest logit of the recorded forward: a cap or a scale changes it visibly


def bound(target: "TargetModel") -> float:
    """Return the largest allowed relative error of a feature; rounding grows with the depth of a model."""
    return max(1e-3, 8 * target.num_layers**0.5 * torch.finfo(target.dtype).eps)


def off(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return each row's relative error ``[B, R]``; nan counts as infinite."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    size = theirs.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)  # 0 for an embedding of zeros
    return ((ours - theirs).norm(dim=-1) / size).nan_to_num(torch.inf)


@torch.no_grad()
def check_target(target: "TargetModel") -> None:
    """Compare the target with the model's own forward.

    Raises:
        ValueError: features over a tree, or logits, are not the model's; or the model does not take a tree.
    """
    name, limit = f"{target.name} ({type(target.model).__name__})", bound(target)
    ids = _ordinary_tokens(target)
    texts = torch.cat([ids, ids.roll(-SHORTER, 1)])  # what follows in the second has no influence: causal
    try:
        with _settings(target):
            expected = body_of(target.model)(input_ids=texts, use_cache=False).last_hidden_state
            found = _over_a_tree(target, texts)
            logits = target.model(input_ids=ids, use_cache=False).logits
            given, changed = _last_steps(target, ids)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, KeyError, IndexError, ValueError) as failure:
        told = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        raise ValueError(f"{name} does not take a tree of tokens on engine {target.engine!r}: {told}") from failure
    if not expected.isfinite().all():
        raise ValueError(
            f"{name} gives infinite values in {dtype_name(target.dtype)}; load it with float32 or bfloat16"
        )
    # By groups: the prompt, the root, what comes behind the bystander. Medians, for rounding sends single rows to other
    # experts.
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        sizes = [len(ours) - ROWS + PROMPT, 2, 3, ROWS - PROMPT - 5]
        errors += [part.sort().values for part in off(ours, theirs[: len(ours)]).split(sizes)]
    if (most := max(part[(len(part) - 1) // 2].item() for part in errors)) > limit:
        also = "" if target.engine == "stock" else "; engine: stock may run it"
        raise ValueError(
            f"{name} gives other features over a tree on engine {target.engine!r} than over a text (off by {most:.2g}, "
            f"bound {limit:.2g}, in {dtype_name(target.dtype)}){also}"
        )
    ours = given if target.logit_change is None else target.logit_change(given)
    for one, other in ((target.lm_head(expected[:1]), logits), (ours, changed)):
        if off(one, other).median().item() > limit:
            raise ValueError(f"{name}: its logits are not what its LM head gives")


@torch.no_grad()
def check_parts(target: "TargetModel", layer: int) -> None:
    """Raise ValueError unless the first ``layer`` layers and the others, one after the other, are the target."""
    ids, reason = _ordinary_tokens(target), ""
    try:
        with _settings(target):
            whole, states = target.run(ids, None).features, target.shallow(ids, None, layer)
            again = target.run(states, None, start=layer).features
    except (AttributeError, TypeError, RuntimeError, IndexError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
    else:
        if off(again, whole).median().item() > bound(target):
            reason = "in two parts it gives something else"
    if reason:
        raise ValueError(f"{target.name} cannot be run in two parts, which Kangaroo needs: {reason}; use eagle")


def _ordinary_tokens(target: "TargetModel") -> Tensor:
    """Return ids ``[1, ROWS]`` from the vocabulary's middle: on control tokens, rounding to bf16 may change all."""
    return (target.vocab_size // 4 + torch.arange(ROWS, device=target.device))[None] % target.vocab_size


def _last_steps(target: "TargetModel", ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values up to ``LOGITS`` in place of the LM head's output, and the logits that the model makes of them."""

    def replaced(output: Tensor) -> Tensor:
        return torch.linspace(-LOGITS, LOGITS, output.numel(), device=output.device).to(output).view_as(output)

    hook = target.model.get_output_embeddings().register_forward_hook(lambda module, given, output: replaced(output))
    try:
        logits = target.model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return replaced(logits), logits


def _over_a_tree(target: "TargetModel", texts: Tensor) -> list[Tensor]:
    """Features ``[ROWS, H]``, ``[ROWS - SHORTER, H]`` of prompts, one row, and trees whose second row is a bystander.

    Both texts ``[2, ROWS]`` are one batch, with prompts of unequal lengths.
    """
    cache, lengths = target.new_cache(2, ROWS + 1), [PROMPT, PROMPT - SHORTER]
    prompts = target.run(texts[:, :PROMPT], cache).features
    cache.commit_first(lengths)
    rest = torch.stack([text[n : n + ROWS - PROMPT] for text, n in zip(texts, lengths, strict=True)])
    root = target.run(rest[:, :1], cache).features
    cache.commit_first([1, 1])
    tree = torch.cat([rest[:, 1:2], texts[:, 1:2], rest[:, 2:]], dim=1)
    last = target.run(tree, cache, _bystander(tree.shape[1], target.device)).features
    found = torch.cat([root, last[:, :1], last[:, 2:]], dim=1)  # [2, ROWS - PROMPT, H]
    return [torch.cat([prompts[row, :n], found[row]]) for row, n in enumerate(lengths)]


def _bystander(count: int, device: torch.device) -> Rows:
    """A chain whose second row is a sibling of the third, seen by no other row."""
    see = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    see[2:, 1] = False
    return Rows(see[None], see[None].sum(-1) - 1)


@contextlib.contextmanager
def _settings(target: "TargetModel") -> Iterator[None]:
    """Cut sliding windows and chunks of model and target to ``WINDOW``; multiply float32 in float32, not in TF32."""
    config, precision = target.config, torch.get_float32_matmul_precision()
    sizes = {key: size for key in ("sliding_window", "attention_chunk_size") if (size := getattr(config, key, None))}
    own: Any = target.runner if isinstance(target.runner, StockRunner) else target
    name = "windows" if own is target else "scopes"
    kept, parts = getattr(own, name), target._parts
    try:
        target._parts = {}  # a part knows its windows
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
        target._parts = parts
