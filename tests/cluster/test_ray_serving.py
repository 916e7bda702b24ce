"""The Ray examples as users run them, and what happens when a rank is lost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import APIError, OpenAI

from tests.support.prompts import prompt
from tests.support.ray_node import RayNode, seconds_within
from tests.support.ray_pair import two_ray_nodes
from tests.support.server import EXAMPLES, Server, environment, server, wait_for

OPTIONS = {"model": "dsv4", "temperature": 0}
IGNORE_EOS = {"ignore_eos": True}
QUESTION = prompt(300)
ENDS_WITHIN = 30.0
"""Seconds from a rank's death to the server's end."""


def offline(node: RayNode, model: Path) -> list[str]:
    """What the offline example prints of each prompt."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "ray_tp2.py", model, "--max-tokens", "8"],
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
    """Two nodes of one device each, on this host: each rank has a Ray node of its own."""
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


def test_a_killed_rank_ends_the_server_and_a_restart_serves_again(
    node: RayNode, model: Path, tmp_path: Path
) -> None:
    with serving(node, model, tmp_path) as (running, client):
        before = answer(client)
        stream = client.completions.create(
            prompt=QUESTION, max_tokens=1500, stream=True, extra_body=IGNORE_EOS, **OPTIONS
        )
        chunks = [next(stream), next(stream)]
        one_rank, _ = node.workers()
        with seconds_within(ENDS_WITHIN, "the end after a rank's death"):
            one_rank.kill()
            with pytest.raises(APIError):
                chunks += list(stream)
            running.process.wait(60)
        assert not any(chunk.choices[0].finish_reason for chunk in chunks)
        assert re.search(r"RayWorkerProc rank=\[[01]\] died unexpectedly", running.log)
    wait_for(lambda: not node.workers(), 60, "the other rank to end")
    with serving(node, model, tmp_path) as (_, client):
        assert answer(client) == before
