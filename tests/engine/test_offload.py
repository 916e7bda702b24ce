"""Host memory and disk behind the card: what is loaded gives the cold answer, to the bit.

Steps have at most a block of tokens, so a prompt is cut at every block's end, where loads end,
whether what comes before is computed, hit or loaded: the rows of every product are the same. Before
a prompt is asked again, the prefix cache is reset and every byte of every page and ring on the card
is overwritten: a byte that was not loaded is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, engine
from tests.support.prompts import prompt
from tests.support.tiers import Tiers, transfer_config
from vllm_dsv4.offload.scheduler import page_key, snapshot_key

BLOCK = 256
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": BLOCK, "enable_prefix_caching": True}
LENGTHS = (257, 300, 511, 512, 513, 769, 1027, 1400, 1800)
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]
SHORT = prompt(100)
"""Of which no tier keeps anything."""
TOKENS = 8
HITS = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
HOST_GIB = 0.25


@dataclass
class Results:
    """Answers to ``PROMPTS`` unless named otherwise."""

    cold: list[Answer] = field(default_factory=list)
    host: list[Answer] = field(default_factory=list)
    disk: list[Answer] = field(default_factory=list)
    restarted: list[Answer] = field(default_factory=list)
    unrestored: list[Answer] = field(default_factory=list)
    faults: dict[str, tuple[Answer, dict[str, int]]] = field(default_factory=dict)
    aborted: list[Answer] = field(default_factory=list)
    short: Answer | None = None
    updated: list[Answer] = field(default_factory=list)
    chat: list[Answer] = field(default_factory=list)
    chat_cold: list[Answer] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


def key_of(tiers: Tiers, tokens: list[int], blocks: int) -> tuple[bytes, bytes]:
    """Of the last page of ``blocks`` blocks, and of the snapshot there."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        "key",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=tiers.engine.core.request_block_hasher,
    )
    block_hash = request.block_hashes[blocks - 1]
    return page_key(block_hash), snapshot_key(block_hash)


def counted(tiers: Tiers) -> dict[str, int]:
    """What the tiers refused since the last look."""
    taken = tiers.scheduler.stats() or {}
    return {name: count for name, count in taken.items() if name.endswith("refusals")}


def ask_with_faults(tiers: Tiers, found: Results) -> None:
    """Each fault in the way of one prompt of 1,400 tokens, five blocks of which are kept."""
    asked, blocks = PROMPTS[7], HITS[7] // BLOCK
    tiers.engine.scheduler.connector.get_kv_connector_stats = lambda: None
    page, snapshot = key_of(tiers, asked, blocks)

    def ask(name: str) -> None:
        counted(tiers)
        tiers.forget_the_card()
        (answer,) = tiers.engine.generate([asked], max_tokens=TOKENS)
        found.faults[name] = (answer, counted(tiers))
        tiers.check()

    def flip(path: Path, place: int) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    tiers.forget_the_host()
    with tiers.failing_reads(after=3):
        ask("the disk fails midway")
    tiers.forget_the_host()
    flip(tiers.file_of(snapshot), 5000)
    ask("a flipped byte of the snapshot")
    assert tiers.file_of(snapshot).exists(), "it was computed again, and saved again"
    tiers.forget_the_host()
    flip(tiers.file_of(page), 70)
    ask("a flipped byte of a page")
    tiers.forget_the_host()
    path = tiers.file_of(page)
    path.write_bytes(path.read_bytes()[:-9])
    ask("a file that was cut")
    tiers.forget_the_host()
    tiers.file_of(snapshot).write_bytes(tiers.file_of(page).read_bytes())
    ask("a foreign file")
    tiers.forget_the_host()
    assert tiers.scheduler.disk is not None
    tiers.scheduler.disk.remove(snapshot)
    ask("pages without a snapshot")
    tiers.forget_the_host()
    tiers.scheduler.disk.remove(key_of(tiers, asked, 2)[0])
    ask("a snapshot without one of its pages")
    tiers.forget_the_host()
    ask("none")
    del tiers.engine.scheduler.connector.get_kv_connector_stats


def abort_while_loading(tiers: Tiers, found: Results) -> None:
    """A request is given up while its bytes are on their way, beside others that go on."""
    tiers.forget_the_card()
    running, core = tiers.engine, tiers.engine.llm.llm_engine
    with tiers.slow_loads():
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        core.add_request("given up", {"prompt_token_ids": PROMPTS[6]}, sampling)
        for _ in range(3):
            core.step()
        waiting = running.scheduler.kv_holding_waiting
        assert len(waiting) == 1, "it does not wait for its bytes"
        counts = running.ring_manager.check_integrity()
        assert counts.held == 1
        core.abort_request(["given up"])
        found.aborted += running.generate([SHORT], max_tokens=TOKENS)
        assert running.ring_manager.check_integrity().held == 1
    for _ in range(5):
        core.step()
    tiers.check()
    found.aborted += running.generate([PROMPTS[6]], max_tokens=TOKENS)


def leave_out_the_snapshot(tiers: Tiers, found: Results) -> None:
    """A deliberate fault: pages are loaded, the rows of the rings are not."""
    from unittest.mock import patch

    from vllm_dsv4.offload.jobs import Kind

    write = tiers.worker.device.write

    def write_pages(kind: Kind, *args: Any) -> None:
        if kind is Kind.PAGE:
            write(kind, *args)

    with patch.object(tiers.worker.device, "write", write_pages):
        found.unrestored = tiers.again(PROMPTS[-2:], max_tokens=TOKENS)


def chat(running: Engine, tiers: Tiers | None) -> list[Answer]:
    """Turns of a conversation; with tiers, the card is emptied between two turns."""
    history, answers = prompt(300, seed=77), []
    for turn in range(4):
        if tiers is not None:
            tiers.forget_the_card()
        (answer,) = running.generate([history], max_tokens=100)
        answers.append(answer)
        history = [*history, *answer.tokens, *prompt(100, seed=turn)]
    return answers


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    found = Results()
    disk = tmp_path_factory.mktemp("tier")
    options = OPTIONS | {"kv_transfer_config": transfer_config(HOST_GIB, disk)}
    with engine(model, **options) as running:
        tiers = Tiers(running)
        (found.short,) = running.generate([SHORT], max_tokens=TOKENS)
        found.cold = running.one_by_one(PROMPTS, max_tokens=TOKENS)
        found.host = tiers.again(PROMPTS, max_tokens=TOKENS)
        tiers.check()
        leave_out_the_snapshot(tiers, found)
        tiers.forget_the_host()
        found.disk = tiers.again(PROMPTS, max_tokens=TOKENS)
        tiers.check()
        abort_while_loading(tiers, found)
        ask_with_faults(tiers, found)
    with engine(model, **options) as running:
        tiers = Tiers(running)
        found.restarted = running.one_by_one(PROMPTS, max_tokens=TOKENS)
        tiers.check()
        running.worker.reload_weights()
        found.updated = tiers.again([PROMPTS[6], PROMPTS[6]], max_tokens=TOKENS)
        tiers.check()
    return found


def test_a_prompt_that_was_loaded_gives_the_cold_answer_to_the_bit(results: Results) -> None:
    assert [answer.cached for answer in results.cold] == [0] * len(PROMPTS)
    for name, answers in (
        ("host", results.host),
        ("disk", results.disk),
        ("restarted", results.restarted),
    ):
        assert [answer.cached for answer in answers] == HITS, name
        for length, cold, loaded in zip(LENGTHS, results.cold, answers, strict=True):
            assert (loaded.tokens, loaded.logprobs) == (cold.tokens, cold.logprobs), (name, length)


def test_without_the_rings_rows_the_answers_are_wrong(results: Results) -> None:
    for cold, faulty in zip(results.cold[-2:], results.unrestored, strict=True):
        assert faulty.cached > 0
        assert faulty.logprobs != cold.logprobs


def test_a_request_given_up_while_loading_takes_nothing_with_it(results: Results) -> None:
    for cold, answer in zip((results.short, results.cold[6]), results.aborted, strict=True):
        assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)


WHOLE = {"disk_refusals": 1}
"""A load that failed: the request is computed whole."""
EXPECTED: dict[str, tuple[int, dict[str, int]]] = {
    "the disk fails midway": (0, WHOLE),
    "a flipped byte of the snapshot": (0, WHOLE),
    "a flipped byte of a page": (0, WHOLE),
    "a file that was cut": (0, WHOLE),
    "a foreign file": (0, WHOLE),
    "pages without a snapshot": (0, {}),
    "a snapshot without one of its pages": (0, {}),
    "none": (HITS[7], {}),
}
"""Of each fault: tokens that were loaded all the same, and what was counted."""


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_costs_the_load_and_never_the_answer(results: Results, fault: str) -> None:
    answer, refused = results.faults[fault]
    cold = results.cold[7]
    assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)
    assert (answer.cached, refused) == EXPECTED[fault]


def test_new_weights_find_nothing_of_the_old_ones(results: Results) -> None:
    first, second = results.updated
    assert (first.cached, second.cached) == (0, HITS[6])
    assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
