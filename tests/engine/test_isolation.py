"""One request never reads another's rows, in production settings: one slot, handed on unpoisoned.

The slot is the whole world here. It is filled with one sequence's rows in every layer and ring,
then lent to another sequence, whose answer must be the one that a slot of zeros gives, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.support.engine import Answer, Engine, engine
from tests.support.prompts import prompt
from vllm_dsv4.cpu.index_plan import StagingPlan
from vllm_dsv4.ring.addressing import flat_row

SLOT = 1
FORMER = {"one": prompt(600, seed=31), "another": prompt(640, seed=32)}
"""Owners whose rows fill every ring of the slot: more than 128 tokens each."""
NEXT = [prompt(length, seed=33) for length in (1, 3, 5, 100, 127, 128, 129, 300)]
"""Owners that leave most of the slot unwritten, just fill it, or wrap."""
MAX_MODEL_LEN = 1024


@dataclass
class Results:
    on_zeros: list[Answer] = field(default_factory=list)
    after: dict[str, list[Answer]] = field(default_factory=dict)
    leaking_on_zeros: list[Answer] = field(default_factory=list)
    leaking_after: list[Answer] = field(default_factory=list)
    contents_differ: bool = False
    rows_left: bool = False
    longest: Answer | None = None
    groups: list[str] = field(default_factory=list)


def _slot(running: Engine) -> list[torch.Tensor]:
    return [buffer[:, SLOT] for buffer in running.model.arena.buffers.values()]


def _after(running: Engine, former: list[int] | None) -> list[Answer]:
    """The answer to each next owner, its slot zeroed or handed on by the former owner."""
    answers = []
    for asked in NEXT:
        for part in _slot(running):
            part.zero_()
        if former is not None:
            running.generate([former], max_tokens=2)
        answers += running.generate([asked], max_tokens=6)
    return answers


def _read_rows_before_the_sequence(plan: StagingPlan) -> torch.Tensor:
    """The fault: rows at positions below 0 are read as if they were there."""
    n = plan.num_decode_tokens
    offsets = torch.arange(plan.window)
    positions = plan.step.positions[:n, None] - (plan.window - 1) + offsets
    return flat_row(plan.step.token_slots[:n, None], positions, plan.rows)


@pytest.fixture(scope="module")
def results(model: Path) -> Results:
    found = Results()
    with engine(
        model,
        env={"VLLM_DSV4_SLOTS": "1"},
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=5,  # the null block, and just enough for the longest request
    ) as running:
        config = running.scheduler.kv_cache_config
        found.groups = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
        found.on_zeros = _after(running, None)
        contents = []
        for name, former in FORMER.items():
            running.generate([former], max_tokens=2)
            contents.append([part.clone() for part in _slot(running)])
            found.after[name] = _after(running, former)
        found.rows_left = all(bool(part.any()) for content in contents for part in content)
        found.contents_differ = all(not torch.equal(a, b) for a, b in zip(*contents, strict=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagingPlan, "decode_read", property(_read_rows_before_the_sequence))
            found.leaking_on_zeros = _after(running, None)
            found.leaking_after = _after(running, FORMER["one"])
        (found.longest,) = running.generate([prompt(MAX_MODEL_LEN - 4)], max_tokens=4)
        assert running.ring_manager.check_integrity().held == 0
    return found


@pytest.mark.parametrize("former", FORMER)
def test_no_answer_depends_on_the_slots_former_owner(results: Results, former: str) -> None:
    for asked, clean, given in zip(NEXT, results.on_zeros, results.after[former], strict=True):
        assert given == clean, f"{len(asked)} tokens"


def test_the_former_owners_did_fill_the_slot_each_with_rows_of_its_own(results: Results) -> None:
    assert results.rows_left
    assert results.contents_differ


def test_a_path_that_reads_beyond_its_own_rows_is_seen(results: Results) -> None:
    """Unless it shows here, the tests above prove nothing."""
    assert results.leaking_after != results.leaking_on_zeros


def test_the_longest_request_that_start_up_accepts_is_served(results: Results) -> None:
    assert results.longest is not None
    assert len(results.longest.tokens) == 4


def test_rings_are_one_group_and_the_paged_caches_the_rest(results: Results) -> None:
    """vLLM's packing pulls no ring into a paged group, and no page into the ring group."""
    assert results.groups.count("RingSpec") == 1
    assert len(results.groups) == 2
