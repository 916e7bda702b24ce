"""Rings against the memory that there is: what is named, and that the value named does fit."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dsv4.ring.geometry import RingGeometry
from vllm_dsv4.ring.plan import num_snapshots
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.serving.memory import card_memory, check_rings_fit
from vllm_dsv4.settings import Settings

GIB = 1 << 30
FLASH = (0, 0) + (4, 128) * 20 + (4,)


def config(seqs: int = 1024, caching: bool = True, **cache: Any) -> Any:
    settings = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.9} | cache
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching, **settings),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=8192),
    )


def flash(asked: Any, slots: int | None = None) -> RingGeometry:
    slots = slots or asked.scheduler_config.max_num_seqs
    snapshots = num_snapshots(asked, slots, Settings())
    return RingGeometry(FLASH, 0, 131_072, num_slots=slots, num_snapshots=snapshots)


def refusal(asked: Any, memory: int, **more: Any) -> str:
    with pytest.raises(Refusal) as no:
        check_rings_fit(flash(asked), asked, memory, "what is left", **more)
    return str(no.value)


def test_slots_are_named_and_the_value_that_would_fit_does() -> None:
    asked = config()
    message = refusal(asked, 10 * GIB)
    assert message.startswith("--max-num-seqs=1024 (vLLM's default on large cards): ")
    assert "(1024 slots of 14." in message and ", 1024 snapshots of " in message
    assert "10.00 GiB are there (what is left)" in message
    named = int(re.search(r"Lower --max-num-seqs: (\d+) would fit and leave", message).group(1))
    check_rings_fit(flash(asked, named), asked, 10 * GIB, "what is left")
    assert flash(asked, named).total_bytes <= 5 * GIB < flash(asked, named + 1).total_bytes


def test_a_number_that_somebody_chose_is_no_default() -> None:
    assert refusal(config(seqs=1000), 10 * GIB).startswith("--max-num-seqs=1000: ")


def test_pages_that_were_asked_for_are_what_the_value_leaves_room_for() -> None:
    asked = config(kv_cache_memory_bytes=8 * GIB)
    message = refusal(asked, 18 * GIB)
    assert " and 8.00 GiB of pages (--kv-cache-memory-bytes)" in message
    named = int(re.search(r"Lower --max-num-seqs: (\d+) ", message).group(1))
    assert flash(asked, named).total_bytes <= 10 * GIB < flash(asked, named + 1).total_bytes


def test_snapshots_that_take_most_get_a_value_too() -> None:
    asked = config(seqs=16)
    message = refusal(asked, GIB)
    assert message.startswith("VLLM_DSV4_SNAPSHOT_SLOTS=256 (the default): ")
    assert re.search(r"Lower VLLM_DSV4_SNAPSHOT_SLOTS: \d+ would fit and leave 0\.\d+ GiB", message)


def test_where_no_value_fits_none_is_named() -> None:
    assert "would fit" not in refusal(config(caching=False), 1 << 20)


def test_rings_that_fit_pass_with_what_comes_beside_them() -> None:
    asked = config(seqs=4, caching=False)
    needed = flash(asked).total_bytes
    check_rings_fit(flash(asked), asked, needed + GIB, "free memory", beside=GIB)
    with pytest.raises(Refusal):
        check_rings_fit(flash(asked), asked, needed + GIB, "free memory", beside=GIB + 1)


def test_rings_are_judged_by_what_the_utilisation_leaves() -> None:
    asked = config(gpu_memory_utilization=0.5)
    memory, what = card_memory(asked, free=150 * GIB, total=200 * GIB, ours=60 * GIB)
    assert memory == 40 * GIB and "--gpu-memory-utilization 0.5 leaves" in what
    memory, what = card_memory(asked, free=150 * GIB, total=200 * GIB, ours=101 * GIB)
    assert memory == 0


def test_another_process_on_the_card_leaves_less_than_the_utilisation() -> None:
    memory, what = card_memory(config(), free=30 * GIB, total=200 * GIB, ours=60 * GIB)
    assert memory == 30 * GIB and what.startswith("free memory of the card")


def test_a_size_of_pages_makes_vllm_ignore_the_utilisation() -> None:
    asked = config(gpu_memory_utilization=0.5, kv_cache_memory_bytes=GIB)
    memory, _ = card_memory(asked, free=150 * GIB, total=200 * GIB, ours=60 * GIB)
    assert memory == 150 * GIB
