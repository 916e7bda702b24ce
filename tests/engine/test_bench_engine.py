"""Benchmark ``engine`` with two real engines, cut down to one round of two requests."""

from pathlib import Path

import pytest

from vllm_dsv4.commands.bench import engine


@pytest.mark.engine
def test_both_engines_are_measured_in_one_run_and_gave_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(engine, "REQUESTS", (2,))
    data = engine.measure(quick=True)
    assert [(case["kind"], case["requests"]) for case in data["cases"]] == [
        ("decode", 2),
        ("prefill", 2),
    ]
    for case in data["cases"]:
        assert case["tokens_equal"]
        assert case["paged"]["prefill_steps"] == case["rings"]["prefill_steps"]
        assert case["ratio_of_starts"] == [case["ratio"]]


@pytest.mark.engine
def test_an_engine_that_cannot_start_is_an_error_with_its_log(tmp_path: Path):
    with (
        engine.Engine("rings", tmp_path / "missing", tmp_path / "log") as worker,
        pytest.raises(engine.EngineFailed, match="rings engine ended without an answer"),
    ):
        worker.wait_until_ready()
