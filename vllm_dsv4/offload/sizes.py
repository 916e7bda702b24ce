"""What a rank keeps of a page and of a snapshot, told to the scheduler before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

LEAST_UNIT = 4096


@dataclass(frozen=True)
class RankSizes(KVConnectorHandshakeMetadata):
    """Bytes of one page and of one snapshot on a rank, and how many units its host's pool has.

    Attributes:
        page_bytes: one block of all this rank's layers.
        snapshot_bytes: one snapshot of all its rings, its draft's included.
        num_units: of ``unit_bytes`` each.
        weights: how often weights were loaded so far.
    """

    page_bytes: int
    snapshot_bytes: int
    num_units: int
    weights: int = 0

    @property
    def unit_bytes(self) -> int:
        """One page: what there are most of."""
        return max(self.page_bytes, LEAST_UNIT)

    @property
    def units_per_snapshot(self) -> int:
        return -(-self.snapshot_bytes // self.unit_bytes)

    @classmethod
    def of(
        cls, page_bytes: int, snapshot_bytes: int, host_bytes: int, weights: int = 0
    ) -> RankSizes:
        """With as many units as fit into ``host_bytes``."""
        unit = cls(page_bytes, snapshot_bytes, 0).unit_bytes
        return cls(page_bytes, snapshot_bytes, host_bytes // unit, weights)
