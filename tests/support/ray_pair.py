"""Two Ray nodes with one logical device each, whose environments may differ.

On two hosts (see ``hosts``) where the machine allows them, started as on real ones. Else, or where
a test asks for it, on one host: ``python -m tests.support.ray_pair ENVIRONMENT.json`` prints the
cluster's address and ends the nodes when its input ends; the second node's processes get those
variables. On loopback Ray's command line refuses a second node; its testing utility does not, and
nothing watches over these nodes, as after ``ray start`` without ``--block``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.hosts import INTERFACE, Host, HostsNotAllowed, two_hosts
from tests.support.ray_node import LOOPBACK, QUIET, RayNode, end_node, head, started
from tests.support.server import environment

ROOT = Path(__file__).parent.parent.parent
PORT = 6379


class OneHostOnly(UserWarning):
    """A test of two hosts ran on two nodes of one host."""


@contextmanager
def two_ray_nodes(second: Mapping[str, str]) -> Iterator[RayNode]:
    """A cluster on two hosts; ``second`` is the environment of one of them only."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except HostsNotAllowed as reason:
            warnings.warn(f"two Ray nodes on one host, not on two: {reason}", OneHostOnly, 2)
            yield stack.enter_context(two_ray_nodes_on_one_host(second))
        else:
            yield stack.enter_context(_nodes_on(*hosts, second))


@contextmanager
def _nodes_on(first: Host, last: Host, second: Mapping[str, str]) -> Iterator[RayNode]:
    address = f"{first.address}:{PORT}"
    join = ["--address", address, "--node-ip-address", last.address]
    # Else Gloo takes the address that the host's name resolves to, or loopback.
    both = QUIET | {"GLOO_SOCKET_IFNAME": INTERFACE}
    with (
        started(head(PORT, first.address), 1, both, first.enter) as process,
        started(join, 1, {**both, **second}, last.enter),
    ):
        yield RayNode(address, process, both, first.enter, last.name)


@contextmanager
def two_ray_nodes_on_one_host(
    second: Mapping[str, str], both: Mapping[str, str] | None = None
) -> Iterator[RayNode]:
    """A cluster of two nodes on loopback.

    Args:
        second: environment of one of them only.
        both: environment of both.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        host = {**LOOPBACK, **(both or {})}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_pair", json.dumps(dict(second))],
            cwd=ROOT,
            env=environment() | host | {"RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            assert address, f"no cluster: status {process.wait()}"
            yield RayNode(address, process, host, last_host=socket.gethostname())
        finally:
            end_node(process)


def main(second: Mapping[str, str]) -> None:
    from ray.cluster_utils import Cluster

    node = {"num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    os.environ.update(second)
    cluster.add_node(num_gpus=1, object_store_memory=100 << 20)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
