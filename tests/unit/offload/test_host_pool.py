"""The host's pool: every unit in one place, and nothing given up that is in use."""

from __future__ import annotations

import random

import pytest

from vllm_dsv4.offload.host import Entry, HostPool


def ready(pool: HostPool, name: str, units: int = 1) -> Entry:
    entry = pool.place(name.encode(), units)
    assert entry is not None
    entry.is_ready = True
    pool.release(entry)
    return entry


def test_what_is_on_its_way_cannot_be_read() -> None:
    pool = HostPool(2)
    entry = pool.place(b"a", 1)
    assert entry is not None
    assert b"a" in pool
    assert pool.ready(b"a") is None
    entry.is_ready = True
    assert pool.ready(b"a") is entry


def test_the_least_recently_used_entries_make_room() -> None:
    pool = HostPool(3)
    for name in "abc":
        ready(pool, name)
    pool.touch([b"a"])
    assert pool.place(b"d", 2) is not None
    assert [name for name in (b"a", b"b", b"c") if name in pool] == [b"a"]
    assert pool.evictions == 2


def test_a_spent_entry_goes_first() -> None:
    pool = HostPool(3)
    for name in "abc":
        ready(pool, name)
    pool.spend(b"c")
    pool.place(b"d", 1)
    assert [name for name in (b"a", b"b", b"c") if name in pool] == [b"a", b"b"]


def test_what_is_in_use_stays_and_nothing_is_given_up_in_vain() -> None:
    pool = HostPool(3)
    used = ready(pool, "a")
    ready(pool, "b")
    pool.use(used)
    assert pool.place(b"c", 3) is None
    assert b"a" in pool and b"b" in pool
    assert pool.place(b"d", 2) is not None
    assert b"a" in pool


def test_a_dropped_entry_keeps_its_units_until_its_last_user_is_done() -> None:
    pool = HostPool(1)
    entry = ready(pool, "a")
    pool.use(entry)
    pool.drop(b"a")
    assert b"a" not in pool
    assert pool.place(b"b", 1) is None
    pool.check_integrity()
    pool.release(entry)
    assert pool.place(b"b", 1) is not None


def test_abandoning_an_entry_leaves_its_successor_alone() -> None:
    pool = HostPool(2)
    first = pool.place(b"a", 1)
    assert first is not None
    pool.drop(b"a")
    second = pool.place(b"a", 1)
    pool.abandon(first)
    assert pool.place(b"a2", 1) is not None
    assert second is not None and not second.is_dropped
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_calls_keeps_every_unit_in_one_place(seed: int) -> None:
    """Against a plain account of who holds which units."""
    rng = random.Random(seed)
    pool = HostPool(13)
    users: list[Entry] = []
    for number in range(4000):
        name = str(rng.randrange(20)).encode()
        match rng.randrange(6):
            case 0 if name not in pool:
                entry = pool.place(name, rng.choice((1, 1, 1, 4)))
                if entry is not None:
                    taken = {unit for other in users for unit in other.units}
                    assert taken.isdisjoint(entry.units), number
                    users.append(entry)
            case 1 if users:
                entry = users.pop(rng.randrange(len(users)))
                entry.is_ready = True
                pool.release(entry)
            case 2 if (found := pool.ready(name)) is not None:
                pool.use(found)
                users.append(found)
            case 3:
                pool.drop(name)
            case 4:
                pool.touch([name])
            case 5:
                pool.spend(name)
        pool.check_integrity()
    for entry in users:
        pool.release(entry)
    pool.clear()
    assert pool.used_units == 0
