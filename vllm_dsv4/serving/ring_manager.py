"""The ring manager as it serves: its counts reach the log and ``/metrics``."""

from __future__ import annotations

from vllm_dsv4.ring.manager import CountsTaker, RingManager
from vllm_dsv4.ring.spec import RingSpec
from vllm_dsv4.serving.metrics import RingMetrics


class CountedRingManager(RingManager):
    """A ``RingManager`` that says how many slots are lent and what the snapshots do."""

    def counts_taker(self, kv_cache_spec: RingSpec) -> CountsTaker:
        return RingMetrics(kv_cache_spec.bytes_per_snapshot)


def register_ring_spec() -> None:
    """Have vLLM manage every ``RingSpec`` with our manager. vLLM's own specs come first."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry.register(RingSpec, CountedRingManager, uniform_type_base_spec=RingSpec)
