"""``Dsv4RingConnector``, as vLLM calls it: one object in the scheduler, one in each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_dsv4.offload.config import CONNECTOR, check_host_memory, read_config
from vllm_dsv4.offload.device import DeviceBytes
from vllm_dsv4.offload.jobs import Orders, Report
from vllm_dsv4.offload.scheduler import TierScheduler
from vllm_dsv4.offload.sizes import RankSizes
from vllm_dsv4.offload.stats import TierMetrics, TierStats
from vllm_dsv4.offload.worker import TierWorker
from vllm_dsv4.ring.layer import RingCache

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_dsv4.ring.arena import RingArena


class Dsv4RingConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefix cache in host memory and on disk, for rings.

    vLLM requires the third parameter's name.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self.config = read_config(transfer.kv_connector_extra_config)
        self.scheduler: TierScheduler | None = None
        self.worker: TierWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = TierScheduler(vllm_config, self.config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that was dropped is a later miss, nothing else."""
        return False

    # The scheduler's side

    @property
    def _tiers(self) -> TierScheduler:
        assert self.scheduler is not None
        return self.scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._tiers.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        sizes = {rank: size for rank, size in metadata.items() if isinstance(size, RankSizes)}
        assert len(sizes) == len(metadata)
        self._tiers.learn_sizes(sizes)

    def on_new_request(self, request: Request) -> None:
        self._tiers.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._tiers.find(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._tiers.load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._tiers.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, Report)
        self._tiers.learn(
            report,
            connector_output.finished_recving or set(),
            connector_output.failed_recving or set(),
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tiers.request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self._tiers.has_work()

    def reset_cache(self) -> bool:
        self._tiers.reset()
        return True

    # A worker's side

    @property
    def _copies(self) -> TierWorker:
        assert self.worker is not None
        return self.worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        layers = self._vllm_config.compilation_config.static_forward_context
        rings = [layer for layer in layers.values() if isinstance(layer, RingCache)]
        if not rings:
            raise RuntimeError(
                f"{CONNECTOR} is of use only for DeepSeek-V4 on rings, and this model has none: "
                "remove --kv-transfer-config, or VLLM_DSV4_RING=0"
            )
        self.arenas: list[RingArena] = list({id(r.arena): r.arena for r in rings}.values())
        names = {name for name in kv_caches if not isinstance(layers[name], RingCache)}
        device = DeviceBytes((kv_caches[name] for name in sorted(names)), self.arenas)
        world = self._vllm_config.parallel_config.world_size
        sizes = RankSizes.of(
            device.page_bytes,
            device.snapshot_bytes,
            self.config.host_bytes // world,
            self._weights(),
        )
        check_host_memory(sizes, world, psutil.virtual_memory().available)
        self.worker = TierWorker(
            device,
            sizes,
            rings[0].ring.device,
            self.config.staging_bytes,
            get_pp_group().rank_in_group,
            writes_files=get_tp_group().rank_in_group == 0,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return self._copies.sizes

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls it before anything of the step is enqueued: what is saved is read here."""
        assert isinstance(kv_connector_metadata, Orders)
        self._copies.save(kv_connector_metadata.saves)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """No step needs what is loaded here, so vLLM calls it behind the step."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self._copies.load(orders)
        self._copies.write(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Saves are of whole blocks, not of layers."""

    def wait_for_save(self) -> None:
        """No step waits for a save."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._copies.loaded()[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        ended, failed = self._copies.loaded()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> Report | None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return self._copies.report(self._weights() if orders.tell_weights else None)

    def _weights(self) -> int:
        return sum(arena.weights_loaded for arena in self.arenas)

    # Both

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        taken = self.scheduler.stats() if self.scheduler is not None else None
        return TierStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierMetrics:
        return TierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
