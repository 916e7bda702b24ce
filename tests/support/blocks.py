"""vLLM's real KV cache manager over a paged group and a ring group, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request, RequestStatus

from vllm_dsv4.ring.manager import RingManager
from vllm_dsv4.ring.spec import RingSpec, make_ring_spec

BLOCK = 256
init_none_hash(sha256)


def kv_cache_config(
    num_blocks: int,
    slots: int,
    snapshots: int = 0,
    interval: int = 0,
    block_size: int = BLOCK,
    draft_model: bool = False,
) -> KVCacheConfig:
    """One paged group, one ring group, which holds a draft model's windows too."""
    paged = MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        tokens_per_state=4,
        cache_dtype_str="fp8_ds_mla",
        model_version="deepseek_v4",
    )
    ring = make_ring_spec(
        block_size,
        slots,
        bytes_per_slot=1,
        num_snapshots=snapshots,
        bytes_per_snapshot=1,
        snapshot_interval=interval,
        blocks_ahead=int(draft_model),
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(["layer.0"], paged),
            KVCacheGroupSpec(["layer.0.swa_cache"], ring, is_eagle_group=draft_model),
        ],
    )


@contextmanager
def registered(manager_cls: type[RingManager]) -> Iterator[None]:
    """Plan ring groups with this manager class."""
    from vllm.v1 import kv_cache_spec_registry as registry

    KVCacheSpecRegistry._ensure_registered()
    before = registry._REGISTRY_KVCACHESPEC_LIST.pop(RingSpec, None)
    KVCacheSpecRegistry.register(RingSpec, manager_cls, uniform_type_base_spec=RingSpec)
    try:
        yield
    finally:
        registry._REGISTRY_KVCACHESPEC_LIST.pop(RingSpec, None)
        if before is not None:
            registry._REGISTRY_KVCACHESPEC_LIST[RingSpec] = before


class Blocks:
    """A KV cache manager with both groups, and its parts in reach."""

    def __init__(
        self,
        num_blocks: int = 50,
        slots: int = 4,
        snapshots: int = 0,
        interval: int = 0,
        manager_cls: type[RingManager] = RingManager,
        block_size: int = BLOCK,
        draft_model: bool = False,
    ) -> None:
        with registered(manager_cls):
            self.manager = KVCacheManager(
                kv_cache_config(num_blocks, slots, snapshots, interval, block_size, draft_model),
                max_model_len=8192,
                scheduler_block_size=block_size,
                hash_block_size=block_size,
                enable_caching=snapshots > 0,
                use_eagle=draft_model,
            )
        self.paged, self.rings = self.manager.coordinator.single_type_managers
        self.pool = self.manager.block_pool

    @property
    def free_pages(self) -> int:
        return self.pool.get_num_free_blocks()

    def admit(self, request: Request, tokens: int | None = None) -> Any:
        """Look the request up and allocate its first chunk, as the scheduler does.

        Returns what ``allocate_slots`` returned: None if the request has to wait.
        """
        computed, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        new = min(tokens or request.num_tokens, request.num_tokens - hit)
        result = self.manager.allocate_slots(
            request, new, num_new_computed_tokens=hit, new_computed_blocks=computed
        )
        if result is not None:
            request.num_computed_tokens = hit + new
        return result

    def advance(self, request: Request, tokens: int, drafts: int = 0) -> Any:
        """Schedule ``tokens`` more, of which the last ``drafts`` are not known to be right."""
        result = self.manager.allocate_slots(request, tokens)
        if result is not None:
            request.num_computed_tokens += tokens - drafts
        return result

    def row(self, request: Request) -> list[int]:
        """The ring group's block-table row."""
        return [block.block_id for block in self.rings.req_to_blocks.get(request.request_id, [])]


@lru_cache
def block_hasher(block_size: int) -> Any:
    return get_request_block_hasher(block_size, sha256)


def make_request(
    name: str, prompt: int | Sequence[int], max_tokens: int = 100, block_size: int = BLOCK
) -> Request:
    """A request with a prompt of that many tokens (the same for the same count), or these."""
    tokens = list(prompt) if not isinstance(prompt, int) else list(range(1, prompt + 1))
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=block_hasher(block_size),
    )


def serve(blocks: Blocks, request: Request) -> int:
    """Prefill the request, end it, begin the next step; return the tokens that were cached."""
    hit = int(blocks.manager.get_computed_blocks(request)[1])
    assert blocks.admit(request) is not None
    request.status = RequestStatus.FINISHED_STOPPED
    blocks.manager.free(request)
    blocks.manager.new_step_starts()
    blocks.rings.check_integrity()
    return hit
