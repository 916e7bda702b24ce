"""Stands for vLLM's sleep-mode allocator: pools of tensors that can be emptied and filled again.

What a card would have lost is overwritten, so that whoever reads it is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOST = 0xFF
"""NaN in every floating type, -1 in every integer."""


@dataclass
class _Allocation:
    """Memory of one storage, ``[start, start + size)`` bytes of it."""

    storage: StorageWeakRef
    tag: str
    start: int
    size: int
    backup: torch.Tensor | None = None
    asleep: bool = False

    def bytes(self) -> torch.Tensor | None:
        """The memory as uint8, or None if nobody holds it any more."""
        if self.storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        return whole[self.start : self.start + self.size]


class Pools:
    """``CuMemAllocator`` as vLLM and ``rocm.sleep`` use it. One stands for the whole process.

    Attributes:
        offloaded: bytes that the latest sleep copied to the host, by tag.
    """

    default_tag = "default"

    def __init__(self) -> None:
        self.current_tag = self.default_tag
        self.allocations: dict[tuple[int, int], _Allocation] = {}
        self.offloaded: dict[str, int] = {}

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        before, self.current_tag = self.current_tag, tag or self.default_tag
        try:
            if before == self.default_tag:
                with _Watch(self):
                    yield
            else:
                yield
        finally:
            self.current_tag = before

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Allocate in no pool, though within one."""
        before, self.current_tag = self.current_tag, self.default_tag
        try:
            yield
        finally:
            self.current_tag = before

    def adopt(self, tensor: torch.Tensor) -> None:
        """Take a contiguous tensor's memory, and no more of its storage, into the current pool."""
        storage = tensor.untyped_storage()
        start = tensor.storage_offset() * tensor.element_size()
        self._note(storage, start, tensor.numel() * tensor.element_size())

    def _note(self, storage: torch.UntypedStorage, start: int, size: int) -> None:
        if self.current_tag != self.default_tag and size:
            allocation = _Allocation(StorageWeakRef(storage), self.current_tag, start, size)
            self.allocations[storage.data_ptr(), start] = allocation

    def tag_of(self, tensor: torch.Tensor) -> str | None:
        """The pool that a tensor's first byte lies in."""
        place = tensor.untyped_storage().data_ptr()
        start = tensor.storage_offset() * tensor.element_size()
        for allocation in self.allocations.values():
            held = allocation.bytes()
            if held is None or held.untyped_storage().data_ptr() != place:
                continue
            if allocation.start <= start < allocation.start + allocation.size:
                return allocation.tag
        return None

    def release_pools(self) -> None:
        """Nothing to release."""

    def get_current_usage(self) -> int:
        return sum(a.size for a in self.allocations.values() if a.bytes() is not None)

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        tags = (offload_tags,) if isinstance(offload_tags, str) else offload_tags or ()
        self.offloaded = {}
        for allocation in self.allocations.values():
            held = allocation.bytes()
            if held is None or allocation.asleep:
                continue
            if allocation.tag in tags:
                allocation.backup = held.clone()
                copied = self.offloaded.get(allocation.tag, 0) + allocation.size
                self.offloaded[allocation.tag] = copied
            held.fill_(LOST)
            allocation.asleep = True

    def discard(self, tags: tuple[str, ...] | str) -> None:
        for allocation in self.allocations.values():
            held = allocation.bytes()
            if held is not None and allocation.tag in tags and not allocation.asleep:
                held.fill_(LOST)
                allocation.asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        from vllm.device_allocator import DEFERRABLE_TAGS

        for allocation in self.allocations.values():
            waits = tags is not None and allocation.tag not in tags
            held = allocation.bytes()
            if held is None or (waits and allocation.tag in DEFERRABLE_TAGS):
                continue
            if allocation.backup is not None:
                held.copy_(allocation.backup)
            allocation.backup, allocation.asleep = None, False


class _Watch(TorchDispatchMode):
    """Notes every storage that an operator makes."""

    def __init__(self, pools: Pools) -> None:
        super().__init__()
        self.pools = pools

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta
        }
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self.pools._note(storage, 0, storage.nbytes())
        return out


POOLS = Pools()


def install() -> None:
    """Put the stand-in where vLLM's workers find their allocator.

    Raises:
        UnknownVllm: there is no such place.
    """
    from vllm.device_allocator import cumem

    from vllm_dsv4.commands.rehearse.mends import UnknownVllm

    if not hasattr(cumem, "cumem_available") or not hasattr(cumem.CuMemAllocator, "instance"):
        raise UnknownVllm("device_allocator.cumem has no allocator of the process")
    cumem.cumem_available = True
    cumem.CuMemAllocator.instance = POOLS
