"""The Ray examples as users run them, and what happens when a rank or Ray's head is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from openai import APIError, OpenAI

from tests.support.prompts import prompt
from tests.support.ray_node import RayNode
from tests.support.ray_pair import two_ray_nodes, two_ray_nodes_on_one_host
from tests.support.server import EXAMPLES, Server, environment, server, wait_for

OPTIONS = {"model": "dsv4", "temperature": 0}
IGNORE_EOS = {"ignore_eos": True}
QUESTION = prompt(300)
ENDS_WITHIN = 30.0
"""Seconds from a loss to the server's end."""
KILLS = int(os.environ.get("SOAK_KILLS", "1"))
"""How often a rank is killed; each costs a start."""
HEAD_GONE = 5
"""Seconds that Ray's processes wait for their head to come back; 60 where nothing is set."""


def offline(node: RayNode, model: Path) -> list[str]:
    """What the offline example prints of each prompt."""
    done = subprocess.run(
        [*node.enter, sys.executable, EXAMPLES / "ray_tp2.py", model, "--max-tokens", "8"],
        env=environment() | node.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "DeepSeek-V4 on rings: 8 slots" in done.stdout
    return re.findall(r"^\d+ prompt tokens: '.*$", done.stdout, re.MULTILINE)


def test_the_offline_example_says_the_same_on_one_node_and_on_two(
    node: RayNode, model: Path
) -> None:
    """Two nodes of one device each, on two hosts where the machine allows them."""
    on_one = offline(node, model)
    assert len(on_one) == 2
    with two_ray_nodes({}) as pair:
        assert offline(pair, model) == on_one


@contextmanager
def serving(node: RayNode, model: Path, folder: Path) -> Iterator[tuple[Server, OpenAI]]:
    with server("serve_ray_tp2.sh", model, folder, node.environment) as running:
        running.wait_until_ready(600)
        yield running, OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def answer(client: OpenAI) -> str:
    completion = client.completions.create(
        prompt=QUESTION, max_tokens=8, extra_body=IGNORE_EOS, **OPTIONS
    )
    assert completion.choices[0].finish_reason == "length"
    return completion.choices[0].text


def lost_while_it_streams(running: Server, client: OpenAI, victim: psutil.Process) -> float:
    """Kill a process in the midst of an answer; seconds until the server has ended.

    The answer must break off with an error, and with no finish reason.
    """
    stream = client.completions.create(
        prompt=QUESTION, max_tokens=1500, stream=True, extra_body=IGNORE_EOS, **OPTIONS
    )
    chunks = [next(stream), next(stream)]
    killed = time.monotonic()
    victim.kill()
    with pytest.raises(APIError):
        for chunk in stream:
            chunks.append(chunk)
            assert time.monotonic() - killed < ENDS_WITHIN, "the server answers on"
    running.process.wait(60)
    took = time.monotonic() - killed
    assert not any(chunk.choices[0].finish_reason for chunk in chunks)
    assert took < ENDS_WITHIN, f"the server's end took {took:.1f} seconds"
    return took


def test_a_killed_rank_ends_the_server_and_a_restart_serves_again(
    node: RayNode, model: Path, tmp_path: Path
) -> None:
    answers, seconds = [], []
    for round_number in range(KILLS + 1):
        with serving(node, model, tmp_path) as (running, client):
            answers.append(answer(client))
            if round_number == KILLS:
                break
            one_rank = node.workers()[round_number % 2]
            seconds.append(lost_while_it_streams(running, client, one_rank))
            assert re.search(r"RayWorkerProc rank=\[[01]\] died unexpectedly", running.log)
        wait_for(lambda: not node.workers(), 60, "the other rank to end")
    print(f"{KILLS} kills: {min(seconds):.1f} to {max(seconds):.1f} seconds to the server's end")
    assert len(set(answers)) == 1


def test_a_lost_ray_head_ends_the_server_and_a_restart_serves_again(
    node: RayNode, model: Path, tmp_path: Path
) -> None:
    """The ranks live on at first, and steps do not pass through the head: Ray's patience decides.

    Nodes that nothing watches over: ``ray start --block`` would end its node at once, ranks and
    all, which is the test above.
    """
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_GONE)}
    with (
        two_ray_nodes_on_one_host({}, patience) as pair,
        serving(pair, model, tmp_path) as (running, client),
    ):
        before = answer(client)
        took = lost_while_it_streams(running, client, pair.head())
        print(f"{took:.1f} seconds from the head's death to the server's end")
        assert f"Failed to connect to GCS within {HEAD_GONE} seconds" in running.log
        wait_for(lambda: not pair.workers(), 60, "the ranks to end")
    with serving(node, model, tmp_path) as (_, client):
        assert answer(client) == before
