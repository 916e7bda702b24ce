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

ROOT = Path(__file__).parent.parent.parent


def reach_every_process() -> None:
    """Let vLLM call ``rounding.install``, if it is wanted, here and in processes started here."""
    if not rounding.wanted():
        return
    folder = tempfile.TemporaryDirectory(prefix="tests-under-vllm-")
    atexit.register(folder.cleanup)
    points = {"vllm.general_plugins": {"test_rounding": f"{rounding.__name__}:install"}}
    add_distribution(Path(folder.name), "dsv4-tests-under-vllm", "1", points)
    added = [folder.name, str(ROOT)]
    sys.path += added
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([path] if path else [])])


def in_words() -> str:
    """For the head of a test run: under what arithmetic it ran."""
    bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    words = ["vLLM's own" if bf16 else "the portable ones (no AVX-512 bf16 here)"]
    if rounding.wanted():
        words.append("products round by the number of rows")
    return "; ".join(words)
