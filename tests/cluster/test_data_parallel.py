"""Two engines, their experts shared between them: answers of one, slots of their own, and a loss.

One server for all tests, and one engine beside it that scores what it said. ``DP_REQUESTS`` says
how many requests are scored; with ``DP_EXPERTS=parts`` each engine has a part of every expert.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIError, BadRequestError

from tests.cluster.test_tensor_parallel import HALVES
from tests.support.engine import Answer, engine
from tests.support.faithful import deviation, measure
from tests.support.prompts import VOCABULARY, prompt
from tests.support.ray_node import NO_BINDING
from tests.support.served import GREEDY, Served
from tests.support.server import server, wait_for

REQUESTS = int(os.environ.get("DP_REQUESTS", "24"))
TOKENS = 8
ENGINES = (0, 1)
SCORED = 4
"""One of so many of the reference's own answers is held against it, for the yardstick."""
AT_ONCE = 20
"""More than both engines' slots."""
LENGTHS = (3, 40, 130, 260, 600)
RESUMED = prompt(300, seed=20)
"""Fills a block, so it leaves a snapshot."""
WHOLE_EXPERTS = os.environ.get("DP_EXPERTS", "whole") == "whole"
FLAGS = (
    "--data-parallel-size", "2", "--api-server-count", "1", "--enable-prompt-tokens-details",
    *(["--enable-expert-parallel"] if WHOLE_EXPERTS else []),
)  # fmt: skip
LOSS_SECONDS = 60.0
IN_USE = ("num_requests_running", "dsv4_slots_in_use", "kv_cache_usage_perc")


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    answer: Answer


class Pair(Served):
    """A server of two engines."""

    def of_engines(self, name: str) -> list[float]:
        """A metric of each engine."""
        found = {
            sample.labels["engine"]: sample.value
            for sample in self.running.samples()
            if sample.name == f"vllm:{name}"
        }
        return [found[str(number)] for number in ENGINES]

    def settle(self) -> None:
        def idle() -> bool:
            return not any(value for name in IN_USE for value in self.of_engines(name))

        wait_for(idle, 60, f"{IN_USE} to be 0")

    def ask(self, tokens: Sequence[int], on: int | None = None, **more: Any) -> Asked:
        """An answer, by a certain engine if one is named."""
        answer = self.client.completions.create(
            prompt=list(tokens),
            logprobs=0,
            extra_headers={} if on is None else {"X-data-parallel-rank": str(on)},
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **(GREEDY | {"max_tokens": TOKENS} | more),
        )
        (choice,) = answer.choices
        scores = tuple(choice.logprobs.token_logprobs)
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        return Asked(tuple(tokens), Answer(tuple(choice.token_ids), scores, cached))


@pytest.fixture(scope="module")
def small(tiny: Callable[..., Path]) -> Path:
    return tiny(vocab=VOCABULARY)


@pytest.fixture(scope="module")
def pair(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    env = NO_BINDING | {"VLLM_DSV4_POISON": "1", "VLLM_RPC_BASE_PATH": str(folder)}
    with server("serve.sh", small, folder, env, FLAGS) as running:
        running.wait_until_ready(600)
        yield Pair(running)


@pytest.fixture(scope="module")
def asked(pair: Pair) -> list[Asked]:
    """Idle engines beside busy ones, then both busy, then both idle again."""
    found = []
    for number in ENGINES:
        found.append(pair.ask(RESUMED, on=number))
        # This engine idles, and steps with dummy batches, while the other one answers.
        found.append(pair.ask(prompt(150, seed=number), on=1 - number, max_tokens=3 * TOKENS))
        found.append(pair.ask(RESUMED, on=number))
    prompts = [prompt(LENGTHS[n % len(LENGTHS)], seed=n) for n in range(REQUESTS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found += pool.map(pair.ask, prompts)
    return found


def test_the_answers_are_those_of_one_engine(asked: list[Asked], small: Path) -> None:
    prompts = [one.prompt for one in asked]
    with engine(small, max_num_seqs=8) as alone:
        own = alone.generate(prompts, max_tokens=TOKENS)
        step = alone.logit_step(RESUMED)
        noise = measure(alone, step, prompts[::SCORED], own[::SCORED])
        found = [
            deviation(alone, one.prompt, one.answer, expected)
            for one, expected in zip(asked, own, strict=True)
        ]
    # Each engine rounds the sum over its experts to bf16 before they are added, as ranks do.
    allowed = max(HALVES * noise.step, noise.limit)
    far = [(one.prompt, by) for one, by in zip(asked, found, strict=True) if by.worst > allowed]
    assert far == [], f"{allowed} nats are allowed, {noise}"
    print(f"{len(found)} answers, at most {max(by.worst for by in found):.3f} nats off")


def test_a_prefix_outlives_the_dummy_batches_of_an_idle_engine(asked: list[Asked]) -> None:
    for number in ENGINES:
        first, _, again = asked[3 * number : 3 * number + 3]
        assert (first.answer.cached, again.answer.cached) == (0, 256)
        assert again.answer.tokens == first.answer.tokens


def test_both_engines_answered_and_hold_nothing_afterwards(pair: Pair, asked: list[Asked]) -> None:
    pair.settle()
    generated = pair.of_engines("generation_tokens_total")
    assert sum(generated) == sum(len(one.answer.tokens) for one in asked)
    assert min(generated) > sum(generated) / 4, generated
    slots = pair.of_engines("dsv4_slots")
    assert slots == [8, 8]
    for number in ENGINES:
        streams = [
            pair.client.completions.create(
                prompt=prompt(9, seed=n),
                max_tokens=1500,
                stream=True,
                extra_headers={"X-data-parallel-rank": str(number)},
                extra_body={"ignore_eos": True},
                **GREEDY,
            )
            for n in range(8)
        ]
        wait_for(
            lambda number=number: pair.of_engines("dsv4_slots_in_use")[number] == 8,
            60,
            "every slot to be lent",
        )
        for stream in streams:
            stream.close()
        pair.settle()


@pytest.mark.parametrize("rank", ["2", "-1", "99999999999999999999"])
def test_an_engine_that_does_not_exist_is_refused_and_ends_nothing(pair: Pair, rank: str) -> None:
    with pytest.raises(BadRequestError):
        pair.client.completions.create(
            prompt="x", max_tokens=1, extra_headers={"X-data-parallel-rank": rank}, **GREEDY
        )
    assert pair.client.models.list().data[0].id == "dsv4"


def test_a_lost_engine_ends_the_server_and_every_stream_with_an_error(pair: Pair) -> None:
    """Last: nothing serves afterwards. The engines step together, so one cannot go on alone."""
    streams = [
        pair.client.completions.create(
            prompt=prompt(20),
            max_tokens=1500,
            stream=True,
            extra_headers={"X-data-parallel-rank": str(number)},
            extra_body={"ignore_eos": True},
            **GREEDY,
        )
        for number in ENGINES
    ]
    chunks = [next(stream) for stream in streams]
    processes = psutil.Process(pair.running.process.pid).children(recursive=True)
    (victim,) = [one for one in processes if "EngineCore_DP1" in " ".join(one.cmdline())]
    victim.kill()
    killed = time.monotonic()
    for stream in streams:
        with pytest.raises(APIError):
            chunks += stream
    told = time.monotonic() - killed
    pair.running.process.wait(LOSS_SECONDS)
    ended = time.monotonic() - killed
    print(
        f"an engine killed: clients told after {told:.1f} s, the server ended after {ended:.1f} s"
    )
    assert not any(chunk.choices[0].finish_reason for chunk in chunks)
    assert ended < LOSS_SECONDS
    wait_for(lambda: not any(map(_alive, processes)), 60, "every process to end")


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
