"""Fixtures for all suites: small checkpoints, made once and kept in ``.cache``."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.everywhere import in_words, reach_every_process
from tests.support.faithful import COMPARED

reach_every_process()

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "tests"
MARKERS = {
    "kernels": pytest.mark.kernels,
    "rocm": pytest.mark.kernels,
    "engine": pytest.mark.engine,
    "rehearse": pytest.mark.rehearse,
    "clients": pytest.mark.clients,
    "cluster": pytest.mark.cluster,
    "soak": pytest.mark.soak,
    "deploy": pytest.mark.deploy,
}
"""The marker of every test in a folder."""


def pytest_report_header() -> str:
    return f"operators: {in_words()}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COMPARED:
        terminalreporter.section("answers scored by the reference, in nats")
        for line in COMPARED:
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in MARKERS:
            item.add_marker(MARKERS[folder])


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Path]:
    """``tiny(form=..., **shape)``: the folder of a small checkpoint (see ``vllm-dsv4 make-tiny``).

    Reused as long as the code that writes it is the same.
    """
    sources = sorted((ROOT / "vllm_dsv4" / "checkpoint").glob("*.py"))
    code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]

    def make(form: str = "bf16", **shape: object) -> Path:
        from vllm_dsv4.checkpoint.config import Form, Shape
        from vllm_dsv4.checkpoint.write import make_tiny

        name = "-".join([form, *(f"{key}={shape[key]}" for key in sorted(shape))])
        folder = CACHE / code / name.replace(" ", "")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Suites run two at a time, and may want the same one.
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / ".complete").exists():
                shutil.rmtree(folder, ignore_errors=True)
                make_tiny(folder, Shape(**shape), form=Form(form))  # type: ignore[arg-type]
                (folder / ".complete").touch()
        return folder

    return make
