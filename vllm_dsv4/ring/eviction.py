"""Which snapshot is given up when another needs its place.

A conversation leaves a snapshot or two at each turn, and its next turn resumes from the latest. In
LRU order alone, the older ones of one conversation outlast the latest of another, and the pool
serves half the conversations that it could. So when a request ends, what its latest snapshot
supersedes is *spent*, and is given up before vLLM's least recently used one: the snapshot that the
request started from and those that it left on the way, unless another request has hit them too or
they were taken for others to share.

A spent snapshot stays findable until its place is needed, and a hit makes it an ordinary one again.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(eq=False)
class Snapshot:
    """A published snapshot, until its block holds another.

    Attributes:
        block: its place in the pool.
        boundary: paged blocks that it covers.
        shared: taken for several sessions; never spent.
        hits: requests that started from it.
    """

    block: KVCacheBlock
    boundary: int
    shared: bool
    hits: int = 0


class EvictionOrder:
    """What was published in a pool of snapshots, and what of it is spent, the earliest first."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._published: dict[int, Snapshot] = {}
        self._spent: dict[Snapshot, None] = {}

    def publish(self, block: KVCacheBlock, boundary: int, shared: bool) -> Snapshot:
        snapshot = Snapshot(block, boundary, shared)
        before = self._published.get(block.block_id)
        if before is not None:
            self._spent.pop(before, None)
        self._published[block.block_id] = snapshot
        return snapshot

    def hit(self, block: KVCacheBlock) -> Snapshot:
        snapshot = self._published[block.block_id]
        snapshot.hits += 1
        self._spent.pop(snapshot, None)
        return snapshot

    def supersede(self, source: Snapshot | None, left: list[Snapshot]) -> list[Snapshot]:
        """A request ended that started from ``source`` and published ``left``: what is spent."""
        if not left:
            return []
        spent = []
        latest = max(snapshot.boundary for snapshot in left)
        mine = [(snapshot, 0) for snapshot in left]
        for snapshot, own_hits in [*mine, (source, 1)] if source else mine:
            if (
                snapshot.boundary < latest
                and snapshot.hits <= own_hits
                and not snapshot.shared
                and self._is_at_rest(snapshot)
            ):
                self._spent[snapshot] = None
                spent.append(snapshot)
        return spent

    def take_spent(self) -> KVCacheBlock | None:
        """Give up the snapshot that was spent first; return its block, held once, or None."""
        while self._spent:
            snapshot = next(iter(self._spent))
            del self._spent[snapshot]
            if self._is_at_rest(snapshot):
                self.pool.evict_blocks({snapshot.block.block_id})
                self.pool.touch([snapshot.block])
                return snapshot.block
        return None

    def _is_at_rest(self, snapshot: Snapshot) -> bool:
        """Findable and not pinned; neither evicted since, nor lost to a reset of the cache."""
        block = snapshot.block
        return (
            self._published.get(block.block_id) is snapshot
            and block.block_hash is not None
            and block.ref_cnt == 0
        )
