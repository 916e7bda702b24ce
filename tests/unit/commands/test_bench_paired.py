"""Ratios of two engines in turn, over several starts of both."""

import pytest

from vllm_dsv4.commands.bench.paired import PairedTimes, spread


def test_the_ratio_is_the_median_over_starts_of_each_starts_median_round() -> None:
    times = PairedTimes()
    times.add_start([(1.0, 1.0), (1.1, 1.0), (9.0, 1.0)])  # one round was disturbed
    times.add_start([(2.0, 2.5), (0.8, 1.0), (0.8, 1.0)])
    times.add_start([(1.2, 1.0)])
    assert times.ratio_of_starts == pytest.approx([1.1, 0.8, 1.2])
    summary = times.summary()
    assert summary["ratio"] == pytest.approx(1.1)
    assert spread(summary) == "0.800 to 1.200 over 3 starts"


def test_what_slows_both_engines_down_leaves_the_ratio_alone() -> None:
    times = PairedTimes()
    times.add_start([(1.0, 2.0), (10.0, 20.0), (1.0, 2.0)])
    assert times.summary()["ratio"] == 0.5
    assert times.seconds == (1.0, 2.0)
