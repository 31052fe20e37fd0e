"""EAGLE: a head of one decoder layer extrapolates the target's features (Li et al. 2024; EAGLE-2's dynamic tree).

At index i the head takes feature_i and the embedding of token_{i+1} and predicts feature_{i+1}, whose logits are
those of token_{i+2}: the token sampled at i + 1 is known, which resolves the feature's uncertainty (paper, section
3.1). The paper's other inputs (Figure 8) are a head's ``inputs``, to compare with.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.base import LearnedDrafter, Promised
from drafters.common.choices import SHIFTED, UNSHIFTED, HeadInputs, HeadLayer
from drafters.config import DraftSize
from drafters.drafting.passes import Nodes, OneCallPasses, Passes, TorchPasses, grow_planned
from drafters.drafting.tree_plan import EAGLE_TREE, TreePlan, children_of, grow_dynamic, grow_static, tree_plan
from drafters.loop.acceptance import Verdict
from drafters.loop.generate import DecodeState, last_of, padded, rows_of
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.model import backend
from drafters.model.cache import KVCache
from drafters.model.draft_head import DraftHeadOptions, quantize_layers
from drafters.model.layers import check_head, layer_kind, made, own_rope
from drafters.model.rows import CHAIN, Rows
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.costs import CostsByLength, Make, Run, behind, step_costs
from drafters.policy.growth import COMMON, FRONTIER, Paying
from drafters.policy.kept_costs import Costs
from drafters.policy.shape import PRIOR, Chooser, Probability, Way


class EagleHead(nn.Module):
    """``fc`` over cat(embedding, feature), then a decoder layer, the target's or Llama's, without its input layernorm.

    No final norm; the embedding and the LM head are the target's. Parameter names are those of the released
    checkpoints. A head that ``reads`` tokens or features alone has no fc. ``bias``: of fc, as released heads for Vicuna
    and Llama 2 have one.

    Raises:
        ValueError: no head can be made of the target's kind of layers.
    """

    inputs = 2  # hidden states that it takes

    def __init__(
        self,
        target_config: PretrainedConfig,
        reads: HeadInputs = SHIFTED,
        bias: bool = False,
        layer: HeadLayer = "target",
    ) -> None:
        super().__init__()
        kind = layer_kind(target_config, layer)
        config: Any = kind.config
        self.reads, self.layer = reads, layer
        if reads in (SHIFTED, UNSHIFTED):
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
            if bias:
                nn.init.zeros_(self.fc.bias)
        decoder: Any = made(config, kind.decoder_layer, config, layer_idx=0)
        decoder.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([decoder])
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        for weights in self.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
        check_head(self, config)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Features ``[B, T, H]`` and the next tokens' embeddings ``[B, T, H]`` (unshifted: those tokens' own) ->
        predicted next features ``[B, T, H]``.

        ``attention_mask`` is bool ``[B, 1, T, S]``; None is causal.
        """
        hidden = self.enter(features, embeddings, getattr(self, "fc", None))
        return self.layers[0](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
            use_cache=cache is not None,
        )

    def enter(self, features: Tensor, embeddings: Tensor, fc: Callable[[Tensor], Tensor] | None) -> Tensor:
        """What the layer reads, ``[B, T, H]``."""
        if fc is not None:
            return fc(torch.cat([embeddings, features], dim=-1))
        return embeddings if self.reads == "token" else features


class EagleOptions(DraftHeadOptions):
    """``tree``: auto drafts, while decoding, what has most tokens per second by what forwards cost on this machine and
    what is accepted: a tree that grows while it pays (greedy, one prompt, on a CPU), else a chain or static tree, or
    nothing; chain and dynamic are ``depth`` deep, by default 5 and 6; static is the paper's tree of Figure 9 unless
    ``paths`` says else.

    ``depth``, ``top_k`` and ``nodes`` are auto's bounds (depth: 8). ``acceptance``: what its static trees start from,
    by "greedy" and "sampled": for every depth, how often the candidate of each rank is right where those before it are
    wrong.

    ``top_k``: children considered a node, and nodes extended a level, of the dynamic tree; ``nodes``: how many it
    keeps. ``paths``: a static tree as paths of child ranks, for example ``[[0], [1], [0, 0]]``.

    ``inputs``: what the head was trained to read; engines and released checkpoints know the first alone. ``fc_bias``:
    its fc has a bias. ``layer``: the kind of its decoder layer.

    The dynamic tree's defaults are those of EAGLE-2's released evaluation. What it calls depth 5 are levels after the
    root's own children, so 6 in all, and its 60 tokens count the root.
    """

    tree: Literal["auto", "chain", "static", "dynamic"] = "auto"
    depth: DraftSize | None = Field(default=None, ge=1)
    top_k: DraftSize = Field(default=10, ge=1)
    nodes: DraftSize = Field(default=59, ge=1)
    paths: list[list[DraftSize]] | None = None
    acceptance: dict[Way, list[list[Probability]]] | None = None
    inputs: HeadInputs = SHIFTED
    fc_bias: bool = False
    layer: HeadLayer = "target"


# A fixed shape has to promise so many times the gain of growing on this very text: its rates are of others, too.
AHEAD = 1.6
DEPTHS = {"auto": 8, "chain": 5, "static": 5, "dynamic": 6}


class EagleDrafter(LearnedDrafter):
    """Drafts a chain, the paper's static tree, EAGLE-2's dynamic tree, or what pays most.

    Raises:
        ValueError: ``paths`` that are no tree.
    """

    name = "eagle"
    options = EagleOptions
    max_batch = None
    follows = True

    def __init__(self, target: TargetModel, module: EagleHead, options: EagleOptions) -> None:
        super().__init__(target, module, options)
        self.lm_head = self.draft_head(options)
        self.tree, self.top_k, self.nodes = options.tree, min(options.top_k, self.lm_head.width), options.nodes
        self.depth, self._own_depth = options.depth or DEPTHS[self.tree], options.depth
        self.paths = None if self.tree == "chain" else options.paths
        chain = [[0] * level for level in range(1, self.depth + 1)]
        self.plan = TreePlan(chain if self.tree == "chain" else self.paths or EAGLE_TREE, target.device)
        # The head's cache also holds the forwarded nodes of the levels before the last.
        forwarded = {"dynamic": self.top_k * self.depth, "auto": FRONTIER * self.depth}
        self.max_draft = max(self.nodes, forwarded[self.tree]) if self.tree in forwarded else self.plan.size
        self.acceptance: Any = options.acceptance
        # Beside it, where the host can look on (greedy, alone, on a CPU), trees that grow: more accepted for more time.
        self.paying: Paying | None = None
        self._grown_costs = CostsByLength(partial(self._step_costs, 1, Sampling(), grows=True))
        self._may_grow, self._idle = target.device.type == "cpu", False
        self._growing: Paying | None = None  # what grew the latest draft
        if self.tree == "auto":
            ranks = min(self.top_k, len(PRIOR))
            self.auto = Chooser(self._step_costs, self.nodes, self.depth, ranks, self.acceptance)
            self.remembers = True
        self._make_head(options)
        self._cache = KVCache.nothing()
        self._features: Tensor  # [B, R, H] true features that the head has not taken in yet
        self._counts: list[int]  # how many of them each row has, the rest being filling
        self._more: list[tuple[Tensor, list[int]]] = []  # the same of later steps, which drafted nothing

    def _make_head(self, options: EagleOptions) -> None:
        target, head = self.target, cast(Any, self.module)
        self.inputs, self.fc_bias, width = options.inputs, options.fc_bias, target.hidden_size
        fc = target.runner.linear(head.fc) if hasattr(head, "fc") else None
        self._states_width = width
        if options.inputs == UNSHIFTED:
            # A feature goes through the tree with its own token's embedding: a node's token is its children's input.
            self._states_width = 2 * width
            self.lm_head.reads = width

            def enter(states: Tensor, tokens: Tensor) -> Tensor:
                return head.enter(states[..., :width], states[..., width:], fc)

        else:

            def enter(states: Tensor, tokens: Tensor) -> Tensor:
                return head.enter(states, target.embed(tokens), fc)

        self._head = target.runner.part(head.layers, enter, rope=own_rope(head, target.config, target.runner.rope))
        if options.draft_dtype is not None:
            quantize_layers(self._head, options.draft_dtype, *([] if fc is None else [fc]))
        self._one_call = None  # a pass of the head over a draft of one sequence
        if options.inputs == SHIFTED:
            self._one_call = backend.head_pass(self._head, fc, self.lm_head.product, target.body.embed_tokens)

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        names = {"inputs": "reads", "fc_bias": "bias", "layer": "layer"}
        return EagleHead(target_config, **{names[key]: value for key, value in drafter_config.items() if key in names})

    def drafter_config(self) -> dict[str, Any]:
        options: dict[str, Any] = {"tree": self.tree, "top_k": self.top_k, "nodes": self.nodes}
        options |= {"layer": cast(Any, self.module).layer} | ({} if self.inputs == SHIFTED else {"inputs": self.inputs})
        options |= {"fc_bias": True} if self.fc_bias else {}
        # A default depth is the tree's own: saved, it would be another tree's, too, that is asked for at loading.
        options |= {} if self._own_depth is None else {"depth": self._own_depth}
        options |= {} if self.acceptance is None else {"acceptance": self.acceptance}
        return options | ({"paths": self.paths} if self.paths else {}) | self.lm_head.options()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        target, batch = self.target, state.batch
        self._cache.release()  # so that its memory can be taken again
        self._cache = target.new_cache(batch, state.cache.capacity, layers=1)
        prompts = [tokens[1:length] for tokens, length in zip(state.tokens, state.prompt_lengths, strict=True)]
        if any(prompts):
            given = self._given(output.features[:, :-1], prompts, state)
            self._extend(given, padded(prompts, target.device))
            self._cache.commit_first([len(prompt) for prompt in prompts])
        self._features = last_of(output.features, state.prompt_lengths)[:, None]
        self._counts, self._more = [1] * batch, []
        self.lm_head.read(state.tokens)
        self.prepare(batch, state.sampling, state.longest)

    def prepare(self, batch: int, sampling: Sampling, longest: int) -> None:
        if self.auto is not None:
            self.auto.begin(batch, sampling, longest)
            if self._grows(batch, sampling):
                for length in (0, longest):
                    self._grown_costs.at(length)
            if self.paying is not None:
                self.paying.begin()

    def _grower(self, state: DecodeState) -> Paying | None:
        """What grows the next draft, unless one of a fixed shape promises more."""
        if self.auto is None or not self._grows(state.batch, state.sampling):
            return None
        costs = self._grown_costs.at(state.length)
        if self.paying is None:
            self.paying = Paying(costs, self.nodes, self.depth, self.top_k)
        elif costs is not self.paying.costs:
            self.paying.reckon(costs)
        fixed = self.auto.outlook(1, state.sampling, state.length)
        gain = max(self.paying.speedup - 1.0, 0.0)
        fixed_is_better = fixed.paths and self.paying.tried and fixed.speedup - 1.0 > AHEAD * gain
        return None if fixed_is_better else self.paying

    def _grows(self, batch: int, sampling: Sampling) -> bool:
        return self._may_grow and batch == 1 and sampling.greedy

    def promised(self) -> Promised | None:
        if self.auto is None:
            return None
        found = self.auto.promised()
        if self.paying is None:
            return found
        grown = self.paying.promised()
        sums = [one + other for one, other in zip(found[:3], grown[:3], strict=True)]
        return Promised(sums[0], sums[1], sums[2], grown.choice if self._growing is not None else found.choice)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self._gather_up()
        whole, features, counts, auto = self._cache, self._features, self._counts, self.auto
        self._cache, self.auto = KVCache.nothing(), None
        self.begin(part, output)
        for number, row in enumerate(rows):
            whole.copy_row(row, self._cache, number)
            features[row, 0], counts[row] = self._features[number, 0], 1
        self._cache.release()
        self._cache, self._features, self._counts, self.auto = whole, features[:, : max(counts)], counts, auto

    def propose(self, state: DecodeState) -> DraftTree:
        depth = state.longest_draft(self.depth)
        if self.auto is not None:
            self._growing = self._grower(state)
            if self._growing is not None:
                self._idle = not self._growing.wants(depth)
            else:
                paths = self.auto.shape(state.batch, state.sampling, state.length).paths
                self._idle = not paths
                if paths:
                    self.plan = tree_plan(paths, self.target.device)
            if self._idle:
                return state.nothing
        self._gather_up()
        self.lm_head.read(state.tokens)
        if depth >= 1 and self._grows_alone(state):
            return self._grow_alone(state, depth)
        # Re-ingest what was committed, with true features: (feature_i, token_{i+1}) up to the root.
        pairs = zip(state.tokens, self._counts, strict=True)
        following = [row[len(row) - count :] for row, count in pairs]
        given = self._given(self._features, following, state)
        predicted = last_of(self._extend(given, padded(following, self.target.device)), self._counts)[:, None]
        self._cache.commit_first(self._counts)
        if depth < 1:
            return state.nothing
        head = self.lm_head
        if self._growing is not None:
            return self._growing.grow(TorchPasses(predicted, self._extend_tree, head), depth, self.target.device)
        if self.tree == "dynamic":
            draft = grow_dynamic(predicted, self._extend_tree, head, depth, self.top_k, self.nodes)
        else:
            draft = grow_static(predicted, self._extend_tree, head, self.plan, state.sampling, state.generator)
        draft.tokens, draft.q = head.tokens(draft.tokens), None if draft.q is None else head.spread(draft.q)
        return draft

    def _grows_alone(self, state: DecodeState) -> bool:
        """Whether each pass over the next draft can be one call."""
        if self._one_call is None or state.batch > 1 or not state.sampling.greedy:
            return False
        return self._growing is not None or self.tree != "dynamic"

    def _grow_alone(self, state: DecodeState, depth: int) -> DraftTree:
        assert self._one_call is not None
        following = state.tokens[0][len(state.tokens[0]) - self._counts[0] :]
        passes = OneCallPasses(self._one_call, self.lm_head, self._features[0], following, self._cache)
        if self._growing is not None:
            return self._growing.grow(passes, depth, self.target.device)
        return grow_planned(passes, self.plan, self.target.device)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if self._idle:  # nothing was taken in
            if self.auto is not None:
                self.auto.look_back(state, verdict)
            self.follow(state, output, verdict)
            return
        self._features, self._counts = _of_step(output, verdict)
        if self._growing is not None:
            if not state.finished[0]:  # else cut short
                right = self._growing.learn(verdict.rows[0], verdict.tokens[0])
                if self.auto is not None:  # not of the levels below: those were gone on to because they were sure
                    self.auto.learn(0, self._growing.top_k, right)
        elif self.auto is not None:
            self.auto.learn_step(self.plan, draft.size, state, verdict)

    def may_rest(self) -> int:
        return super().may_rest() if self._growing is None else 0

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        self._more.append(_of_step(output, verdict))

    def _gather_up(self) -> None:
        """Put what steps without a draft have left behind what is to be taken in."""
        if not self._more:
            return
        pieces, self._more = [(self._features, self._counts), *self._more], []
        rows: list[list[int]] = [[] for _ in self._counts]
        start = 0
        for features, counts in pieces:
            for row, count in zip(rows, counts, strict=True):
                row.extend(range(start, start + count))
            start += features.shape[1]
        self._features = rows_of(torch.cat([features for features, _ in pieces], dim=1), rows)
        self._counts = [len(row) for row in rows]

    def _given(self, features: Tensor, following: list[list[int]], state: DecodeState) -> Tensor:
        """True features ``[B, R, H]`` as the head takes them, given the tokens after each."""
        if self.inputs != UNSHIFTED:
            return features
        starts = [self._cache.lengths[row] for row in range(state.batch)]
        rows = zip(state.tokens, starts, following, strict=True)
        own = [tokens[start : start + len(part)] for tokens, start, part in rows]
        return torch.cat([features, self.target.embed(padded(own, self.target.device))], dim=-1)

    def _extend_tree(self, features: Tensor, places: Tensor, rows: Rows) -> Tensor:
        """``_extend`` by nodes of a tree that grows of places among the LM head's logits."""
        return self._extend(features, self.lm_head.tokens(places), rows)

    def _extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN, cache: KVCache | None = None) -> Tensor:
        """Run the head over rows ``[B, R]``; predicted features ``[B, R, H]``, unshifted with the rows' embeddings."""
        predicted = self.target.runner.run(self._head, [features, tokens], cache or self._cache, rows)[0]
        if self.inputs != UNSHIFTED:
            return predicted
        return torch.cat([predicted, self.target.embed(tokens)], dim=-1)

    def _nothing(self, batch: int, rows: int) -> tuple[Tensor, Tensor]:
        """Features and tokens to time the head with."""
        features = torch.zeros(batch, rows, self._states_width, dtype=self.target.dtype, device=self.target.device)
        return features, torch.zeros(batch, rows, dtype=torch.long, device=features.device)

    def _step_costs(self, batch: int, sampling: Sampling, length: int, grows: bool = False) -> Costs:
        """Of batches of this size, behind so many tokens; ``grows``: of trees that grow, and not of a fixed shape."""
        target, head, generator = self.target, self.lm_head, torch.Generator(self.target.device)
        plan = tree_plan(((0,),), target.device)
        paying = Paying(COMMON, self.nodes, self.depth, self.top_k)
        alone = self._one_call is not None and batch == 1 and sampling.greedy

        def drafting(context: int) -> tuple[Make, Make]:
            cache_behind = behind(target, batch, context, layers=1)

            def extend(features: Tensor, places: Tensor, rows: Rows = CHAIN) -> Tensor:
                return self._extend(features, head.tokens(places), rows, cache_behind())

            def passes(features: Tensor, tokens: Tensor) -> Passes:
                if self._one_call is not None:
                    return OneCallPasses(self._one_call, head, features[0], tokens[0].tolist(), cache_behind())
                return TorchPasses(extend(features, tokens)[:, -1:], extend, head)

            def begin(late: int) -> Run:
                features, places = self._nothing(batch, 2 + late)

                def once() -> object:
                    if grows:
                        draft = paying.grow(passes(features, places), 1, target.device)
                        paying.learn([0], [0])
                    elif alone:
                        draft = grow_planned(passes(features, places), plan, target.device)
                    else:
                        predicted = extend(features, places)[:, -1:]
                        draft = grow_static(predicted, extend, head, plan, sampling, generator)
                        draft.tokens = head.tokens(draft.tokens)
                    return draft.q is None or head.spread(draft.q), draft.ancestors()

                return once

            def go_on(rows: int) -> Run:
                features, places = self._nothing(batch, rows)
                nodes = Nodes(ranks := list(range(rows)), ranks, ranks, [[row] for row in ranks])

                def once() -> object:
                    if grows:
                        whole = self._one_call is not None
                        after = passes(features, places) if whole else TorchPasses(features[:, :1], extend, head)
                        return paying.rehearse(after, rows)
                    if alone:
                        return passes(features, places).further(nodes, 2)
                    return children_of(head(extend(features, places)), min(2, head.width), sampling, generator)

                return once

            return begin, go_on

        name = {"method": self.name} | ({"grows": True} if grows else {}) | head.options()
        name |= {} if self.inputs == SHIFTED else {"inputs": self.inputs}
        return step_costs(target, name, batch, sampling, length, drafting, drawn=True)


def _of_step(output: FeatureOutput, verdict: Verdict) -> tuple[Tensor, list[int]]:
    """The features of the rows that a step committed, and how many those are in each batch row: none in a finished."""
    return rows_of(output.features, verdict.rows), [len(rows) for rows in verdict.rows]
