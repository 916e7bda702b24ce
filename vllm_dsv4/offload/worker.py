"""A rank's side: the host's pool, and the copies between it, the card and the files.

Saves leave the card through staging memory. The first copy, on the device, is enqueued before the
step that its order came with, so whatever that step overwrites was read; the second runs beside
the step. Loads are enqueued on the second stream behind what was enqueued when they were ordered:
no step that is still under way can write what they wrote.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vllm_dsv4.log import get_logger
from vllm_dsv4.offload import files
from vllm_dsv4.offload.disk import stage_path
from vllm_dsv4.offload.jobs import Kind, Load, Orders, Piece, Report, Save, Write
from vllm_dsv4.offload.sizes import RankSizes
from vllm_dsv4.offload.streams import Moment, Streams

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_dsv4.offload.device import DeviceBytes

logger = get_logger(__name__)

DISK_THREADS = 2


@dataclass
class _Loading:
    """A load under way: first its files, then the copy to the card."""

    load: Load
    started: float
    files: dict[bytes, Future[str]] = field(default_factory=dict)
    arrival: Moment | None = None
    has_failed: bool = False


class TierWorker:
    """Carries out the orders of each step.

    Args:
        device: what the pieces are made of.
        sizes: of this rank.
        staging_bytes: device memory for saves; at least one snapshot fits in any case.
        stage: pipeline stage.
        writes_files: whether this rank, of those that hold the same bytes, writes them.
    """

    def __init__(
        self,
        device: DeviceBytes,
        sizes: RankSizes,
        where: torch.device,
        staging_bytes: int,
        stage: int,
        writes_files: bool,
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.stage = stage
        self.writes_files = writes_files
        self.streams = Streams(where)
        shape = (sizes.num_units, sizes.unit_bytes)
        self.pool: Tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=self.streams.is_card)
        rows = max(staging_bytes // sizes.unit_bytes, sizes.units_per_snapshot)
        staging = torch.empty((2, rows * sizes.unit_bytes), dtype=torch.uint8, device=where)
        self._halves = [(half, Moment.past()) for half in staging]
        self._for_loads = torch.empty(sizes.snapshot_bytes, dtype=torch.uint8, device=where)
        self._saving: deque[tuple[Moment, list[int]]] = deque()
        self._loading: list[_Loading] = []
        self._writing: list[tuple[Write, Future[None]]] = []
        self._report = Report()
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="dsv4-tiers")

    def save(self, saves: Sequence[Save]) -> None:
        """Before anything of this step is enqueued."""
        waiting = deque(saves)
        while waiting:
            half, is_free = self._halves.pop(0)
            self.streams.wait(is_free)
            taken: list[tuple[Save, Tensor]] = []
            start = 0
            while waiting:
                piece = waiting[0].piece
                end = start + self.device.nbytes(piece.kind)
                if end > half.numel():
                    break
                self.device.read(piece.kind, piece.index, half[start:end])
                taken.append((waiting.popleft(), half[start:end]))
                start = end
            with self.streams.beside():
                for save, content in taken:
                    for unit, part in zip(save.piece.units, self._parts(content), strict=False):
                        self.pool[unit, : part.numel()].copy_(part, non_blocking=True)
                done = self.streams.mark()
            self._halves.append((half, done))
            self._saving.append((done, [save.number for save, _ in taken]))

    def load(self, orders: Orders) -> None:
        """After this step is enqueued."""
        for load in orders.loads:
            loading = _Loading(load, time.monotonic(), has_failed=load.is_lost)
            units = {piece.key: piece for piece in load.pieces}
            if not load.is_lost:
                for read in load.reads:
                    path = stage_path(read.path, self.stage)
                    payload = self._payload(units[read.key])
                    loading.files[read.key] = self._threads.submit(
                        _read, path, read.key, orders.name_space, payload
                    )
            self._loading.append(loading)

    def write(self, orders: Orders) -> None:
        if not self.writes_files:
            return
        for write in orders.writes:
            path = stage_path(write.path, self.stage)
            payload = self._payload(write)
            work = self._threads.submit(files.write, path, write.key, orders.name_space, payload)
            self._writing.append((write, work))

    def loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them that failed."""
        ended, failed = set(), set()
        for loading in list(self._loading):
            self._advance(loading)
            if loading.has_failed or (loading.arrival is not None and loading.arrival.is_past()):
                self._loading.remove(loading)
                request_id = loading.load.request_id
                ended.add(request_id)
                if loading.has_failed:
                    failed.add(request_id)
                self._report.load_seconds[request_id] = time.monotonic() - loading.started
        return ended, failed

    def report(self, weights: int | None) -> Report | None:
        """What ended since the last call; None if nothing did."""
        while self._saving and self._saving[0][0].is_past():
            for number in self._saving.popleft()[1]:
                self._report.done[number] = 1
        for write, work in [item for item in self._writing if item[1].done()]:
            self._writing.remove((write, work))
            self._report.done[write.number] = 1
            error = work.exception()
            if error is not None:
                self._report.disk_errors.append(str(error))
        report, self._report = self._report, Report()
        report.weights = weights
        return report if report != Report() else None

    def shutdown(self) -> None:
        """Files that are being written are finished; those that wait for a thread are not begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.streams.finish()

    def _advance(self, loading: _Loading) -> None:
        """Copy to the card when all files are in the host's pool."""
        if loading.arrival is not None or loading.has_failed:
            return
        if not all(work.done() for work in loading.files.values()):
            return
        for key, work in loading.files.items():
            reason = work.result()
            if reason:
                loading.has_failed = True
                logger.warning_once("A file of the prefix cache is not used: %s", reason)
                self._report.bad.add(key)
        if loading.has_failed:
            return
        with self.streams.beside():
            for piece in loading.load.pieces:
                self._to_card(piece)
            loading.arrival = self.streams.mark()

    def _to_card(self, piece: Piece) -> None:
        content = self._for_loads[: self.device.nbytes(piece.kind)]
        for unit, part in zip(piece.units, self._parts(content), strict=False):
            part.copy_(self.pool[unit, : part.numel()], non_blocking=True)
        self.device.write(piece.kind, piece.index, content)

    def _parts(self, content: Tensor) -> Sequence[Tensor]:
        """Cut into what fits in a unit."""
        return content.split(self.sizes.unit_bytes)

    def _payload(self, piece: Piece | Write) -> list[memoryview]:
        """The piece's bytes in the host's pool."""
        left, payload = self.device.nbytes(piece.kind), []
        for unit in piece.units:
            nbytes = min(left, self.sizes.unit_bytes)
            if nbytes:
                payload.append(memoryview(self.pool[unit, :nbytes].numpy()))
            left -= nbytes
        return payload


def _read(path: files.Path, key: bytes, name_space: bytes, payload: files.Buffers) -> str:
    """Fill the payload; return why it could not be, or nothing. A bad file is removed."""
    try:
        files.read(path, key, name_space, payload)
    except files.BadFileError as error:
        path.unlink(missing_ok=True)
        return str(error)
    except OSError as error:
        return str(error)
    return ""


__all__ = ["Kind", "TierWorker"]
