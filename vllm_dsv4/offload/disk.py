"""The folder of files as the scheduler sees it: what is there, and what is removed first.

Only names are looked at here; whether a file is whole is found out by who reads it. Other servers
may write and remove files of the same name space at any time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from vllm_dsv4.log import get_logger
from vllm_dsv4.offload.files import TEMPORARY

logger = get_logger(__name__)

ABANDONED_SECONDS = 900
"""Age from which an unfinished file belongs to a server that was killed."""
UNSEEN_SECONDS = 10
"""How long a file that was looked for and not found is not looked for again."""


def stage_path(path: Path, stage: int) -> Path:
    """The file of one pipeline stage."""
    return path.with_name(f"{path.name}.{stage}")


class DiskFolder:
    """Files of one name space, the least recently used first.

    A piece has one file for each pipeline stage, and counts if all are there.
    """

    def __init__(self, folder: Path, max_bytes: int, stages: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.stages = stages
        self.is_writable = True
        self.used_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._unseen: dict[bytes, float] = {}
        self._scan()

    def path(self, key: bytes) -> Path:
        """Without the stage's suffix."""
        name = key.hex()
        return self.folder / name[2:4] / name

    def __contains__(self, key: bytes) -> bool:
        if key in self._sizes:
            return True
        now = time.monotonic()
        if now - self._unseen.get(key, -UNSEEN_SECONDS) < UNSEEN_SECONDS:
            return False
        size = self._size_of(key)
        if size:
            self._add(key, size)
            return True
        if len(self._unseen) > 100_000:
            self._unseen.clear()
        self._unseen[key] = now
        return False

    def written(self, key: bytes) -> None:
        """A file was written by us; the least recently used ones make room for it."""
        self.forget(key)
        self._add(key, self._size_of(key))
        while self.used_bytes > self.max_bytes and len(self._sizes) > 1:
            self.remove(next(iter(self._sizes)))

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def spend(self, key: bytes) -> None:
        """Remove this one first when room is needed."""
        if key in self._sizes:
            self._sizes.move_to_end(key, last=False)

    def forget(self, key: bytes) -> None:
        self.used_bytes -= self._sizes.pop(key, 0)

    def remove(self, key: bytes) -> None:
        self.forget(key)
        for path in self._paths(key):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning_once("A file of the prefix cache cannot be removed: %s", error)

    def clear(self) -> None:
        for key in list(self._sizes):
            self.remove(key)
        self._unseen.clear()

    def stop_writing(self, reason: str) -> None:
        if self.is_writable:
            self.is_writable = False
            logger.error(
                "Saving the prefix cache to %s is off until the next start: %s. Serving goes on.",
                self.folder,
                reason,
            )

    def _paths(self, key: bytes) -> list[Path]:
        return [stage_path(self.path(key), stage) for stage in range(self.stages)]

    def _size_of(self, key: bytes) -> int:
        """Bytes of all its files, 0 if one is missing."""
        try:
            return sum(path.stat().st_size for path in self._paths(key))
        except OSError:
            return 0

    def _add(self, key: bytes, size: int) -> None:
        self._sizes[key] = size
        self.used_bytes += size
        self._unseen.pop(key, None)

    def _scan(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        found: dict[bytes, list[tuple[float, int]]] = {}
        abandoned = time.time() - ABANDONED_SECONDS
        for path in self.folder.glob("??/*"):
            try:
                status = path.stat()
                if path.name.endswith(TEMPORARY):
                    if status.st_mtime < abandoned:
                        path.unlink(missing_ok=True)
                    continue
                key = bytes.fromhex(path.name.partition(".")[0])
            except (OSError, ValueError):
                continue
            found.setdefault(key, []).append((status.st_mtime, status.st_size))
        for key, files in sorted(found.items(), key=lambda item: max(item[1])):
            if len(files) == self.stages:
                self._add(key, sum(size for _, size in files))
