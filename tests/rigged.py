"""Rigs that make random weights accept drafts: without them every draft is rejected and half the loop is never run."""

import ast
import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import tiny
import torch
from by_keys import new_drafter, new_head
from transformers import PreTrainedModel

from drafters import Drafter, FeatureOutput, TargetModel, make_drafter
from drafters.config import SHIFTED, HeadInputs
from drafters.drafting.grow import Marginals, Slots
from drafters.drafting.tree_plan import TreePlan
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.heads.medusa.module import MedusaHeads
from drafters.heads.medusa.shape import MedusaShape
from drafters.loop.state import DecodeState
from drafters.methods.block import BlockHead
from drafters.methods.eagle import Eagle3Drafter, EagleDrafter, EagleOptions, FeatureHead
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.methods.medusa import MedusaDrafter, MedusaOptions, ParallelHeads
from drafters.methods.peagle import ParallelFeatures, PEagleDrafter
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import identity
from drafters.policy.copies import CopyPolicy
from drafters.policy.costs import Curve
from drafters.policy.shape import Costs, Path, Shape, ShapePolicy
from drafters.policy.truncation import Costs as BlockCosts

EXIT_LAYER = 2


@lru_cache(maxsize=64)
def perturbed(target: TargetModel, noise: float, seed: int = 0) -> TargetModel:
    """A draft model: the target with ``noise`` (relative to each weight's own spread) added to its matrices.

    Made once and shared by all tests: do not change it.
    """
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(seed)
    for weights in model.parameters():
        if weights.dim() >= 2:
            weights.data += torch.randn(weights.shape, generator=generator).to(weights) * noise * weights.std()
    return TargetModel(model, name="perturbed")


Texts = dict[tuple[int, ...], torch.Tensor]
_read: WeakKeyDictionary[TargetModel, Texts] = WeakKeyDictionary()


def features_after(target: TargetModel, texts: Sequence[Sequence[int]]) -> Texts:
    """``[H]`` features of ``target`` after each text, by text.

    The target reads each text once: oracles ask for the same texts many times.
    """
    known = _read.setdefault(target, {})
    new = [text for text in dict.fromkeys(map(tuple, texts)) if text not in known]
    if new:
        longest = max(map(len, new))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in new], device=target.device)
        states = target.features(ids).features
        known.update({text: row[len(text) - 1].clone() for text, row in zip(new, states, strict=True)})
    return known


class Oracle(FeatureHead):
    """An EAGLE head whose predicted features are the target's own plus ``noise`` (relative).

    The layers still run, so the cache, masks and positions are exercised as usual; only what they predict is replaced.
    """

    noise = 0.0

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._committed: list[list[int]] = []
        super().begin(state, output)

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        self._committed = [list(row) for row in state.tokens]
        self._nodes: list[list[int]] = [[] for _ in state.tokens]
        return super().slots(state, plan)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self._committed = []
        super().join(state, rows, part, output)

    def read(self, features: torch.Tensor, counts: list[int], state: DecodeState) -> torch.Tensor:
        self._drafts = False
        predicted = super().read(features, counts, state)
        self._drafts = True
        return self._truths([[ids] for ids in self._committed]) if self._committed else predicted

    def extend(self, features: torch.Tensor, tokens: torch.Tensor, rows: Rows = CHAIN) -> torch.Tensor:
        predicted = super().extend(features, tokens, rows)
        if not self._drafts:
            return predicted
        count = tokens.shape[1]
        for nodes, new in zip(self._nodes, tokens.tolist(), strict=True):
            nodes += new
        see = rows.see
        if see is None:
            see = torch.ones(count, len(self._nodes[0]), dtype=torch.bool).tril(rows.offset)[None]
        seen = see.expand(len(tokens), -1, -1).tolist()
        texts = []
        for ids, nodes, mask in zip(self._committed, self._nodes, seen, strict=True):
            paths = [[node for node, visible in zip(nodes, row, strict=True) if visible] for row in mask]
            texts.append([ids + path for path in paths])
        return self._truths(texts)

    def _truths(self, texts: list[list[list[int]]]) -> torch.Tensor:
        """``[B, N, H]`` features after each row's N texts, which are of one length, with noise by that."""
        read = features_after(self.target, [text for row in texts for text in row])
        found = []
        for row in texts:
            true = torch.stack([read[tuple(text)] for text in row])
            generator = torch.Generator().manual_seed(len(row[0]))
            scale = self.noise * true.float().pow(2).mean().sqrt()
            found.append(true + (torch.randn(true.shape[-1], generator=generator).to(scale) * scale).to(true.dtype))
        return torch.stack(found)


def with_head(drafter: Any, rig: type, noise: float) -> Any:
    """The drafter, whose head has the methods of ``rig`` and this noise."""
    head: Any = type(rig.__name__, (rig, type(drafter.head)), {})(drafter.target, drafter.module, drafter.settings)
    head.noise, head.one_call = noise, None
    drafter.hold(head, drafter.shaper, drafter.max_draft)
    return drafter


@lru_cache(maxsize=64)
def _head(target: TargetModel, inputs: HeadInputs) -> EagleHead:
    """A random head: building one takes as long as some steps, so tests get copies."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer: Any = "llama" if target.chains_only else "target"
        return EagleHead(target.config, EagleShape(inputs=inputs, layer=layer))


def eagle(target: TargetModel, noise: float | None, tree: str, **options: object) -> EagleDrafter:
    """An EAGLE drafter with a random head; ``noise`` makes it an oracle, None leaves the head as it is."""
    inputs: Any = options.pop("inputs", SHIFTED)
    chosen = EagleOptions(tree=tree, **options)  # type: ignore[arg-type]
    drafter = EagleDrafter(target, copy.deepcopy(_head(target, inputs)), chosen)
    return drafter if noise is None else with_head(drafter, Oracle, noise)


@lru_cache(maxsize=64)
def _eagle3_head(target: TargetModel, options: str) -> Any:
    """As ``_head``; ``options`` as ``repr`` writes them."""
    given = ast.literal_eval(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head: Any = new_head(Eagle3Drafter, target.config, **given)
        if (kept := given["draft_vocab_size"]) is not None:
            head.d2t.copy_(torch.randperm(target.vocab_size)[:kept].sort().values - torch.arange(kept))
    return head


def eagle3(target: TargetModel, noise: float | None, tree: str, kept: int | None = None, **options: Any) -> Any:
    """An EAGLE-3 drafter with a random head; ``noise`` makes it an oracle that drafts with ``kept`` tokens."""
    given: dict[str, Any] = {"taps": [1, 2, 3], "draft_vocab_size": kept} | options
    head = copy.deepcopy(_eagle3_head(target, repr(given)))
    if noise is None:
        return new_drafter(Eagle3Drafter, target, head, tree=tree, **given)
    rows = target.model.get_output_embeddings().weight.detach()
    head.lm_head.weight.data.copy_(rows if kept is None else rows[head.d2t + torch.arange(kept)])
    drafter = with_head(new_drafter(Eagle3Drafter, target, head, tree=tree, **given), Oracle, noise)
    drafter.lm_head.enter = identity
    return drafter


class OracleHeads(ParallelHeads):
    """Medusa heads that know the target's own features along its greedy continuation, plus ``noise`` (relative)."""

    noise = 0.0

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        self._committed = [list(row) for row in state.tokens]
        return super().slots(state, plan)

    def states(self, feature: torch.Tensor) -> torch.Tensor:
        states = super().states(feature)  # the heads still run
        for row, tokens in enumerate(self._committed):
            for head in range(len(self.module)):
                true = features_after(self.target, [tokens])[tuple(tokens)]
                generator = torch.Generator().manual_seed(len(tokens))
                scale = self.noise * true.float().pow(2).mean().sqrt()
                states[row, head] = true + (torch.randn(true.shape, generator=generator).to(scale) * scale).to(true)
                tokens.append(int(self.target.lm_head(true).argmax()))
        return states


def medusa(
    target: TargetModel, noise: float | None, tree: str, heads: int = 4, layers: int = 1, **options: object
) -> MedusaDrafter:
    """A Medusa drafter with random heads; ``noise`` makes it an oracle, None leaves the heads as they are."""
    torch.manual_seed(3)
    own = bool(options.pop("own_lm_heads", False))
    module = MedusaHeads(target.config, MedusaShape(heads=heads, layers=layers, own_lm_heads=own))
    for weights in module.parameters():
        torch.nn.init.normal_(weights, std=0.1)
    drafter = MedusaDrafter(target, module, MedusaOptions(tree=tree, **options))  # type: ignore[arg-type]
    return drafter if noise is None else with_head(drafter, OracleHeads, noise)


class OracleBlock(BlockHead):
    """A block head whose slots know the target's features along its greedy continuation, plus ``noise`` (relative).

    The layers still run, so that cache, masks and positions are used as always.
    """

    noise = 0.0

    def states(self, state: DecodeState) -> torch.Tensor:
        return foretold(self, super().states(state), state)


class OracleParallel(ParallelFeatures):
    """The same for a P-EAGLE head."""

    noise = 0.0

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        super().slots(state, plan)
        width = self.target.hidden_size
        states = torch.empty(state.batch, self.depth, width, device=self.target.device, dtype=self.target.dtype)
        return Marginals(self.lm_head(foretold(self, states, state)))


def foretold(head: Any, states: torch.Tensor, state: DecodeState) -> torch.Tensor:
    """``states [B, D, H]``, filled with the target's features along its greedy continuation, plus the head's noise."""
    for row, known in enumerate(state.tokens):
        tokens = list(known)
        for slot in range(states.shape[1]):
            true = features_after(head.target, [tokens])[tuple(tokens)]
            generator = torch.Generator().manual_seed(len(tokens))
            scale = head.noise * true.float().pow(2).mean().sqrt()
            states[row, slot] = true + (torch.randn(true.shape, generator=generator).to(scale) * scale).to(true)
            tokens.append(int(head.target.lm_head(true).argmax()))
    return states


def shaken(module: Any) -> Any:
    """The head, with norms that are not 1, biases that are not 0, and a Markov head, convolutions and a selector that
    matter."""
    generator = torch.Generator().manual_seed(3)
    for name, weights in module.named_parameters():
        if weights.dim() == 1:
            weights.data += 0.2 * torch.randn(weights.shape, generator=generator)
        elif name.startswith(("markov_head", "candidate_selector")):
            weights.data = 0.6 * torch.randn(weights.shape, generator=generator)
        elif "_conv." in name:
            weights.data += (0.2 if weights.dim() == 3 else 0.02) * torch.randn(weights.shape, generator=generator)
    return module


BLOCK: dict[str, Any] = {"block_size": 5, "mask_token_id": 2, "taps": [1, 2, 3], "layers": 2}
SELECTOR: dict[str, Any] = {"selector_rank": 8, "selector_top_k": 6, "conv_group_size": 8}  # of DFlash2


def block_drafter(
    name: str, target: TargetModel, noise: float | None, tree: str, layout: str = "fill-in", **options: Any
) -> Any:
    """A drafter with a random head (``shaken``); ``noise`` makes it an oracle."""
    given = BLOCK | {"layout": layout, "tree": tree} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = new_head(name, target.config, **given)
        if (kept := given.get("draft_vocab_size")) is not None:
            ids = torch.randperm(target.vocab_size)[:kept].sort().values
            head.d2t.copy_(ids - torch.arange(kept))
            head.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight[ids])
    if noise is None:
        return new_drafter(name, target, shaken(head), **given)
    return with_head(new_drafter(name, target, head, **given), OracleBlock, noise)


PEAGLE: dict[str, Any] = {"taps": [1, 2, 3], "mask_token_id": 2, "depths": 4, "layers": 2}


def peagle(target: TargetModel, tree: str, noise: float | None = None, **more: Any) -> Any:
    """A P-EAGLE drafter with a random head; ``noise`` makes it an oracle."""
    given = PEAGLE | {"tree": tree} | more
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head: Any = new_head(PEagleDrafter, target.config, **given)
        if (count := given.get("draft_vocab_size")) is not None:
            head.d2t.copy_(torch.randperm(target.vocab_size)[:count].sort().values - torch.arange(count))
    if noise is None:
        return new_drafter(PEagleDrafter, target, shaken(head), **given)
    head.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight.detach())
    drafter = with_head(new_drafter(PEagleDrafter, target, head, **given), OracleParallel, noise)
    drafter.lm_head.enter = identity
    return drafter


def dflash(target: TargetModel, noise: float | None, tree: str, layout: str = "fill-in", **options: Any) -> Any:
    """A DFlash drafter; see ``block_drafter``."""
    return block_drafter("dflash", target, noise, tree, layout, **options)


def dspark(target: TargetModel, noise: float | None, tree: str, layout: str = "anchor-first", **options: Any) -> Any:
    """A DSpark drafter; see ``block_drafter``."""
    return block_drafter("dspark", target, noise, tree, layout, **{"markov_rank": 8} | options)


def dflash2(target: TargetModel, noise: float | None, tree: str, layout: str = "fill-in", **options: Any) -> Any:
    """A DFlash2 drafter; see ``block_drafter``."""
    return block_drafter("dflash2", target, noise, tree, layout, **SELECTOR | options)


@lru_cache(maxsize=8)
def quiet_depths(scale: float) -> Callable[[str], PreTrainedModel]:
    """family -> a model whose layers from EXIT_LAYER on add but ``scale`` times what they would."""

    def build(family: str) -> PreTrainedModel:
        model = tiny.build(family)
        for layer in model.model.layers[EXIT_LAYER:]:
            for name, weights in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weights.data *= scale
        return model

    return build


def kangaroo(target: TargetModel, rigged: bool, **options: object) -> KangarooDrafter:
    """A Kangaroo drafter; ``rigged``: the adapter passes exit states to the target's own final norm."""
    torch.manual_seed(2)
    own = bool(options.pop("own_lm_head", False))
    module = KangarooAdapter(target.config, KangarooShape(exit_layer=EXIT_LAYER, own_lm_head=own))
    if rigged:
        module.layers[0].self_attn.o_proj.weight.data.zero_()  # type: ignore[union-attr, operator]
        module.norm.weight.data.copy_(target.body.norm.weight)
        if own:
            module.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight)
    return KangarooDrafter(target, module, KangarooOptions(**options))  # type: ignore[arg-type]


# A machine on which rows are cheap: a draft pass takes a tenth of a forward, a row of a verification a hundredth.
AUTO_COSTS = Costs(Curve((1, 2), (1.0, 1.01)), first=0.1, level=0.1, row=0.001)


class Cycling(ShapePolicy):
    """Chooses another shape every step, no draft included; acceptance does not matter."""

    shapes: tuple[tuple[Path, ...], ...] = (
        (), ((0,), (0, 0), (0, 0, 0)), (), (), ((0,), (1,), (0, 0), (1, 0)), ((0,),)
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__(8, 3, 2)

    def begin(self) -> None:
        """Begin with the first shape."""
        super().begin()
        self.step = 0

    def prepare(self, *given: object) -> None:
        """Nothing is measured."""

    def paths(self, state: DecodeState) -> tuple[Path, ...]:
        """The next of the shapes."""
        self.step += 1
        return self.shapes[self.step % len(self.shapes)]

    def outlook(self, state: DecodeState) -> Shape:
        """The same."""
        return Shape(self.shapes[(self.step + 1) % len(self.shapes)])


def by_length(name: str, target: TargetModel, costs: Costs = AUTO_COSTS, **options: object) -> Drafter:
    """A drafter with ``gamma: auto`` that takes these costs."""
    return goes_by(make_drafter(name, target, gamma="auto", **options), costs)


def goes_by(drafter: Any, costs: Costs = AUTO_COSTS) -> Any:
    """The drafter, whose policy takes these costs instead of measuring."""
    policy = drafter.policy
    if isinstance(policy, CopyPolicy):
        policy._curve, policy.prepare = lambda state: costs.rest, lambda *given: None  # type: ignore[method-assign]
    else:
        policy._measured = lambda *given: costs
    return drafter


def block_costs(drafter: Any, row: float = 0.25) -> Any:
    """The drafter, whose truncation takes these costs: a pass over a block takes a tenth of a plain step, each draft
    token ``row`` of it."""
    costs = BlockCosts(0.1, Curve((1, 2), (1.0, 1.0 + row)))
    drafter.policy._measured = lambda *given: costs
    return drafter


def auto_eagle(
    target: TargetModel, noise: float | None, choice: Costs | ShapePolicy | None = AUTO_COSTS, **options: object
) -> EagleDrafter:
    """An EAGLE drafter that shapes its drafts by the costs given (None: measured), or by another policy."""
    drafter = eagle(target, noise, "auto", **options)
    if isinstance(choice, ShapePolicy):
        drafter.policy = choice
    elif choice is not None:
        goes_by(drafter, choice)
    return drafter
