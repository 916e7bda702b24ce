"""``vllm-dsv4 demo`` as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_the_demo_shows_wraps_slots_capacity_and_equal_tokens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_dsv4.commands.cli.main", "demo", "--tokens", "16"]
    ran = subprocess.run(
        [*command, "--cache", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = re.findall(r"^ +(\d) +([\d,]+) +(\d+) +16 +[\d.]+$", ran.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == list("012345")
    assert all(int(wraps) >= 2 for _, _, wraps in rows)
    assert "afterwards: 4 slots, 4 free, 0 held; lent 6 times" in ran.stdout
    pool = re.search(
        r"paged pool: ([\d,]+) blocks, ([\d,]+) free before, ([\d,]+) after", ran.stdout
    )
    assert pool is not None
    blocks, before, after = (int(count.replace(",", "")) for count in pool.groups())
    assert blocks - 1 == before == after > 1000
    assert "tokens equal to vLLM's own paged path: 6 of 6 requests" in ran.stdout
    gain = re.search(r"tokens \(([\d.]+) times\)", ran.stdout)
    assert gain is not None
    assert float(gain[1]) > 1
