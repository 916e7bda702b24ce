"""What users run: an offline script, the compose file's server that finds the plugin, a client."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from openai.types import Completion

from tests.support.compose import command, health_command
from tests.support.engine import Answer
from tests.support.faithful import Yardstick, deviation, measure
from tests.support.monitoring import BY_PROMETHEUS, OF_PROMETHEUS, all_uses
from tests.support.prompts import prompt
from tests.support.served import GREEDY, Served
from tests.support.server import EXAMPLES, environment, free_port, serving, wait_for
from tests.support.tiers import transfer_config

SLOTS = 8
IGNORE_EOS = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tiny) -> Path:
    """With the whole vocabulary: texts are asked of it."""
    return tiny()


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What the compose file starts without a card, one after the other.

    Its model is there from an earlier start: making one costs half a minute. A container has a
    network of its own; here the server is given a port of loopback.
    """
    folder = tmp_path_factory.mktemp("serve")
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(model)
    subprocess.run(command("tiny", folder / "models"), env=environment(), check=True, timeout=300)
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    env = {
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    tiers = ["--kv-transfer-config", json.dumps(transfer_config(0.25, folder / "tier"))]
    started = [*command("cpu", folder / "models"), *address, *tiers]
    with serving(started, port, folder, env) as running:
        running.wait_until_ready()
        yield Served(running)
        assert list(folder.glob("*.ring")), "the rings' counts are published in this folder"
        assert running.stop() == 0
        assert not list(folder.glob("*.ring"))


def test_the_offline_example(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "offline.py", model, "--max-tokens", "8"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lengths = [int(n) for n in re.findall(r"^(\d+) prompt tokens: '", done.stdout, re.MULTILINE)]
    assert len(lengths) == 3
    assert max(lengths) > 3 * 128
    assert "DeepSeek-V4 on rings: 8 slots" in done.stdout


def test_a_request_is_served_right_after_start_up(served: Served) -> None:
    """The server has just said that it is ready; nothing else has been asked of it."""
    started = time.monotonic()
    answer = served.client.completions.create(
        prompt=prompt(300), max_tokens=4, extra_body=IGNORE_EOS, **GREEDY
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert time.monotonic() - started < 30
    served.wait_until_idle()


def test_the_client_example(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "client.py", "--url", f"{served.running.url}/v1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(said) == ["completion", "chat", "stream"]
    assert said["stream"] == said["completion"] != "''"


def given(completion: Completion) -> Answer:
    """What was asked for with ``LOGPROBS``."""
    choice = completion.choices[0]
    assert choice.logprobs is not None
    return Answer(
        tokens=tuple(choice.model_dump()["token_ids"]),
        logprobs=tuple(choice.logprobs.token_logprobs or ()),
        cached=0,
    )


LOGPROBS: dict[str, Any] = {"logprobs": 0, "extra_body": IGNORE_EOS, **GREEDY}


def ask(served: Served, tokens: list[int]) -> Answer:
    return given(served.client.completions.create(prompt=tokens, max_tokens=8, **LOGPROBS))


def noise(served: Served, length: int) -> Yardstick:
    """What rounding alone does to prompts of a length."""
    others = [prompt(length, seed=1000 + seed) for seed in range(4)]
    answers = [ask(served, other) for other in others]
    return measure(served, served.logit_step(others[0]), others, answers)


def test_32_requests_at_once_share_8_slots(served: Served) -> None:
    prompts = [prompt(200 + 5 * i, seed=i) for i in range(32)]
    seen: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            now = await asyncio.to_thread(served.running.metrics)
            in_use = now["vllm:dsv4_slots_in_use"]
            seen.append((in_use, now["vllm:dsv4_requests_waiting_for_slot"]))
            await asyncio.sleep(0.1)

    async def answer(tokens: list[int]) -> Answer:
        """Beside whatever else is asked."""
        ask = served.asynchronous.completions.create
        return given(await ask(prompt=tokens, max_tokens=24, **LOGPROBS))

    async def ask() -> tuple[list[Answer], list[Answer]]:
        alone = [await answer(tokens) for tokens in prompts[:8]]
        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(answer(tokens) for tokens in prompts))
        watching.cancel()
        return alone, answers

    alone, answers = asyncio.run(ask())
    assert served.metric("dsv4_slots") == SLOTS
    assert max(in_use for in_use, _ in seen) == SLOTS
    assert max(waiting for _, waiting in seen) > SLOTS
    served.wait_until_idle()
    assert {len(given.tokens) for given in answers} == {24}
    yardstick = measure(served, served.logit_step(prompts[-1]), prompts[:8], alone)
    found = [deviation(served, *pair) for pair in zip(prompts, answers, strict=True)]
    assert yardstick.beyond(found) == []


def test_a_client_that_leaves_gives_back_its_slot_and_pages(served: Served) -> None:
    streams = [
        served.client.completions.create(
            prompt=prompt(300, seed=seed),
            max_tokens=1500,
            stream=True,
            extra_body=IGNORE_EOS,
            **GREEDY,
        )
        for seed in range(3)
    ]
    for stream in streams:
        for _ in range(3):
            next(stream)
    assert served.metric("dsv4_slots_in_use") == 3
    assert served.metric("kv_cache_usage_perc") > 0
    for stream in streams:
        stream.close()
    served.wait_until_idle()


def test_a_prompt_that_is_too_long_is_refused_while_others_go_on(served: Served) -> None:
    stream = served.client.completions.create(
        prompt=prompt(200), max_tokens=100, stream=True, extra_body=IGNORE_EOS, **GREEDY
    )
    next(stream)
    with pytest.raises(BadRequestError, match="maximum context length is 2048 tokens"):
        served.client.completions.create(prompt=prompt(4000), max_tokens=1, **GREEDY)
    assert sum(1 for _ in stream) >= 90
    served.wait_until_idle()


def test_a_prompt_sent_twice_starts_from_a_snapshot(served: Served) -> None:
    before = served.running.metrics()
    question = prompt(700, seed=99)

    answers = [ask(served, question), ask(served, question)]
    after = served.running.metrics()

    def gained(name: str) -> float:
        name = f"vllm:dsv4_{name}"
        return after[name] - before[name]

    assert gained("snapshot_lookups_total") == 2
    assert gained("snapshot_hits_total") == 1
    assert gained("snapshots_taken_total") == 1
    assert after["vllm:dsv4_snapshot_slots"] == 256
    assert after["vllm:dsv4_snapshot_bytes"] > 0
    # The second computed fewer rows at once than the first.
    assert noise(served, 700).beyond([deviation(served, question, answers[1], answers[0])]) == []


def test_the_dashboard_and_the_alerts_name_metrics_and_labels_that_the_server_shows(
    served: Served,
) -> None:
    served.client.completions.create(prompt=prompt(300), max_tokens=4, **GREEDY)
    shown = dict(BY_PROMETHEUS)
    for sample in served.running.samples():
        shown[sample.name] = OF_PROMETHEUS | sample.labels.keys()
    named = all_uses()
    assert len(named) > 20
    assert {use.metric for use in named} - shown.keys() == set()
    assert [use for use in named if not use.labels <= shown[use.metric]] == []


def test_a_prefix_that_the_card_forgot_is_loaded(served: Served) -> None:
    """The server saves by itself, also when nobody asks it anything more."""
    question = prompt(800, seed=5)

    first, before = ask(served, question), served.running.metrics()
    wait_for(lambda: served.metric("dsv4_disk_saves_total") >= 4, 30, "files of the prefix")
    assert httpx.post(f"{served.running.url}/reset_prefix_cache").status_code == 200
    second, after = ask(served, question), served.running.metrics()
    gained = {
        name: after[f"vllm:dsv4_{name}"] - before[f"vllm:dsv4_{name}"]
        for name in ("host_hits_total", "host_loads_total", "tier_load_seconds_count")
    }
    assert gained == dict.fromkeys(gained, 1)
    assert after["vllm:dsv4_host_bytes"] > 0
    assert after["vllm:dsv4_disk_bytes"] > 0
    assert noise(served, 800).beyond([deviation(served, question, second, first)]) == []


def test_the_compose_file_finds_the_server_healthy(served: Served) -> None:
    port = int(served.running.url.rsplit(":", 1)[1])
    healthy = subprocess.run(health_command("cpu", port), env=environment(), check=False)
    nobody = subprocess.run(
        health_command("cpu", free_port()), env=environment(), capture_output=True, check=False
    )
    assert healthy.returncode == 0
    assert nobody.returncode != 0


def test_the_log_tells_slots_and_snapshots_beside_vllms_own_line(served: Served) -> None:
    log = served.running.log
    assert "DeepSeek-V4 on rings: 8 slots" in log
    assert re.search(r"Rings: \d of 8 slots in use.*, snapshots: \d+ hits in \d+ lookups", log)
    assert "Avg prompt throughput" in log
