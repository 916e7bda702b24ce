"""Benchmark ``prefix``, its engines, cut down to one case and two rounds."""

import pytest

from vllm_dsv4.commands.bench import prefix


def test_snapshots_are_timed_against_none_after_a_hit_was_shown_to_be_exact(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(prefix, "PREFILLS", ((1, 600),))
    (case,) = prefix._cost(starts=1, rounds=2)
    assert (case["requests"], case["tokens"]) == (1, 600)
    assert case["tokens_equal"]
    assert case["ratio_of_starts"] == [case["ratio"]]
