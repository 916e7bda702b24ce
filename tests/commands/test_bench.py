"""The benchmarks' own machinery: the driven scheduler, the simulation, the document."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_dsv4.commands.bench import planner, run
from vllm_dsv4.commands.bench.document import write_document
from vllm_dsv4.commands.bench.draw import draw_planner
from vllm_dsv4.commands.bench.drive import SIDES, Drive
from vllm_dsv4.commands.bench.scheduler import slots_for
from vllm_dsv4.commands.bench.simulate import STEP_TIMES, StepTime, simulate
from vllm_dsv4.commands.bench.traffic import Session, Shape, Turn, shapes
from vllm_dsv4.commands.cli.main import main
from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.commands.planner.plan import make_plan

SMALL = PlanOptions(RELEASED["flash"], gpu_memory_gib=3, max_model_len=2048, max_num_seqs=8)
MODEL = STEP_TIMES[0]


def sessions(*turns: Turn, count: int, gap: float = 0.0) -> Shape:
    users = tuple(Session(turns, gap * seed, 0, seed) for seed in range(count))
    return Shape("test", "test", 3, 2048, False, "at once", users)


def test_both_sides_serve_everyone_with_the_same_tokens():
    shape = sessions(Turn(300, 20), count=20)
    paged, rings = (simulate(Drive(side, SMALL), shape, MODEL) for side in SIDES)
    assert len(paged.output_tokens) == 20
    assert paged.output_tokens == rings.output_tokens
    assert max(rings.running) == 8


def test_a_request_without_a_slot_waits_for_one():
    run_ = simulate(Drive("rings", SMALL), sessions(Turn(10, 5), count=9), MODEL)
    assert max(run_.running) == 8
    assert run_.waiting[0] == 1
    assert run_.first_token_at["7-0"] == 0
    assert run_.first_token_at["8-0"] == 5


def test_a_later_turn_carries_the_conversation_so_far():
    shape = sessions(Turn(100, 10), Turn(50, 10), count=1)
    drive = Drive("paged", SMALL)
    simulate(drive, shape, MODEL)
    first, second = drive.tokens_of("0-0"), drive.tokens_of("0-1")
    assert second[: len(first)] == first
    assert len(second) == len(first) + 60


def test_modelled_time_adds_up_over_steps_and_waits_for_the_next_arrival():
    model = StepTime("test", base_ms=1000, decode_us=0, prefill_us=0)
    run_ = simulate(Drive("rings", SMALL), sessions(Turn(10, 2), count=2, gap=10.0), model)
    # Two steps, then nothing until the second user comes after 10 s, then two steps more.
    assert run_.clock(model)[-1] == pytest.approx(12.0)
    assert run_.first_token_seconds(model) == pytest.approx([1.0, 1.0])


def test_slots_and_pages_of_the_mean_request_fill_the_memory():
    shape = sessions(Turn(1000, 24), count=4)
    slots = slots_for(shape, SMALL)
    held = slots * (15_420_416 + 4 * 1_002_240) + 15_420_416
    assert held <= SMALL.cache_bytes < held + 15_420_416 + 4 * 1_002_240


def test_every_shape_is_larger_than_what_fits_at_once():
    for shape in shapes(quick=True):
        options = PlanOptions(
            RELEASED["flash"],
            gpu_memory_gib=shape.memory_gib,
            max_model_len=shape.max_model_len,
            max_num_seqs=4096,
            enable_prefix_caching=shape.prefix_caching,
        )
        assert len(shape.sessions) > slots_for(shape, options), shape.name


def test_a_plan_that_does_not_add_up_is_not_reported():
    plan = make_plan(PlanOptions(RELEASED["flash"], enable_prefix_caching=True))
    planner._check(plan)
    for wrong in (
        replace(plan, rings=replace(plan.rings, num_blocks=plan.rings.num_blocks + 1)),
        replace(plan, num_snapshots=plan.num_snapshots + 1),
    ):
        with pytest.raises(AssertionError):
            planner._check(wrong)


def test_the_document_is_made_from_the_json_alone(tmp_path: Path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    data = {"benchmark": "planner", "quick": True, "conditions": run.conditions()}
    data |= planner.measure(quick=True)
    data["plots"] = draw_planner(data, folder)
    (folder / "planner.json").write_text(json.dumps(data))
    text = write_document(folder).read_text()
    assert "| 131,072 |" in text or "| 8,192 |" in text
    for plot in data["plots"]:
        assert (folder / plot).stat().st_size > 10_000
        assert f"benchmarks/{plot}" in text


def test_an_unknown_benchmark_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "speed", "--out", str(tmp_path / "out")]) == 2
    assert "'speed'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
