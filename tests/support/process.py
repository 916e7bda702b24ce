"""Run a support module in a process of its own: JSON in, JSON out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.engine import Answer

ROOT = Path(__file__).parent.parent.parent


def run_in_process(
    module: str, folder: Path, env: Mapping[str, str], asked: Mapping[str, Any], timeout: float
) -> dict[str, Any]:
    """What ``python -m module REQUEST.json RESULT.json`` leaves in its result.

    Args:
        folder: for the two files.
        env: the process's whole environment.
    """
    request, result = folder / "request.json", folder / "result.json"
    request.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-m", module, str(request), str(result)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def engine_request(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a process is asked to start an engine with, and to answer."""
    return {
        "model": str(model),
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "options": dict(options),
    }


def read_answers(content: Mapping[str, Any]) -> list[Answer]:
    """The answers that a process wrote as dictionaries."""
    return [
        Answer(tuple(item["tokens"]), tuple(item["logprobs"]), item["cached"])
        for item in content["answers"]
    ]
