"""The host's pool as the scheduler sees it: which unit holds what, and what is given up first.

All ranks have a pool of as many units, and do with a unit what they are told. A unit is as large
as a page; a snapshot takes several. Pure Python.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class Entry:
    """A page or a snapshot in the pool.

    Attributes:
        units: its places.
        is_ready: all ranks hold its bytes.
        users: copies under way that read or write it; it keeps its units as long as there are any.
        is_dropped: nobody may find it any more.
    """

    key: bytes
    units: tuple[int, ...]
    is_ready: bool = False
    users: int = 0
    is_dropped: bool = False


class HostPool:
    """Units ``0..num_units - 1``, and what they hold, the least recently used first."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._free = list(range(num_units - 1, -1, -1))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._leaving: set[Entry] = set()
        self.evictions = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether it is there or on its way."""
        return key in self._entries

    def ready(self, key: bytes) -> Entry | None:
        """The entry, if it can be read."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.is_ready else None

    def place(self, key: bytes, units: int) -> Entry | None:
        """Units for a new entry, held by one user; others are given up for it. None if it does not
        fit beside what is in use."""
        assert key not in self._entries
        if not self._make_room(units):
            return None
        entry = Entry(key, tuple(self._free.pop() for _ in range(units)), users=1)
        self._entries[key] = entry
        return entry

    def touch(self, keys: Iterable[bytes]) -> None:
        """They were used, the last one most recently."""
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key)

    def spend(self, key: bytes) -> None:
        """Give this one up first."""
        if key in self._entries:
            self._entries.move_to_end(key, last=False)

    def use(self, entry: Entry) -> None:
        entry.users += 1

    def release(self, entry: Entry) -> None:
        """One copy less is under way."""
        entry.users -= 1
        assert entry.users >= 0
        if entry.is_dropped and entry.users == 0:
            self._leaving.discard(entry)
            self._free.extend(entry.units)

    def drop(self, key: bytes) -> None:
        """Forget it; its units come back when nobody uses them."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry.is_dropped = True
        if entry.users:
            self._leaving.add(entry)
        else:
            self._free.extend(entry.units)

    def abandon(self, entry: Entry) -> None:
        """Its bytes never came: forget it, and release it once."""
        if not entry.is_dropped:
            self.drop(entry.key)
        self.release(entry)

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)

    @property
    def used_units(self) -> int:
        return self.num_units - len(self._free)

    def check_integrity(self) -> None:
        """Raises AssertionError: a unit is lost, or is in two places."""
        held = [unit for entry in self._entries.values() for unit in entry.units]
        leaving = [unit for entry in self._leaving for unit in entry.units]
        assert sorted([*self._free, *held, *leaving]) == list(range(self.num_units)), (
            f"{len(self._free)} free, {len(held)} held, {len(leaving)} leaving of {self.num_units}"
        )

    def _make_room(self, units: int) -> bool:
        if len(self._free) >= units:
            return True
        victims, room = [], len(self._free)
        for entry in self._entries.values():
            if entry.users == 0:
                victims.append(entry)
                room += len(entry.units)
                if room >= units:
                    break
        if room < units:
            return False
        for entry in victims:
            self.drop(entry.key)
            self.evictions += 1
        return True
