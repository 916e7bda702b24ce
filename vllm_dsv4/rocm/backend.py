"""The ring backend on ROCm: one metadata object a step for all ring layers, fit for capture.

Nothing here reads a device value on the host. A decode step's numbers, and those that a piecewise
graph reads in any step, lie at fixed addresses (``rocm_step``, ``rocm_snapshots``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingKind
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.rocm.native import NativeWindow
from vllm_dsv4.rocm.snapshots import DeviceSnapshots, SnapshotRound, most_rounds
from vllm_dsv4.rocm.step import DeviceStep
from vllm_dsv4.settings import read_settings


@dataclass
class RocmRingMetadata:
    """One step's rings.

    Attributes:
        step: index tensors; refreshed in place by the next step.
        num_tokens: tokens of the batch, graph padding included.
        num_decode_tokens: those of requests that write first and read their ring in place; they
            come first.
        num_rounds: rounds of snapshots that this step can need.
        window: the decode tokens' window rows for vLLM's kernel; None with ours.
        scratch: results that layers of one step share.
    """

    step: DeviceStep
    num_tokens: int
    num_decode_tokens: int
    snapshots: DeviceSnapshots | None
    num_rounds: int
    window: NativeWindow | None
    captures_full_graph: bool = False
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def snapshot_rounds(self) -> tuple[SnapshotRound, ...]:
        """Rounds to launch: this step's, or all while a graph for steps of any kind is captured."""
        if self.snapshots is None:
            return ()
        if torch.cuda.is_current_stream_capturing() and not self.captures_full_graph:
            return self.snapshots.rounds
        return self.snapshots.rounds[: self.num_rounds]


class RocmRingMetadataBuilder(AttentionMetadataBuilder[RocmRingMetadata]):
    """Reads the ring group's block table: restores what was hit, then describes the step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings()
        geometry = ring_geometry(self.vllm_config)
        scheduler = self.vllm_config.scheduler_config
        layers = self.vllm_config.compilation_config.static_forward_context
        # A draft model has an arena of its own, and may share this builder with its target.
        arenas = {id(layers[name].arena): layers[name].arena for name in self.layer_names}
        self.arenas: list[RingArena] = list(arenas.values())
        self.poison = settings.poison
        self.block_size: int = self.kv_cache_spec.block_size
        # Longer chunks are prefills: a decode may write all its rows before it reads any.
        self.decode_threshold = 1 + geometry.lookahead
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        max_tokens = scheduler.max_num_batched_tokens
        numbers = row.SlotNumbers(geometry.num_slots, geometry.num_snapshots)
        self.step = DeviceStep(max_tokens, scheduler.max_num_seqs, numbers, self.device)
        self.snapshots = None
        if geometry.num_snapshots:
            interval = self.kv_cache_spec.snapshot_interval
            rounds = most_rounds(max_tokens, self.block_size, interval)
            self.snapshots = DeviceSnapshots(
                self.step, self.arenas, self.block_size, max_tokens, rounds
            )
        self.window = None
        if settings.attention == "native":
            shape = geometry.shape(RingKind.SWA)
            self.window = NativeWindow(self.step, shape.rows, max_tokens)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RocmRingMetadata:
        num_decode_tokens = self._refresh(common_attn_metadata)
        rows = self._rows(common_attn_metadata)
        if self.poison:
            self._poison_lent_slots(rows)
        if self.snapshots is not None:
            self.snapshots.restore(rows)
        return self._describe(common_attn_metadata, num_decode_tokens)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> RocmRingMetadata:
        """Draft passes follow the target's step, which has restored the draft's rings as well."""
        num_decode_tokens = self._refresh(common_attn_metadata)
        return self._describe(common_attn_metadata, num_decode_tokens)

    def _rows(self, common: CommonAttentionMetadata) -> torch.Tensor:
        rows: torch.Tensor = common.block_table_tensor[: common.num_reqs]
        return rows

    def _refresh(self, common: CommonAttentionMetadata) -> int:
        """Write the step's numbers to where the kernels read them; returns its decode tokens."""
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.decode_threshold
        )
        rows = self._rows(common)
        query_start = common.query_start_loc[: common.num_reqs + 1]
        self.step.refresh(rows, query_start, common.seq_lens, num_decodes)
        if self.snapshots is not None:
            self.snapshots.refresh(rows, num_decodes)
        if self.window is not None:
            self.window.refresh(num_decode_tokens)
        return num_decode_tokens

    def _describe(
        self, common: CommonAttentionMetadata, num_decode_tokens: int
    ) -> RocmRingMetadata:
        rounds = self.snapshots.rounds_within(common.max_query_len) if self.snapshots else 0
        return RocmRingMetadata(
            step=self.step,
            num_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            snapshots=self.snapshots,
            num_rounds=rounds,
            window=self.window,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> RocmRingMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.captures_full_graph = True
        return metadata

    def _poison_lent_slots(self, rows: torch.Tensor) -> None:
        """Fill the slot of every request that takes its first step with NaN, and the null slot."""
        requests = rows.shape[0]
        first, slots = self.step.first[:requests], self.step.slots[:requests]
        begins = first == 0
        if self.snapshots is not None:
            hit = rows[:, row.HIT_BLOCKS] * self.block_size
            begins |= (rows[:, row.SOURCE] != 0) & (first == hit)
        poisoned = (slots * begins).to(torch.int64)
        for arena in self.arenas:
            for buffer in arena.buffers.values():
                buffer.index_fill_(1, poisoned, 0xFF)


class RocmRingBackend(AttentionBackend):
    """Names the builder. Attention itself runs in ``rocm.attention``."""

    @staticmethod
    def get_name() -> str:
        return "DSV4_ROCM_RING"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("ring layers are run by the DSV4 attention layer")

    @staticmethod
    def get_builder_cls() -> type[RocmRingMetadataBuilder]:
        return RocmRingMetadataBuilder
