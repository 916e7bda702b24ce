"""Ray nodes of the tests' own, on loopback, with logical devices."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.server import environment, free_port, wait_for

START_SECONDS = 120
RANK_TITLES = ("RayWorkerProc", "VLLM::Worker")
"""A rank's process has Ray's title, or vLLM's."""
LOOPBACK = {
    # Ray replaces 127.0.0.1 by an outside address unless it is told that it has no cluster of
    # hosts; a node whose address is 127.0.0.1 listens there only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    # Ranks that wait for each other in a spin need a core each; Ray would count threads instead.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class RayNode:
    """A running node. ``environment`` makes a process of the test join its cluster."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        return LOOPBACK | {"RAY_ADDRESS": self.address, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def workers(self) -> list[psutil.Process]:
        """Processes of vLLM's ranks on this node."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any(mark in _name(child) for mark in RANK_TITLES)]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def ray_node(devices: int) -> Iterator[RayNode]:
    """Start a cluster of one node with logical devices; end every process of it afterwards."""
    ray = Path(sys.executable).parent / "ray"
    # A short path: Ray makes sockets below it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        command = [str(ray), "start", "--block", "--disable-usage-stats"]
        command += ["--head", "--port", str(port), "--ray-client-server-port", str(free_port())]
        command += ["--node-ip-address", "127.0.0.1", "--min-worker-port", "0"]
        command += ["--max-worker-port", "0", "--include-dashboard", "false"]
        command += ["--num-cpus", "2", "--num-gpus", str(devices)]
        command += ["--object-store-memory", str(100 << 20), "--temp-dir", folder]
        log_file = Path(folder) / "ray.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment() | LOOPBACK,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            wait_for(lambda: _started(process, log_file), START_SECONDS, "Ray to start")
            yield RayNode(f"127.0.0.1:{port}", process)
        finally:
            end_node(process)


def _started(process: subprocess.Popen[bytes], log_file: Path) -> bool:
    log = log_file.read_text(errors="replace")
    assert process.poll() is None, f"ray start ended with {process.returncode}: {log}"
    return "Ray runtime started" in log


def end_node(process: subprocess.Popen[bytes]) -> None:
    """End what started the node, and the processes below it, however deep."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=10)
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=10)


@contextmanager
def seconds_within(limit: float, what: str) -> Iterator[None]:
    """Fail if the block took longer than ``limit`` seconds."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < limit, f"{what} took {took:.1f} seconds"
