"""``python -m tests.faults``: put each fault into a copy of the source, and run its test there."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import scheduler, worker
from tests.faults.fault import ROOT, Fault, as_markdown

FAULTS = [*scheduler.FAULTS, *worker.FAULTS]
COPIED = ("vllm_dsv4", "kernels", "tests", "docs", "pyproject.toml")
FAILED = 1
"""pytest's status when tests ran, and one failed. Below 0 the process died, as of a segmentation
fault."""


def copy_of_the_source(folder: Path) -> Path:
    """A copy that is imported in place of what is installed.

    Raises:
        RuntimeError: something else would be imported.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(source, folder / name)
    # Where an editable installation's finder would else be asked.
    (folder / "vllm_dsv4" / "kernels").symlink_to("../kernels")
    asked = "import vllm_dsv4, vllm_dsv4.kernels as k; print(vllm_dsv4.__file__, k.__file__)"
    found = subprocess.check_output([sys.executable, "-c", asked], cwd=folder, env=_env(folder))
    if not all(Path(path).is_relative_to(folder) for path in found.decode().split()):
        raise RuntimeError(f"the copy in {folder} is not what Python imports: {found.decode()}")
    return folder


def run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest in the copy, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command, cwd=folder, env=_env(folder), capture_output=True, text=True, check=False
    )


def _env(folder: Path) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": threads,
    }


def outcome(folder: Path, fault: Fault) -> str:
    """Empty if its test failed, else what happened."""
    fault.apply(folder)
    try:
        done = run(folder, [fault.killed_by])
    finally:
        fault.undo(folder)
    if done.returncode == FAILED or done.returncode < 0:
        return ""
    if done.returncode == 0:
        return "SURVIVED"
    return f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose description has one of these")
    parser.add_argument("--markdown", action="store_true", help="print the table and run nothing")
    asked = parser.parse_args()
    if asked.markdown:
        print(as_markdown(FAULTS))
        return 0
    faults = [f for f in FAULTS if not asked.words or any(w in f.words for w in asked.words)]
    survived = []
    with tempfile.TemporaryDirectory() as created:
        folder = copy_of_the_source(Path(created).resolve())
        sound = run(folder, sorted({fault.killed_by for fault in faults}))
        if sound.returncode != 0:
            print(f"without any fault:\n{sound.stdout[-3000:]}{sound.stderr[-1000:]}")
            return 1
        for number, fault in enumerate(faults, 1):
            start = time.monotonic()
            said = outcome(folder, fault)
            survived += [fault] if said else []
            seconds = time.monotonic() - start
            print(
                f"{number}/{len(faults)} {said or 'seen'} in {seconds:.0f} s: {fault.words} "
                f"({fault.killed_by})",
                flush=True,
            )
    print(f"{len(faults) - len(survived)} of {len(faults)} seen")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
