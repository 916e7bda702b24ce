"""Ray nodes of the tests' own, with logical devices, on loopback or on hosts of the tests' own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.server import environment, free_port, wait_for

START_SECONDS = 120
RANK_TITLES = ("RayWorkerProc", "VLLM::Worker")
"""A rank's process has Ray's title, or vLLM's."""
GCS = "gcs_server"
"""The process that makes a node the head of its cluster."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ranks that wait for each other in a spin need a core each; Ray would count threads instead.
    "OMP_NUM_THREADS": "1",
}
LOOPBACK = QUIET | {
    # Ray replaces 127.0.0.1 by an outside address unless it is told that it has no cluster of
    # hosts; a node whose address is 127.0.0.1 listens there only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}
NO_BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM would give each rank the cores of a NUMA node of its own."""


@dataclass(frozen=True)
class RayNode:
    """The head node of a running cluster.

    Attributes:
        process: what started the node, and is above its processes.
        host: environment of every process on the head's host.
        enter: put before a command to run it on the head's host.
        last_host: name of the cluster's last host, as its processes see it.
    """

    address: str
    process: subprocess.Popen[bytes]
    host: Mapping[str, str] = field(default_factory=lambda: LOOPBACK)
    enter: tuple[str, ...] = ()
    last_host: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Makes a process of the test join the cluster."""
        return {**self.host, **NO_BINDING, "RAY_ADDRESS": self.address}

    def workers(self) -> list[psutil.Process]:
        """Processes of vLLM's ranks on this node."""
        return [one for one in self._below() if any(mark in _name(one) for mark in RANK_TITLES)]

    def head(self) -> psutil.Process:
        """The cluster's directory of nodes and actors."""
        (found,) = (one for one in self._below() if one.name() == GCS)
        return found

    def _below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def ray_node(devices: int, env: Mapping[str, str] | None = None) -> Iterator[RayNode]:
    """A cluster of one node on loopback.

    Args:
        env: environment of the node, beside this process's.
    """
    port = free_port()
    command = [*head(port, "127.0.0.1"), "--ray-client-server-port", str(free_port())]
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]
    with started(command, devices, {**LOOPBACK, **(env or {})}) as process:
        yield RayNode(f"127.0.0.1:{port}", process)


def head(port: int, address: str) -> list[str]:
    """Flags of ``ray start`` for a cluster's first node."""
    flags = ["--head", "--port", str(port), "--node-ip-address", address]
    return [*flags, "--include-dashboard", "false"]


@contextmanager
def started(
    flags: Sequence[str], devices: int, env: Mapping[str, str], enter: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """``ray start --block`` with logical devices; end every process of it afterwards."""
    ray = Path(sys.executable).parent / "ray"
    # A short path: Ray makes sockets below it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [*enter, str(ray), "start", "--block", "--disable-usage-stats", *flags]
        command += ["--num-cpus", "2", "--num-gpus", str(devices)]
        command += ["--object-store-memory", str(100 << 20), "--temp-dir", folder]
        log_file = Path(folder) / "ray.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment() | dict(env),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            wait_for(lambda: _started(process, log_file), START_SECONDS, "Ray to start")
            yield process
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
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < limit, f"{what} took {took:.1f} seconds"
