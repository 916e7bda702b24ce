"""An engine with the tiers behind its card, and what a test does to them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.engine import Answer, Engine
from vllm_dsv4.offload import files
from vllm_dsv4.offload.scheduler import TierScheduler, entries_in_use
from vllm_dsv4.offload.worker import TierWorker


def transfer_config(host_gib: float, disk: Path | None = None, disk_gib: float = 1) -> Any:
    """``kv_transfer_config`` of an ``LLM``."""
    extra: dict[str, Any] = {"host_gib": host_gib}
    if disk is not None:
        extra |= {"disk": str(disk), "disk_gib": disk_gib}
    return {
        "kv_connector": "Dsv4RingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Tiers:
    """The tiers of a running engine."""

    def __init__(self, running: Engine) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.engine = running
        self.scheduler: TierScheduler = running.scheduler.connector.scheduler
        self.connector = get_kv_transfer_group()
        self.worker: TierWorker = self.connector.worker

    def settle(self) -> None:
        """Have saves and files finished, as a serving engine does by itself."""
        deadline = time.monotonic() + 60
        while self.engine.scheduler.has_requests():
            assert time.monotonic() < deadline, "the tiers do not come to rest"
            self.engine.core.step_fn()
        assert not self.scheduler._jobs

    def forget_the_card(self) -> None:
        """Reset the prefix cache, and overwrite every page and every row of every ring."""
        self.settle()
        assert self.engine.llm.reset_prefix_cache()
        for pages in self.worker.device._pages:
            pages.fill_(0xFF)
        for arena in self.connector.arenas:
            for buffer in arena.buffers.values():
                buffer.fill_(0xFF)

    def forget_the_host(self) -> None:
        self.settle()
        self.scheduler.host.clear()
        self.worker.pool.fill_(0xFF)

    def forget_everything(self) -> None:
        """Every tier too, as ``reset_prefix_cache(reset_connector=True)``."""
        self.forget_the_card()
        self.scheduler.reset()

    def again(self, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[Answer]:
        """Ask once more, each alone, with nothing left on the card."""
        answers = []
        for prompt in prompts:
            self.forget_the_card()
            answers += self.engine.generate([prompt], **kwargs)
        return answers

    def check(self) -> None:
        """Every slot, snapshot and unit is where it belongs, and nothing is in use."""
        self.settle()
        self.engine.ring_manager.check_integrity()
        assert self.engine.ring_manager.slots.counts().held == 0
        assert self.engine.ring_manager.snapshots.num_pinned() == 0
        self.scheduler.host.check_integrity()
        assert not list(entries_in_use(self.scheduler))

    def file_of(self, key: bytes) -> Path:
        assert self.scheduler.disk is not None
        path = self.scheduler.disk.path(key)
        return path.with_name(f"{path.name}.0")

    @contextmanager
    def slow_loads(self) -> Iterator[None]:
        """No load arrives as long as this lasts."""
        with patch.object(self.worker, "loaded", lambda: (set(), set())):
            yield

    @contextmanager
    def failing_reads(self, after: int) -> Iterator[list[Path]]:
        """The disk fails after so many files."""
        seen: list[Path] = []
        read = files.read

        def fail(path: Path, *args: Any) -> None:
            seen.append(path)
            if len(seen) > after:
                raise OSError(5, "Input/output error")
            read(path, *args)

        with patch.object(files, "read", fail):
            yield seen
