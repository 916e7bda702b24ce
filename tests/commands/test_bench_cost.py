"""Benchmark ``cost``, cut down to a few requests and steps."""

from pathlib import Path

import pytest

from vllm_dsv4.commands.bench import cost
from vllm_dsv4.commands.bench.document import SECTIONS
from vllm_dsv4.commands.bench.draw import draw_cost


@pytest.mark.parametrize("caching", [False, True])
def test_scheduling_and_freeing_are_timed_on_both_sides_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caching: bool
):
    monkeypatch.setattr(cost, "RUNNING", (4,))
    case = cost._case(4, caching, chunks=2)
    assert case["running"] == 4 and case["prefix_caching"] is caching
    for side in ("rings", "paged"):
        assert 0 < case[side]["manager_us"] < case[side]["step_us"]
    assert case["ratio"]["manager"] == case["rings"]["manager_us"] / case["paged"]["manager_us"]
    data = {"model": "Flash", "prompt_tokens": 1024, "steps_timed": 16, "cases": [case]}
    _, section = SECTIONS["cost"]
    assert f"| {case['ratio']['idle']:.2f}x |" in section(data)
    assert draw_cost(data, tmp_path) == ["cost.png"]
    assert "with a ring manager that does nothing" in cost.headline(case)


def test_the_idle_manager_does_none_of_a_steps_work():
    """Every method that a decode step calls is its own, so that it bounds the real one."""
    called = ("get_num_blocks_to_allocate", "allocate_new_blocks", "cache_blocks")
    for name in (*called, "remove_skipped_blocks", "new_step_starts"):
        assert name in vars(cost.IdleRingManager)
