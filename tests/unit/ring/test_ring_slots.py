"""The slot pool: conserved, first-in-first-out, indifferent to strangers."""

import random

import pytest

from vllm_dsv4.ring.slots import SlotIntegrityError, SlotPool


def test_slot_0_is_never_lent() -> None:
    pool = SlotPool(3)
    assert {pool.lend(owner) for owner in "abc"} == {1, 2, 3}


def test_the_slot_that_was_free_for_longest_is_lent_first() -> None:
    pool = SlotPool(3)
    for owner in "abc":
        pool.lend(owner)
    for owner in "cab":
        pool.give_back(owner)
    assert [pool.lend(owner) for owner in "def"] == [3, 1, 2]


def test_giving_back_twice_or_without_a_slot_changes_no_count() -> None:
    pool = SlotPool(2)
    pool.lend("a")
    assert pool.give_back("stranger") is None
    assert pool.give_back("a") == 1
    before = pool.counts()
    assert pool.give_back("a") is None
    assert pool.counts() == before == pool.check_integrity()


def test_nobody_gets_a_second_slot_or_one_that_is_not_there() -> None:
    pool = SlotPool(1)
    pool.lend("a")
    with pytest.raises(SlotIntegrityError, match="already holds slot 1"):
        pool.lend("a")
    with pytest.raises(SlotIntegrityError, match="no free slot for 'b'"):
        pool.lend("b")


def test_the_books_are_counted_not_believed() -> None:
    pool = SlotPool(3)
    pool.lend("a")
    pool._free.append(1)
    with pytest.raises(SlotIntegrityError, match=r"twice \[1\]"):
        pool.check_integrity()
    pool._free.clear()
    with pytest.raises(SlotIntegrityError, match=r"lost \[2, 3\]"):
        pool.check_integrity()


def test_counts_hold_over_random_traces() -> None:
    rng = random.Random(0)
    pool = SlotPool(5)
    for step in range(5000):
        owner = f"r{rng.randrange(12)}"
        if pool.slot_of(owner) is None and pool.num_free and rng.random() < 0.6:
            pool.lend(owner)
        else:
            pool.give_back(owner)
        counts = pool.check_integrity()
        assert counts.free + counts.held == counts.total == 5, step
        assert min(counts.free, counts.held) >= 0, step
