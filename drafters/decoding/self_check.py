"""What a target proves when it is loaded: that its layers, run one by one and by its engine, are the model."""

from typing import TYPE_CHECKING

import torch

from .model_files import SUPPORTED

if TYPE_CHECKING:
    from .graphs import Graphs
    from .target import TargetModel

# Relative to the logits, which in a small random model lie far below one. Other operations round otherwise, and in 16
# bits a model of wide random weights shows it.
TOLERANCE = {"eager": 0.05, "fused": 0.2, "graphs": 0.2}
TOLERANCE_FLOAT32 = 1e-3


@torch.no_grad()
def check_layers_agree(target: "TargetModel") -> None:
    """Compare with the model's own forward: scaled embeddings or capped logits would decode garbage.

    Raises:
        ValueError: it cannot be run layer by layer, or gives something else then.
    """
    kind = type(target.model).__name__
    ids = _ids(target, 4)
    try:
        cache = target.new_cache(1, 4)  # two rows as a prompt, two as a chain that follows it
        first = target.run(ids[:, :2], cache).features
        cache.commit([[0, 1]])
        ours = target.lm_head(torch.cat([first, target.run(ids[:, 2:], cache).features], dim=1))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{target.name} ({kind}) cannot be run layer by layer: {error}") from error
    theirs = target.model(input_ids=ids, use_cache=False).logits.to(ours.device)
    gap, scale = _gap(ours, theirs)
    tolerance = TOLERANCE_FLOAT32 if target.dtype == torch.float32 else TOLERANCE[target.engine]
    if not gap <= tolerance * scale + 1e-6:
        raise ValueError(
            f"{target.name} ({kind}) run layer by layer differs from its own forward by {gap:.3g} (logits up to "
            f"{scale:.3g}); supported: {SUPPORTED}"
        )


@torch.no_grad()
def graphs_agree(target: "TargetModel", graphs: "Graphs") -> str | None:
    """None if captured forwards give what uncaptured ones of the fused layers do, else what went wrong.

    Two prompts of unequal length, then a chain and a tree twice each, so that graphs are replayed with other values
    than they were captured with. Drivers and libraries differ; a wrong replay would be garbage nobody asked for.
    """
    tokens = _ids(target, 9).expand(2, -1)
    see = torch.eye(5, dtype=torch.bool, device=target.device)[None].repeat(2, 1, 1)
    see[:, :, 0] = True  # a root, its three children, and a grandchild
    see[:, 4, 2] = True
    found: list[list[torch.Tensor]] = []
    try:
        for captured in (None, graphs):
            target._graphs = captured
            cache = target.new_cache(2, 32)
            outputs = [target.run(tokens[:, :6], cache).features[:, :4]]
            cache.commit([list(range(6)), list(range(4))])
            for turn in range(2):
                new = tokens[:, turn : turn + 5]
                outputs.append(target.run(new[:, :1], cache).features)
                cache.commit([[0], [0]])
                outputs.append(target.run(new, cache, see=see, depths=see.sum(-1) - 1).features)
                cache.commit([[0, 2, 4], [0]])
            found.append(outputs)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        target._graphs = None
    if graphs.broken is not None:
        return graphs.broken
    tolerance = TOLERANCE_FLOAT32 if target.dtype == torch.float32 else TOLERANCE["graphs"]
    for number, (plain, replayed) in enumerate(zip(*found, strict=True)):
        gap, scale = _gap(replayed, plain)
        if not gap <= tolerance * scale + 1e-6:
            return f"forward {number} of a trial differs by {gap:.3g} (features up to {scale:.3g})"
    return None


def _ids(target: "TargetModel", count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, device=target.device)[None] % target.vocab_size


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Largest difference, and largest value."""
    return (ours.float() - theirs.float()).abs().max().item(), theirs.float().abs().max().item()
