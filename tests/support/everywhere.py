"""What tests put under vLLM, in this process and in every process that they start.

vLLM loads plugins in each of its processes. A distribution that exists as metadata only names ours;
its folder is on ``sys.path`` here, and on ``PYTHONPATH`` for engines, servers and ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from pathlib import Path

from tests.support import rounding
from tests.support.fake_distribution import add_distribution
from tests.support.portable import operators

ROOT = Path(__file__).parent.parent.parent


def names() -> list[str]:
    """Modules whose ``install`` vLLM will call, in this order."""
    found = [operators.__name__] if operators.missing() else []
    return found + [rounding.__name__] * rounding.wanted()


def reach_every_process() -> None:
    """Let vLLM find the modules of ``names``, here and in processes started from here."""
    asked = names()
    if not asked:
        return
    folder = tempfile.TemporaryDirectory(prefix="tests-under-vllm-")
    atexit.register(folder.cleanup)
    # vLLM calls plugins in the order of their names here.
    points = {f"test_{number}": f"{module}:install" for number, module in enumerate(asked)}
    add_distribution(
        Path(folder.name), "dsv4-tests-under-vllm", "1", {"vllm.general_plugins": points}
    )
    added = [folder.name, str(ROOT)]
    sys.path += added
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([path] if path else [])])


def in_words() -> str:
    """For the head of a test run: under what it ran."""
    words = {
        operators.__name__: "vLLM's library for this processor lacks DeepSeek-V4's operators: "
        "tests/support/portable computes them",
        rounding.__name__: "products round by the number of rows",
    }
    return "; ".join(words[name] for name in names()) or "vLLM's operators, as they are"
