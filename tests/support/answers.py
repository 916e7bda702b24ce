"""An engine in a process of its own: ``python -m tests.support.answers REQUEST.json RESULT.json``.

For what is decided when a process starts: Triton's interpreter, the model runner, compilation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine import Answer, engine
from tests.support.process import engine_request, read_answers, run_in_process


@dataclass(frozen=True)
class ProcessRun:
    """Greedy answers, each prompt alone, and how they came about.

    Attributes:
        runner: class of the model runner.
        compiled_graphs: graphs of the model that torch.compile made.
    """

    answers: list[Answer]
    runner: str
    compiled_graphs: int


def answers_of_a_process(
    model: Path,
    folder: Path,
    env: dict[str, str],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    **options: Any,
) -> ProcessRun:
    """An engine's answers, in a process with this environment on top of ours."""
    content = run_in_process(
        "tests.support.answers",
        folder,
        os.environ | env,
        engine_request(model, prompts, max_tokens, options),
        timeout=900,
    )
    return ProcessRun(read_answers(content), content["runner"], content["compiled_graphs"])


def main(request: Path, result: Path) -> None:
    from torch._dynamo.utils import counters

    asked = json.loads(request.read_text())
    with engine(Path(asked["model"]), **asked["options"]) as running:
        answers = running.one_by_one(asked["prompts"], max_tokens=asked["max_tokens"])
        runner = type(running.worker.model_runner)
        result.write_text(
            json.dumps(
                {
                    "answers": [vars(answer) for answer in answers],
                    "runner": f"{runner.__module__}.{runner.__qualname__}",
                    "compiled_graphs": counters["stats"]["unique_graphs"],
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
