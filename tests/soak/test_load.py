"""A server under thousands of short requests: nothing is lost, and nothing is kept.

Bursts of up to 64 requests over 8 slots: answers streamed and whole, clients that leave before
their first token or after it, prompts that are too long, and requests that make no sense.
``SOAK_REQUESTS`` says how many; ``make soak`` asks for 10,000.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.engine import Answer
from tests.support.faithful import deviation, measure
from tests.support.prompts import prompt
from tests.support.served import GREEDY, Served
from tests.support.server import server, wait_for

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "600"))
SECONDS_A_REQUEST = 1.0
"""Bounds the whole run, also where the machine is shared. Quiet, it takes a twentieth."""
BURST = 64
PARTS = 10
"""Memory is read after each. The first half touches what was allocated and not yet used."""
GROWTH_MIB = 48
"""In the second half."""
FLAGS = ("--kv-cache-memory-bytes", str(16 << 20))
"""A pool that is soon touched whole: pages that nobody used yet are not resident."""
MATMUL_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("SOAK_MATMUL_CACHE", "0")}
"""PyTorch's matrix library keeps code for each of the last 1,024 shapes, and a batch has a new
shape when it has another number of tokens. The cache is bounded, and would hide a leak."""
CONTEXT = 2048
PROMPTS = [prompt(20 + length) for length in range(40)] + [prompt(280, seed=n) for n in range(4)]
"""The last ones fill a block, and so hit snapshots."""
LONGEST_ANSWER = 8
LEFT_UNREAD = 64
"""Tokens that a leaving client asked for."""
KINDS = {"streamed": 66, "whole": 12, "leaves at once": 6, "leaves midway": 6, "too long": 5,
         "senseless": 5}  # fmt: skip
SENSELESS: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": -0.5},
    {"prompt": [10**9]},
    {"n": 0},
    {"max_tokens": CONTEXT + 1},
]
ALARMS = ("ERROR", "CRITICAL", "Traceback")


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        outcomes: how many ended in each way.
        answers: of each prompt's index, how often each answer was given.
        faults: requests that did not end as they must.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    answers: Counter[tuple[int, Answer]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Load:
    """Sends requests of random kinds, from a seed, and keeps the tally."""

    def __init__(self, url: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.url = f"{url}/v1/completions"
        # The server closes a connection that was idle for 5 seconds; one that is reused at that
        # moment would fail here and look like a lost answer.
        limits = httpx.Limits(
            max_connections=BURST, max_keepalive_connections=BURST // 2, keepalive_expiry=1
        )
        self.client = httpx.AsyncClient(limits=limits, timeout=300)

    async def send(self, requests: int) -> None:
        """In bursts, each ended before the next begins."""
        while requests:
            burst = min(requests, self.rng.choice((1, 2, 5, 16, BURST)))
            kinds = self.rng.choices(list(KINDS), weights=list(KINDS.values()), k=burst)
            await asyncio.gather(*(self._one(kind, self.rng.random()) for kind in kinds))
            requests -= burst

    async def _one(self, kind: str, chance: float) -> None:
        number = int(chance * len(PROMPTS))
        tokens = 2 + int(chance * 1009) % (LONGEST_ANSWER - 1)
        try:
            fault = await self._ask(kind, number, tokens, chance)
        except httpx.HTTPError as error:
            fault = repr(error)
        self.tally.outcomes[kind] += 1
        if fault:
            self.tally.faults.append(f"{kind}, prompt {number}, {tokens} tokens: {fault}")

    async def _ask(self, kind: str, number: int, tokens: int, chance: float) -> str | None:
        if kind == "streamed":
            return await self._streamed(number, tokens)
        if kind == "whole":
            response = await self.client.post(self.url, json=request(number, tokens))
            return self._check(number, tokens, [response.json()], response.status_code)
        if kind == "leaves at once":
            return await self._leave(number, after_events=0)
        if kind == "leaves midway":
            return await self._leave(number, after_events=1 + int(chance * 100) % 4)
        if kind == "too long":
            return await self._refused({"prompt": prompt(CONTEXT + 1 + number)}, "2048")
        return await self._refused(SENSELESS[int(chance * 997) % len(SENSELESS)], "")

    async def _streamed(self, number: int, tokens: int) -> str | None:
        body = request(number, tokens) | {"stream": True}
        async with self.client.stream("POST", self.url, json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        if response.status_code != 200 or lines[-1] != "data: [DONE]":
            return f"status {response.status_code}, {lines[-1:]}"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return self._check(number, tokens, events, response.status_code)

    def _check(
        self, number: int, tokens: int, events: list[dict[str, Any]], status: int
    ) -> str | None:
        """Nothing is missing from an answer, and it says by itself that it is whole."""
        if status != 200:
            return f"status {status}: {events}"
        choices = [choice for event in events for choice in event["choices"]]
        given = tuple(token for choice in choices for token in choice["token_ids"] or ())
        scores = [s for c in choices if c["logprobs"] for s in c["logprobs"]["token_logprobs"]]
        if (len(given), len(scores)) != (tokens, tokens):
            return f"{len(given)} tokens, {len(scores)} scores"
        if choices[-1]["finish_reason"] != "length":
            return f"finish_reason {choices[-1]['finish_reason']}"
        self.tally.answers[number, Answer(given, tuple(scores), cached=0)] += 1
        return None

    async def _leave(self, number: int, after_events: int) -> str | None:
        body = request(number, LEFT_UNREAD) | {"stream": True}
        async with self.client.stream("POST", self.url, json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            lines = response.aiter_lines()
            for _ in range(after_events):
                await anext(lines)
        return None

    async def _refused(self, change: dict[str, Any], said: str) -> str | None:
        response = await self.client.post(self.url, json=request(0, 4) | change)
        if response.status_code == 400 and said in response.text:
            return None
        return f"{change}: status {response.status_code}: {response.text[:300]}"


def request(number: int, tokens: int) -> dict[str, Any]:
    return {
        **GREEDY,
        "prompt": PROMPTS[number],
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
    }


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("load")
    env = {"VLLM_RPC_BASE_PATH": str(folder)} | MATMUL_CACHE
    with server("serve.sh", model, folder, env, FLAGS) as running:
        running.wait_until_ready()
        yield Served(running)


def memory(served: Served) -> dict[int, float]:
    """Resident MiB of each of the server's processes, by its id."""
    first = psutil.Process(served.running.process.pid)
    processes = (first, *first.children(recursive=True))
    return {process.pid: process.memory_info().rss / 2**20 for process in processes}


def counts(served: Served) -> dict[str, float]:
    """Slots and pages, when nothing runs."""
    served.wait_until_idle()
    names = ("dsv4_slots", "dsv4_slots_in_use", "kv_cache_usage_perc", "num_requests_waiting")
    return {name: served.metric(name) for name in names}


def lend_every_slot(served: Served) -> None:
    """A slot that was lost is neither free nor lent: the most that are lent at once tells."""
    streams = [
        served.client.completions.create(
            prompt=tokens,
            max_tokens=CONTEXT - len(tokens),
            stream=True,
            extra_body={"ignore_eos": True},
            **GREEDY,
        )
        for tokens in PROMPTS[: int(served.metric("dsv4_slots"))]
    ]
    every = served.metric("dsv4_slots")
    wait_for(lambda: served.metric("dsv4_slots_in_use") == every, 60, "every slot to be lent")
    for stream in streams:
        stream.close()


def answers_alone(served: Served) -> list[Answer]:
    """What each prompt's answer is when nothing else is asked."""
    given = []
    for number in range(len(PROMPTS)):
        response = httpx.post(
            f"{served.running.url}/v1/completions",
            json=request(number, LONGEST_ANSWER),
            timeout=120,
        )
        (choice,) = response.json()["choices"]
        scores = choice["logprobs"]["token_logprobs"]
        given.append(Answer(tuple(choice["token_ids"]), tuple(scores), cached=0))
    return given


def test_nothing_is_lost_and_nothing_is_kept(served: Served) -> None:
    readings = []

    async def run() -> Tally:
        load = Load(served.running.url, seed=8)
        async with asyncio.timeout(120 + SECONDS_A_REQUEST * REQUESTS), load.client:
            for _ in range(PARTS):
                await load.send(REQUESTS // PARTS)
                await asyncio.to_thread(served.wait_until_idle)
                readings.append(memory(served))
        return load.tally

    alone = answers_alone(served)
    before = counts(served)
    started = time.monotonic()
    tally = asyncio.run(run())
    seconds = time.monotonic() - started
    lend_every_slot(served)
    after = counts(served)
    resident = [sum(reading.values()) for reading in readings]
    parted = [
        (number, answer)
        for number, answer in tally.answers
        if answer.tokens != alone[number].tokens[: len(answer.tokens)]
    ]
    print(
        f"{sum(tally.outcomes.values())} requests in {seconds:.0f} s: {dict(tally.outcomes)}; "
        f"{len(parted)} of {len(tally.answers)} different answers part from the one given alone; "
        f"MiB resident after each of {PARTS} parts: {[round(mib) for mib in resident]}"
    )
    assert tally.faults == []
    assert sum(tally.outcomes.values()) == REQUESTS // PARTS * PARTS
    assert set(tally.outcomes) == set(KINDS)
    assert before["dsv4_slots_in_use"] == 0
    assert after == before
    log = served.running.log
    assert [line for line in log.splitlines() if any(alarm in line for alarm in ALARMS)] == []
    assert readings[0].keys() == readings[-1].keys()
    assert resident[-1] - resident[PARTS // 2 - 1] < GROWTH_MIB
    yardstick = measure(served, served.logit_step(PROMPTS[-1]), PROMPTS[::6], alone[::6])
    found = [deviation(served, PROMPTS[number], answer) for number, answer in parted]
    assert yardstick.beyond(found) == [], [number for number, _ in parted]
    assert served.running.stop() == 0
