"""DSpark: DFlash's block, with a small sequential head over it and a head for confidence (DeepSeek 2026, 2607.05147).

The *Markov head* adds ``W2 W1[x_{k-1}]`` to the logits of slot k, so that a token depends on the one before it: drafts
are drawn left to right, with the exact q, and the backbone still runs once. The *confidence head* estimates whether the
token of a slot will be accepted, from the slot's state and the token before it; ``truncate`` reads it.
"""

from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import Width, validate
from drafters.drafting.block_tree import Slots, top_logit
from drafters.hub.declared import READERS, Layout, Recipe
from drafters.loop.state import DecodeState
from drafters.methods.dflash import BlockOptions, DFlashDrafter
from drafters.model.block_backbone import BlockBackbone
from drafters.model.draft_head import quantize_layers
from drafters.model.runner import Part, model_time

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """Scores of a token given the one before it, of rank r; the rnn has a memory of the block's earlier tokens too.

    With e = W1[x_{k-1}] and the state h_k of slot k, W2 reads:

    - vanilla: e;
    - gated: sigmoid(gate_proj([h_k; e])) * e;
    - rnn: tanh(o), where [g; c; o] = joint_proj([m_{k-1}; e; h_k]). Its memory is m_k = s m_{k-1} + (1 - s) tanh(c)
      with s = sigmoid(g), and zero before the block.

    Args:
        kind: as above. vocab_size: of the target. outputs: tokens that are scored. rank: r. hidden_size: of a state.
    """

    def __init__(self, kind: MarkovKind, vocab_size: int, outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, previous: Tensor, states: Tensor) -> Tensor:
        """What W2 reads in all slots of blocks, ``[..., K, r]``: training applies ``markov_w2`` to parts of it.

        Args:
            previous: ``[..., K]``, the token before each slot's. states: ``[..., K, H]``.
        """
        memory, found = self.no_memory(states[..., 0, :]), []
        for slot in range(states.shape[-2]):
            latent, memory = self.step(previous[..., slot], states[..., slot, :], memory)
            found.append(latent)
        return torch.stack(found, dim=-2)

    def step(self, previous: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: tokens ``[...]``, states ``[..., H]``, memory ``[..., r]`` -> what W2 reads, and the new memory."""
        embedding = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedding, memory
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([states, embedding], dim=-1))) * embedding, memory
        joint = self.joint_proj(torch.cat([memory, embedding, states], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return out.tanh(), kept * memory + (1 - kept) * candidate.tanh()

    def no_memory(self, states: Tensor) -> Tensor:
        """The memory before a block, ``[..., r]`` for states ``[..., H]``."""
        return states.new_zeros(*states.shape[:-1], self.rank)


class ConfidenceHead(nn.Module):
    """``Linear([h_k; W1[x_{k-1}]])``: the logit of the chance that slot k's token is accepted."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """``[..., H]`` and ``[..., r]`` -> ``[...]``, float32."""
        return self.proj(torch.cat([states, embeddings], dim=-1))[..., 0].float()


class DSparkHead(BlockBackbone):
    """DFlash's backbone with a Markov head and, with ``confidence_head``, a confidence head; raises as the backbone.

    Training runs ``forward`` for the slots' states, ``markov_head`` over them and the true previous tokens, and
    ``confidence``.
    """

    def __init__(self, target_config: PretrainedConfig, options: "DSparkOptions") -> None:
        given = options.taps, options.layer, options.layers, options.draft_vocab_size, options.shape
        super().__init__(target_config, *given)
        outputs, rank = options.draft_vocab_size or target_config.vocab_size, options.markov_rank
        self.markov_head = MarkovHead(options.markov_head, target_config.vocab_size, outputs, rank, self.hidden_size)
        self.confidence_head = ConfidenceHead(self.hidden_size + rank) if options.confidence_head else None
        for name, weights in self.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                if weights.dim() == 2:
                    nn.init.normal_(weights, std=self.config.initializer_range)
                else:
                    nn.init.zeros_(weights)

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits of acceptance ``[..., K]`` of slots with states ``[..., K, H]`` behind the tokens ``[..., K]``."""
        assert self.confidence_head is not None
        return self.confidence_head(states, self.markov_head.markov_w1(previous))


class DSparkOptions(BlockOptions):
    """Options of a block drafter, and of DSpark's two heads.

    ``markov_head``, ``markov_rank``: kind and rank of the Markov head. ``confidence_head``: it has one; false: with
    ``truncate``, acceptance is estimated online from max q.
    """

    markov_head: MarkovKind = "vanilla"
    markov_rank: Width = Field(default=256, ge=1)
    confidence_head: bool = True


class MarkovSlots:
    """Slots whose scores depend on the tokens before them: DSpark's Markov head over a block of D slots.

    Call ``logits(0)``, then for each further slot ``follow`` with chosen tokens of the latest ``logits`` and the next
    ``logits``; ``certainty`` at the end, of a chain. W is the number of tokens that the drafter drafts with, n the
    number of nodes that are extended: 1, the root, before the first ``follow``.

    Args:
        logits: ``[B, D, W]`` of the backbone, before the correction. states: ``[B, D, H]`` of the slots.
        anchors: ``[B, 1]``, the last committed tokens.
    """

    shared = False

    def __init__(self, drafter: "DSparkDrafter", logits: Tensor, states: Tensor, anchors: Tensor) -> None:
        self._drafter, self._logits, self._states = drafter, logits, states
        self._head: DSparkHead = cast(Any, drafter.module)
        self._tokens, self._memory = anchors, self._head.markov_head.no_memory(states[:, :1])
        self._previous: list[Tensor] = []  # by slot, the tokens before it
        self._corrected: list[Tensor] = []

    def logits(self, depth: int) -> Tensor:
        """Scores ``[B, n, W]`` of the children of n nodes: of slot ``depth``, corrected by each node's token."""
        states = self._states[:, depth : depth + 1].expand(-1, self._tokens.shape[1], -1)
        with model_time():
            latent, self._memory = self._head.markov_head.step(self._tokens, states, self._memory)
            corrected = self._logits[:, depth : depth + 1] + self._drafter.markov_w2(latent)
        self._previous.append(self._tokens)
        self._corrected.append(corrected)
        return corrected

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        """Go on from chosen nodes: ``tokens [B, n]``, places among the W, whose parents are the rows ``parents``
        (``[B, n]`` or ``[n]``) of the latest ``logits``; the nodes take over the parents' memory of the rnn."""
        self._tokens = self._drafter.lm_head.tokens(tokens)
        rows = parents.expand_as(tokens)[..., None]
        self._memory = self._memory.gather(1, rows.expand(-1, -1, self._memory.shape[-1]))

    def certainty(self) -> Tensor:
        """Estimated acceptance ``[B, D]`` of a chain's slots so far, as logits: of the confidence head, or of max q."""
        if self._head.confidence_head is None:
            return top_logit(torch.cat(self._corrected, dim=1))
        previous = torch.cat(self._previous, dim=1)
        return self._head.confidence(self._states[:, : previous.shape[1]], previous)


class DSparkDrafter(DFlashDrafter):
    """Drafts as DFlash does, each token given the one before it."""

    name = "dspark"
    options = DSparkOptions
    card_title = "DSpark head ([DSpark](https://arxiv.org/abs/2607.05147))"
    layout = Layout("a DSpark head", readers=tuple(name for name in READERS if name != "official"))
    recipe = Recipe(
        learning_rate=6.0e-4,
        rows={"DSpark, auto": {"tree": "auto"}, "DSpark, chain of 3": {"tree": "chain", "depth": 3}},
        small={"layers": 1, "anchor_share": 0.25, "optimizer": "muon"},
        short={"draft_vocab": 4096, "classification_loss": "cross_entropy", "target_weight": 1.0, "token_weight": 0.0},
        certified={"tree": "chain", "depth": 3},
    )

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        given = validate(DSparkOptions, drafter_config, source=f"options of drafter {cls.name!r}")
        return DSparkHead(target_config, given)

    def slots(self, states: Tensor, state: DecodeState) -> Slots:
        return MarkovSlots(self, self.lm_head(states), states, state.roots)

    def _has_confidence(self) -> bool:
        return self.given.confidence_head

    def _parts(self) -> tuple[Part, Part]:
        parts = super()._parts()
        self.markov_w2 = self.target.runner.linear(cast(Any, self.module).markov_head.markov_w2)
        if self.given.draft_dtype is not None:
            quantize_layers(None, self.given.draft_dtype, self.markov_w2)
        return parts
