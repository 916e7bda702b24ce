"""An engine in a process of its own: ``python -m tests.support.answers REQUEST.json RESULT.json``.

For what is decided when a process starts: Triton's interpreter, the model runner, compilation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.engine import Answer, engine
from tests.support.process import read_answers, run_in_process


def answers_of_a_process(
    model: Path,
    folder: Path,
    env: dict[str, str],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    **options: Any,
) -> tuple[list[Answer], str]:
    """Greedy answers, each prompt alone, and the class of the model runner that gave them."""
    content = run_in_process(
        "tests.support.answers",
        folder,
        os.environ | env,
        {
            "model": str(model),
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "options": options,
        },
        timeout=900,
    )
    return read_answers(content), content["runner"]


def main(request: Path, result: Path) -> None:
    asked = json.loads(request.read_text())
    with engine(Path(asked["model"]), **asked["options"]) as running:
        answers = running.one_by_one(asked["prompts"], max_tokens=asked["max_tokens"])
        runner = type(running.worker.model_runner)
        result.write_text(
            json.dumps(
                {
                    "answers": [vars(answer) for answer in answers],
                    "runner": f"{runner.__module__}.{runner.__qualname__}",
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
