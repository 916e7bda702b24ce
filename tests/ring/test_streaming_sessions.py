"""Sessions whose prompt arrives in turns (vLLM's streaming input): each turn leaves a snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.support.prompts import prompt
from vllm_dsv4.commands.bench.drive import Drive
from vllm_dsv4.commands.bench.prefix import OPTIONS
from vllm_dsv4.commands.planner.options import PlanOptions

NONE = replace(OPTIONS, max_num_seqs=8)
MTP = replace(NONE, speculative_tokens=1)
ANSWER = 8


class Session:
    """One streaming session: turns extend the prompt of the same request."""

    def __init__(self, side: str, options: PlanOptions) -> None:
        self.drive = Drive(side, options)
        self.turns = 0

    def turn(self, tokens: list[int], answer: int = ANSWER) -> None:
        """Send more of the prompt, and take its answer."""
        update = self._request(tokens, answer, resumable=True)
        self.drive.requests.setdefault("session", update)
        self.drive.scheduler.add_request(update)
        self.turns += 1
        self._run()

    def end(self) -> list[int]:
        """Close the session; what it computed."""
        self.drive.scheduler.add_request(self._request([1], 1, resumable=False))
        self._run()
        return self.drive.tokens_of("session")

    def hit_of(self, tokens: list[int]) -> int:
        """Cached tokens of another request with this prompt."""
        before = self.drive.prompt_tokens_hit
        self.drive.add("another", tokens, ANSWER)
        self._run()
        self.drive.check_all_returned()
        return self.drive.prompt_tokens_hit - before

    def _run(self) -> None:
        scheduler = self.drive.scheduler
        for _ in range(2000):
            waits = scheduler.num_waiting_for_streaming_input
            if self.drive.num_running == 0 and self.drive.num_waiting == waits:
                return
            self.drive.step()
        raise AssertionError("the session's turn never ends")

    def _request(self, tokens: list[int], answer: int, resumable: bool) -> Request:
        return Request(
            request_id="session",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.drive._hasher,
            resumable=resumable,
        )


def hits(side: str, options: PlanOptions, lengths: list[int], answer: int = ANSWER) -> int:
    """A session with turns of these lengths; then its whole content is asked again."""
    session = Session(side, options)
    for number, length in enumerate(lengths):
        session.turn(prompt(length, seed=number), answer)
    return session.hit_of([*session.end(), *prompt(40)])


@pytest.mark.parametrize(
    ("lengths", "pages_hit"),
    [([100, 600], 512), ([300, 300, 100], 512), ([50] * 12, 256)],
    ids=["two turns", "three turns", "twelve turns"],
)
def test_every_turn_leaves_the_snapshot_that_pages_would_serve(
    lengths: list[int], pages_hit: int
) -> None:
    paged = hits("paged", NONE, lengths)
    assert paged >= pages_hit
    assert hits("rings", NONE, lengths) >= paged
    assert hits("rings", MTP, lengths) >= hits("paged", MTP, lengths) - 256


def test_a_turn_that_decodes_over_boundaries_leaves_its_latest() -> None:
    assert hits("rings", NONE, [100, 100], answer=300) == 768


def test_a_snapshot_of_an_earlier_turn_is_found_while_the_session_runs() -> None:
    session = Session("rings", NONE)
    first = prompt(300)
    session.turn(first)
    session.turn(prompt(600, seed=1))
    so_far = session.drive.tokens_of("session")
    assert session.drive.num_waiting == 1
    before = session.drive.prompt_tokens_hit
    session.drive.add("another", [*so_far[:-1], *prompt(300)], ANSWER)
    session._run()
    assert session.drive.prompt_tokens_hit - before == 768
    session.end()
    session.drive.check_all_returned()
