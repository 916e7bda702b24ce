"""The demonstration's own parts: prompts, counts, report, and its kept model."""

from pathlib import Path

import pytest

from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.commands.demo import report, run
from vllm_dsv4.commands.demo.prompts import story
from vllm_dsv4.commands.demo.result import Holder, Result, Served, SlotTable, ring_wraps
from vllm_dsv4.ring.geometry import RingGeometry

GEOMETRY = RingGeometry(layer_ratios=(0, 4), lookahead=0, max_model_len=2000, num_slots=2)


def a_run(tokens: list[int], capacity: int, slots: SlotTable | None) -> Result:
    served = Served(prompt_tokens=300, tokens=tokens, decode_seconds=0.5)
    return Result([served], 2.0, capacity, 11, 10, 10, slots)


RINGS = a_run([5, 6, 7], 9000, SlotTable(2, [Holder(2, 0, 129), Holder(1, 1, 0)], 3, 5, 2))
PAGED = a_run([5, 6, 8], 1000, None)


def test_every_day_of_the_story_differs() -> None:
    days = story(12).split("\n")
    assert len(set(days)) == 12
    assert "{" not in story(12)


@pytest.mark.parametrize(
    ("prompt", "generated", "wraps"),
    [(1, 1, 0), (128, 1, 0), (127, 2, 0), (128, 2, 1), (256, 1, 1), (256, 2, 2), (1471, 64, 11)],
)
def test_a_wrap_is_counted_when_the_first_row_is_written_again(
    prompt: int, generated: int, wraps: int
) -> None:
    assert ring_wraps(prompt, generated, rows=128) == wraps
    rows_written = [position % 128 for position in range(prompt + generated - 1)]
    assert max(0, rows_written.count(0) - 1) == wraps


def test_results_survive_the_way_between_processes(tmp_path: Path) -> None:
    for result in (RINGS, PAGED):
        result.write(tmp_path / "result.json")
        assert Result.read(tmp_path / "result.json") == result


def test_the_report_says_what_was_measured() -> None:
    table = report.requests_table(RINGS, rows=128).splitlines()
    assert table[1].split() == ["0", "300", "2", "3", "4.0"]
    assert table[2] == "all: 3 tokens in 2.0 s, 1.5 tokens/s, prompts included"
    assert RINGS.slots is not None
    assert report.slots_table(RINGS.slots, rows=128).splitlines() == [
        "slot table when busiest (3 requests waiting):",
        "  slot 2: request 0, 129 tokens, newest in row 0 of 128",
        "  slot 1: request 1, in prefill",
        "afterwards: 2 slots, 2 free, 0 held; lent 5 times",
    ]
    capacity = report.capacity_table(RINGS, PAGED, GEOMETRY, 2**28)
    assert "capacity in 256 MiB" in capacity
    assert "9,000 tokens (9.0 times)" in capacity


def test_tokens_that_differ_from_the_paged_path_are_not_called_equal() -> None:
    assert report.agreement(RINGS, PAGED).endswith("0 of 1 requests")
    assert report.agreement(RINGS, RINGS).endswith("1 of 1 requests")


@pytest.mark.parametrize(
    ("slots", "tokens", "message"),
    [(0, 1, "--slots 0: "), (1, 0, "--tokens 0: "), (1, 5000, "--tokens 5000: ")],
)
def test_a_demonstration_of_nothing_is_refused(
    slots: int, tokens: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadOption, match=message):
        run.Options(cache=tmp_path, slots=slots, tokens=tokens)


def test_the_model_is_made_once_and_never_seen_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(out: Path, **_progress: object) -> None:
        made.append(out)
        out.mkdir()
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "make_tiny", make)
    monkeypatch.setattr(run, "weight_bytes", lambda _shape: Shape().hidden)
    with pytest.raises(KeyboardInterrupt):
        run.cached_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
    model = run.cached_model(tmp_path)
    assert run.cached_model(tmp_path) == model
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == [model]
