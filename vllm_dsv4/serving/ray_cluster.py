"""What vLLM needs of a Ray cluster, asked before it waits for it.

For devices that a cluster lacks, vLLM waits half an hour, in case that a node joins. It is asked
by a process of its own: whoever joins a cluster stays in it, and the executor does so later, in
another process and with options of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ANSWER_SECONDS = 120.0
BACKEND = "--distributed-executor-backend"
ASK = """
import json, os, ray
try:
    address = os.environ.get("RAY_ADDRESS") or "auto"
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    answer = {"resources": ray.cluster_resources()}
except ConnectionError:
    answer = {"resources": None}
except RuntimeError as error:
    answer = {"error": " ".join(str(error).split())}
print("\\n" + json.dumps(answer))
"""


def check_ray_cluster(config: VllmConfig) -> None:
    """A device for each rank, and our versions of Ray and Python.

    Raises:
        Refusal: naming the flag, its value, what the cluster has, and the remedy.
    """
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    if parallel.distributed_executor_backend != "ray" or parallel.placement_group is not None:
        return
    if not read_settings().check_ray:
        return
    resources = cluster_resources()
    key = current_platform.ray_device_key
    if resources is None:
        # vLLM starts a cluster of this host alone, which on the CPU build has no device.
        if not current_platform.is_cpu():
            return
        raise Refusal(
            BACKEND,
            "ray",
            "no Ray cluster answers, neither here nor at RAY_ADDRESS",
            f"Start one with `ray start --head --num-gpus {parallel.world_size}`",
        )
    devices = int(resources.get(key, 0))
    if devices >= parallel.world_size:
        return
    sizes = {
        "--tensor-parallel-size": parallel.tensor_parallel_size,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
    }
    flag = max(sizes, key=lambda name: sizes[name])
    raise Refusal(
        flag,
        sizes[flag],
        f"{parallel.world_size} ranks need a device ({key}) each, and the Ray cluster has "
        f"{devices}",
        f"Lower {flag}, start the other nodes first, or declare devices with "
        "`ray start --num-gpus`; VLLM_DSV4_CHECK_RAY=0 waits for a cluster that grows by itself",
    )


def cluster_resources() -> dict[str, float] | None:
    """What the cluster has in all, whether in use or not; None where there is no cluster.

    Raises:
        Refusal: it does not answer, or runs other versions.
    """
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise Refusal(
            "RAY_ADDRESS",
            address,
            f"no answer within {ANSWER_SECONDS:g} seconds",
            "Check it with `ray status`",
        ) from None
    except subprocess.CalledProcessError as failed:
        raise Refusal(
            "RAY_ADDRESS",
            address,
            f"the cluster cannot be asked: {failed.stderr.strip()[-500:]}",
            "Check it with `ray status`",
        ) from None
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise Refusal(
            BACKEND,
            "ray",
            f"the Ray cluster ({address}) cannot be joined: {answer['error']}",
            "Install the same versions of Ray and Python on every node, and start Ray again",
        )
    resources: dict[str, float] | None = answer["resources"]
    return resources
