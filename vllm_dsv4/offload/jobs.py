"""What the scheduler's side tells the workers each step, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class Kind(Enum):
    """What an entry holds."""

    PAGE = "page"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Piece:
    """A page or a snapshot, on the device and in the host's pool.

    Attributes:
        key: names its content: the kind, and the hash of the block where its tokens end.
        index: block id of a page, slot of a snapshot.
        units: places in the host's pool, in order.
    """

    kind: Kind
    key: bytes
    index: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Save:
    """Copy one piece from the device to the host. ``number`` is what the workers report."""

    number: int
    piece: Piece


@dataclass(frozen=True)
class Read:
    """A piece whose units must be filled from a file first (``path`` lacks the stage's suffix)."""

    key: bytes
    path: Path


@dataclass(frozen=True)
class Load:
    """Copy pieces from the host to the device for a request that waits for them.

    Attributes:
        reads: those that are not in the host's pool yet.
        is_lost: the plan could not be kept; report it as failed.
    """

    request_id: str
    pieces: tuple[Piece, ...]
    reads: tuple[Read, ...] = ()
    is_lost: bool = False


@dataclass(frozen=True)
class Write:
    """Copy one piece from the host to a file."""

    number: int
    kind: Kind
    key: bytes
    units: tuple[int, ...]
    path: Path


@dataclass
class Orders(KVConnectorMetadata):
    """Of one step.

    Attributes:
        name_space: digest that files must carry.
        tell_weights: report how often weights were loaded.
    """

    name_space: bytes = b""
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    tell_weights: bool = False


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Of one step and one or more ranks.

    Attributes:
        done: ranks that finished a save or a write, by its number.
        bad: keys whose files were not what they should be.
        disk_errors: why writing failed.
        load_seconds: of each load that ended: request, seconds.
        weights: how often weights were loaded, the most of any rank; None if nobody asked.
    """

    done: dict[int, int] = field(default_factory=dict)
    bad: set[bytes] = field(default_factory=set)
    disk_errors: list[str] = field(default_factory=list)
    load_seconds: dict[str, float] = field(default_factory=dict)
    weights: int | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        for number, ranks in other.done.items():
            self.done[number] = self.done.get(number, 0) + ranks
        self.bad |= other.bad
        self.disk_errors += other.disk_errors
        for request_id, seconds in other.load_seconds.items():
            self.load_seconds[request_id] = max(seconds, self.load_seconds.get(request_id, 0.0))
        if other.weights is not None:
            self.weights = max(other.weights, self.weights or 0)
        return self
