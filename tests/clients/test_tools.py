"""Tools that users point at a server: none loses a request, and what they hold comes back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import APITimeoutError, OpenAI

from tests.support.served import Served
from tests.support.server import environment

REQUESTS = int(os.environ.get("BENCH_REQUESTS", "100"))
"""``make soak`` asks for 10,000."""
RATE = 1000
"""Requests a second: far above what a small model on a processor answers."""


def test_vllm_bench_serve_above_capacity_loses_nothing(
    both: tuple[Served, Served], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    rings, _ = both
    done = subprocess.run(
        [
            "vllm", "bench", "serve",
            "--backend", "openai", "--base-url", rings.running.url, "--endpoint", "/v1/completions",
            "--model", "dsv4", "--tokenizer", str(tiny()), "--tokenizer-mode", "auto",
            "--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "4",
            "--random-range-ratio", "0.5", "--num-prompts", str(REQUESTS),
            "--request-rate", str(RATE), "--ignore-eos", "--disable-tqdm",
            "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60 + 5 * REQUESTS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    rings.wait_until_idle()


@pytest.mark.parametrize("retries", [0, 2])
def test_a_client_that_gives_up_waiting_leaves_nothing_behind(
    both: tuple[Served, Served], retries: int
) -> None:
    """The ``openai`` client closes the connection, and asks again as often as it was told to."""
    rings, _ = both
    client = OpenAI(
        base_url=f"{rings.running.url}/v1", api_key="none", timeout=0.2, max_retries=retries
    )
    with pytest.raises(APITimeoutError):
        client.completions.create(
            model="dsv4", prompt="again", max_tokens=400, extra_body={"ignore_eos": True}
        )
    rings.wait_until_idle()
    assert rings.client.models.list().data[0].id == "dsv4"
