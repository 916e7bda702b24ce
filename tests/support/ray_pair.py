"""Two Ray nodes with one logical device each, whose environments may differ.

``python -m tests.support.ray_pair ENVIRONMENT.json``: the second node's processes get those
variables. Prints the cluster's address, and ends the nodes when its input ends. On loopback Ray's
command line refuses a second node; its testing utility does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.ray_node import LOOPBACK, RayNode, end_node
from tests.support.server import environment

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def two_ray_nodes(second: Mapping[str, str]) -> Iterator[RayNode]:
    """A cluster of two nodes; ``second`` is the environment of one of them only."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_pair", json.dumps(second)],
            cwd=ROOT,
            env=environment() | LOOPBACK | {"RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            assert address, f"no cluster: status {process.wait()}"
            yield RayNode(address, process)
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
