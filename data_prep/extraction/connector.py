"""Connector of vLLM that moves hidden states from its KV cache (``extract_hidden_states``) into a feature store.

vLLM loads it by ``kv_connector_module_path`` and makes one for its scheduler, which knows the ended requests and their
cache blocks, and one for each worker. The first worker of the last layers reads the blocks.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from data_prep.extraction.shards import Ended, Shards
from drafters.model.ends import load_norm


@dataclass
class EndedRequests(KVConnectorMetadata):
    """Message from the scheduler to the workers."""

    requests: list[Ended] = field(default_factory=list)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands the hidden states of ended requests to ``Shards``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        state_groups = [number for number, spec in enumerate(groups) if isinstance(spec, HiddenStateCacheSpec)]
        if len(state_groups) != 1 and len(groups) != 1:
            raise ValueError(f"no single cache group of hidden states among the {len(groups)} groups of this target")
        # Targets whose layers are all alike have one group for everything.
        self._group = state_groups[0] if state_groups else 0
        self._ended: list[Ended] = []  # the scheduler's
        self._shards: Shards | None = None  # the worker's

    def get_finished_count(self) -> int:
        """Number of workers that must report a request's blocks as free."""
        return 1

    # In the scheduler.
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing to load."""
        return 0, False

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Keep the blocks of an ended request until they are read."""
        place = request.kv_transfer_params
        if not place or not block_ids or not block_ids[self._group]:  # vLLM's own request, or an aborted one
            return False, None
        self._ended.append(
            Ended(request.request_id, **place, tokens=request.num_prompt_tokens, blocks=list(block_ids[self._group]))
        )
        return True, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """The same for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> EndedRequests:
        """The message of this step."""
        message, self._ended = EndedRequests(self._ended), []
        return message

    # In a worker.
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of states ``[blocks, states, tokens of a block, H]``; other workers write nothing."""
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if layers and get_tensor_model_parallel_rank() == 0:
            model = self._vllm_config.model_config
            (cache,) = (kv_caches[name] for name in layers)
            norm = load_norm(model.model, model.dtype, cache.device, model.revision)
            self._shards = Shards(cache, norm)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Read the ended requests; on a GPU, the next step runs after the copies, in stream order."""
        message = self._get_connector_metadata() if self.has_connector_metadata() else EndedRequests()
        if self._shards is None or not message.requests:
            return None, None
        for ended in message.requests:
            self._shards.take(ended)
        return {ended.request for ended in message.requests}, None

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing to load; nothing to save per layer, because a request is read as a whole."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """A token's states are contiguous, as in vLLM's own connector for these states."""
        return "LBNHC"
