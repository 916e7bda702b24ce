"""A Ray cluster that cannot carry the ranks is refused before vLLM waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ray_node import RayNode, ray_node, seconds_within

REFUSED_WITHIN = 60.0
"""Seconds; vLLM would wait 1800 for a device that is not there."""


def configure(model: Path, ranks: int) -> None:
    """What `vllm serve` does first, in the process that starts the engine."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model), tensor_parallel_size=ranks, distributed_executor_backend="ray"
    )
    with seconds_within(REFUSED_WITHIN, "the check of the configuration"):
        arguments.create_engine_config()


def refused(model: Path, ranks: int, env: dict[str, str], patch: pytest.MonkeyPatch) -> str:
    """The error of a configuration; vLLM wraps a refusal in an error of its own."""
    for name, value in env.items():
        patch.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        configure(model, ranks)
    return str(raised.value)


def test_enough_devices_are_accepted(
    node: RayNode, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node.environment.items():
        monkeypatch.setenv(name, value)
    configure(model, 2)


def test_fewer_devices_than_ranks(
    node: RayNode, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = refused(model, 4, node.environment, monkeypatch)
    assert "--tensor-parallel-size=4: 4 ranks need a device (GPU) each" in told
    assert "and the Ray cluster has 2. Lower --tensor-parallel-size, start the other" in told


def test_a_cluster_of_another_version(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '1.2.3'\n")
    with ray_node(devices=2, env={"PYTHONPATH": str(tmp_path)}) as other:
        told = refused(model, 2, other.environment, monkeypatch)
    assert "--distributed-executor-backend=ray: the Ray cluster" in told
    assert "The cluster was started with: Ray: 1.2.3" in told
    assert "Install the same versions of Ray and Python on every node" in told
