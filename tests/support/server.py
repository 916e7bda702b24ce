"""``vllm serve`` in processes of its own, started by a script of ``examples/``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
START_SECONDS = 300
STOP_SECONDS = 60


class ServerEnded(AssertionError):
    """The server's process ended before it was asked to; the message ends with its log."""


class Server:
    """A server on loopback, from its start on.

    Attributes:
        url: without ``/v1``.
        log_file: everything that its processes print.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = log_file

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Return as soon as the server says that it is healthy."""
        wait_for(self._healthy, seconds, "the server to be ready")

    def _healthy(self) -> bool:
        if self.process.poll() is not None:
            raise ServerEnded(f"status {self.process.returncode}: {self.log[-4000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def samples(self) -> list[Sample]:
        """Everything on ``/metrics``."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]

    def metrics(self) -> dict[str, float]:
        """Samples of engine 0 by name, of metrics without labels of their own."""
        return {
            sample.name: sample.value
            for sample in self.samples()
            if sample.labels == {"model_name": "dsv4", "engine": "0"}
        }

    def stop(self) -> int:
        """Ask it to end as an operator would; return its status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def server(
    script: str, model: Path, folder: Path, env: dict[str, str], flags: Sequence[str] = ()
) -> Iterator[Server]:
    """Start ``examples/SCRIPT MODEL``; do not wait. Nothing of it is left afterwards.

    Args:
        folder: gets the log, ``server.log``.
        env: environment beside this process's.
        flags: of ``vllm serve``, after the script's own.
    """
    port = free_port()
    command = [EXAMPLES / script, model, *flags]
    with serving(command, port, folder, {"PORT": str(port)} | env) as running:
        yield running


@contextmanager
def serving(
    command: Sequence[str | Path], port: int, folder: Path, env: dict[str, str]
) -> Iterator[Server]:
    """As ``server``, of any command that serves on a port of loopback."""
    log_file = folder / "server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment() | env,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield Server(process, port, log_file)
    finally:
        end_session(process)


def environment() -> dict[str, str]:
    """This environment, with the virtual environment's commands first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Set for engines inside the test process; a server has an engine process of its own.
    kept = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and every process that it left in it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll ``condition``.

    Raises:
        AssertionError: it stayed false.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} seconds for {what}")
        time.sleep(0.2)
