"""A store past the end of a ring or a page tensor is seen, on either side and in any stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_dsv4.commands.rehearse.guards import Guards
from vllm_dsv4.commands.rehearse.report import Report
from vllm_dsv4.commands.rehearse.result import STAGES, EngineResult
from vllm_dsv4.commands.rehearse.stages import GuardsBroken, Stages

SIZE = 4096


def beyond(buffer: torch.Tensor, offset: int) -> torch.Tensor:
    """The byte at ``offset`` from a buffer's start, wherever that is: what a stray store finds."""
    return torch.as_strided(buffer, (1,), (1,), buffer.storage_offset() + offset)


def told(result: EngineResult) -> Report:
    """The report of an engine on rings, alone."""
    return Report({"rings": result}, 1.0, compared=False)


@pytest.fixture
def guards() -> Guards:
    return Guards()


def test_a_buffer_that_is_written_to_its_ends_leaves_its_guards_alone(guards: Guards) -> None:
    guards.guard("a ring", SIZE).fill_(0xFF)
    assert guards.broken() == []


@pytest.mark.parametrize(
    ("offset", "line"),
    [
        (SIZE, "1 bytes after a ring, the nearest 1 from it"),
        (SIZE + 700_000, "1 bytes after a ring, the nearest 700001 from it"),
        (-1, "1 bytes before a ring, the nearest 1 from it"),
    ],
)
def test_a_byte_past_either_end_is_told_with_its_distance(
    guards: Guards, offset: int, line: str
) -> None:
    beyond(guards.guard("a ring", SIZE), offset).fill_(7)
    assert guards.broken() == [line]


def test_a_stage_that_writes_past_a_ring_is_not_called_done(guards: Guards, tmp_path: Path) -> None:
    result = EngineResult()
    stages = Stages(result, tmp_path / "result", guards)
    ring = guards.guard("a ring", SIZE)
    with stages.stage("load"):
        ring.fill_(1)
    after = "in stage warmup: 1 bytes after a ring"
    with pytest.raises(GuardsBroken, match=after), stages.stage("warmup"):
        beyond(ring, SIZE).fill_(1)
    assert EngineResult.read(tmp_path / "result").stages == ["load"]
    report = told(result)
    assert not report.ok
    assert not report.guards_intact
    assert report.as_json()["guards_intact"] is False


def test_a_snapshot_slot_written_before_a_request_is_told(guards: Guards, tmp_path: Path) -> None:
    stages = Stages(EngineResult(), tmp_path / "result", guards)
    slots = guards.guard("a ring", SIZE).view(4, -1)
    guards.snapshots.append(("a ring", slots[2:]))
    with stages.stage("load"):
        slots[1].fill_(1)
    with pytest.raises(GuardsBroken, match="a snapshot slot of a ring"), stages.stage("warmup"):
        slots[3, 5] = 1


def test_snapshot_slots_are_written_once_requests_come(guards: Guards, tmp_path: Path) -> None:
    stages = Stages(EngineResult(), tmp_path / "result", guards)
    slots = guards.guard("a ring", SIZE).view(4, -1)
    guards.snapshots.append(("a ring", slots[2:]))
    with stages.stage("generate"):
        slots[3].fill_(1)


def test_every_stage_must_be_reached_for_an_ok() -> None:
    assert told(EngineResult(stages=list(STAGES))).ok
    for left_out in STAGES:
        stages = [stage for stage in STAGES if stage != left_out]
        report = told(EngineResult(stages=stages))
        assert report.problems == [f"stages not reached: {left_out}"]


def test_an_eager_engine_owes_no_capture() -> None:
    stages = [stage for stage in STAGES if stage != "capture"]
    assert told(EngineResult(stages=stages, facts={"captures": False})).ok


def scored(rings: list[float], paged: list[float]) -> Report:
    """What the paged path made of the answers on rings and of its own."""
    judge = EngineResult(scored={"rings": rings, "paged": paged}, logit_step=0.03125)
    return Report({"rings": EngineResult(stages=list(STAGES)), "paged": judge}, 1.0)


def test_an_answer_further_from_the_paged_path_than_it_is_from_itself_fails() -> None:
    assert scored([0.07, 0.0], [0.04]).ok
    assert scored([0.13, 0.0], [0.04]).problems == [
        "an answer lacks 0.130 nats, as paged scores it; up to 0.080 would be rounding"
    ]
    assert scored([0.06, 0.0], [0.0]).ok, "twice a step of a logit"
    assert not scored([0.07, 0.0], [0.0]).ok
    assert scored([0.13], [0.04]).worst_regret == 0.13


def test_answers_that_nobody_scored_are_no_success() -> None:
    assert scored([], []).problems == ["the paged path scored no answer"]
