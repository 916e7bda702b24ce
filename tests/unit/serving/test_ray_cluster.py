"""What a Ray cluster must have for the ranks; clusters that do are in tests/cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.serving import ray_cluster
from vllm_dsv4.serving.ray_cluster import check_ray_cluster


def config(tensor: int = 1, pipeline: int = 1, **changes: Any) -> Any:
    parallel = {
        "distributed_executor_backend": "ray",
        "placement_group": None,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "world_size": tensor * pipeline,
    }
    return SimpleNamespace(parallel_config=SimpleNamespace(**(parallel | changes)))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    """``cluster(resources)``: what the cluster answers."""

    def answer(resources: dict[str, float] | None) -> None:
        monkeypatch.setattr(ray_cluster, "cluster_resources", lambda: resources)

    return answer


@pytest.mark.parametrize("devices", [4, 5])
def test_a_device_for_each_rank_is_enough(cluster, devices: int) -> None:
    cluster({"GPU": float(devices), "CPU": 1.0})
    check_ray_cluster(config(tensor=2, pipeline=2))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "flag"),
    [(8, 2, "--tensor-parallel-size"), (1, 5, "--pipeline-parallel-size")],
)
def test_fewer_devices_name_the_larger_size(cluster, tensor: int, pipeline: int, flag: str) -> None:
    cluster({"GPU": 4.0})
    with pytest.raises(Refusal) as raised:
        check_ray_cluster(config(tensor, pipeline))
    assert (raised.value.flag, raised.value.value) == (flag, max(tensor, pipeline))
    assert "the Ray cluster has 4" in str(raised.value)


def test_a_cluster_without_devices_has_none(cluster) -> None:
    cluster({"CPU": 8.0})
    with pytest.raises(Refusal, match="the Ray cluster has 0"):
        check_ray_cluster(config(tensor=2))


def test_without_a_cluster_the_cpu_build_has_no_device(cluster) -> None:
    cluster(None)
    with pytest.raises(Refusal, match=r"Start one with `ray start --head --num-gpus 2`"):
        check_ray_cluster(config(tensor=2))


@pytest.mark.parametrize(
    "changes", [{"distributed_executor_backend": "mp"}, {"placement_group": object()}]
)
def test_other_executors_and_given_groups_ask_no_cluster(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(ray_cluster, "cluster_resources", lambda: pytest.fail("asked"))
    check_ray_cluster(config(tensor=2, **changes))


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray_cluster, "ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 0.2)
    with pytest.raises(Refusal, match=r"^RAY_ADDRESS=10\.0\.0\.1:6379: no answer within"):
        check_ray_cluster(config(tensor=2))


def test_a_cluster_that_grows_by_itself_may_be_waited_for(
    cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster({"GPU": 0.0})
    monkeypatch.setenv("VLLM_DSV4_CHECK_RAY", "0")
    check_ray_cluster(config(tensor=2))
