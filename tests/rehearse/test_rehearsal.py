"""vLLM's own worker and second model runner, on our ROCm platform, from load to shut-down."""

from __future__ import annotations

import pytest

from vllm_dsv4.commands.rehearse.report import Report
from vllm_dsv4.commands.rehearse.result import STAGES
from vllm_dsv4.commands.rehearse.run import Options, rehearse


@pytest.fixture(scope="module")
def report() -> Report:
    """The start that users get: chunks, preemptions and a hit, in one engine."""
    return rehearse(Options())


def test_every_stage_of_a_server_is_reached(report: Report) -> None:
    assert report.rings.error is None
    assert report.rings.stages == list(STAGES)


def test_nothing_is_written_outside_rings_and_pages(report: Report) -> None:
    """Both of vLLM's warm-ups make up slot numbers beyond the rings."""
    assert report.rings.broken_guards == []
    assert report.rings.early_snapshots == []


def test_the_engine_is_the_one_that_users_get(report: Report) -> None:
    facts = report.rings.facts
    assert facts["platform"] == "Dsv4RocmPlatform"
    assert facts["runner"] == "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    assert facts["model"] == "vllm_dsv4.rocm.model"
    assert facts["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert facts["prefix_caching"]
    assert facts["chunked_prefill"]


def test_graphs_are_replayed_and_none_reads_on_the_host(report: Report) -> None:
    captured, replayed = report.rings.graphs
    assert captured > 0
    assert replayed > captured
    assert report.rings.host_reads == []


def test_requests_were_preempted_and_found_prefixes(report: Report) -> None:
    assert report.rings.preempted == 2
    assert sum(answer.cached for answer in report.rings.answers) == 256


def test_answers_are_those_of_the_paged_path_up_to_rounding(report: Report) -> None:
    """And of the CPU path."""
    assert list(report.regrets) == ["paged", "cpu"]
    for judge, regret in report.regrets.items():
        assert regret.rings <= regret.allowed, judge
    assert report.problems == []
