"""An engine that drafts, in a process of its own; see ``answers`` and ``process``.

The second model runner runs on the CPU under Triton's interpreter only, which is chosen when a
process starts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.drafts import watching_drafts
from tests.support.engine import Answer, engine
from tests.support.process import engine_request, read_answers, run_in_process
from vllm_dsv4.commands.rehearse.interpreter import boolean_masks

SECOND_RUNNER = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


@dataclass
class Drafted:
    """Greedy answers, each prompt alone, and how many drafts were verified and accepted."""

    answers: list[Answer]
    verified: int
    accepted: int


def drafts_of_the_second_runner(
    model: Path,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    **options: Any,
) -> Drafted:
    """What the second model runner answers, and what became of its drafts."""
    content = run_in_process(
        "tests.support.drafted_answers",
        folder,
        os.environ | {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
        engine_request(model, prompts, max_tokens, options),
        timeout=900,
    )
    assert content["runner"] == SECOND_RUNNER
    return Drafted(read_answers(content), content["verified"], content["accepted"])


def main(request: Path, result: Path) -> None:
    asked = json.loads(request.read_text())
    env = {"VLLM_DSV4_POISON": "1"}
    with (
        boolean_masks(),
        engine(Path(asked["model"]), env=env, **asked["options"]) as running,
        watching_drafts(running) as watch,
    ):
        answers = running.one_by_one(asked["prompts"], max_tokens=asked["max_tokens"])
        runner = type(running.worker.model_runner)
        result.write_text(
            json.dumps(
                {
                    "answers": [vars(answer) for answer in answers],
                    "runner": f"{runner.__module__}.{runner.__qualname__}",
                    "verified": len(watch.verified),
                    "accepted": sum(watch.accepted()),
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
