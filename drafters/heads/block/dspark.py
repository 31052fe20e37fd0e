"""Module of a DSpark head: a block's backbone, a Markov head and a confidence head (DeepSeek 2026, 2607.05147)."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.block.module import BlockBackbone
from drafters.heads.block.shape import DSparkShape, MarkovKind


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
        """What W2 reads in all slots of blocks, ``[..., K, r]``.

        Args:
            previous: ``[..., K]``, the token before each slot's. states: ``[..., K, H]``.
        """
        return self.latents(self.markov_w1(previous), states)

    def latents(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """As ``forward``, for W1's rows ``[..., K, r]`` of these tokens: each lookup of its own has a gradient as large
        as W1."""
        if self.kind == "vanilla":
            return embeddings
        memory, found = self.no_memory(states[..., 0, :]), []
        for slot in range(states.shape[-2]):
            latent, memory = self._step(embeddings[..., slot, :], states[..., slot, :], memory)
            found.append(latent)
        return torch.stack(found, dim=-2)

    def step(self, previous: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: tokens ``[...]``, states ``[..., H]``, memory ``[..., r]`` -> what W2 reads, and the new memory."""
        return self._step(self.markov_w1(previous), states, memory)

    def _step(self, embedding: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
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

    def __init__(self, target_config: PretrainedConfig, shape: DSparkShape) -> None:
        super().__init__(target_config, shape)
        outputs, rank = shape.draft_vocab_size or target_config.vocab_size, shape.markov_rank
        self.markov_head = MarkovHead(shape.markov_head, target_config.vocab_size, outputs, rank, self.hidden_size)
        self.confidence_head = ConfidenceHead(self.hidden_size + rank) if shape.confidence_head else None
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
