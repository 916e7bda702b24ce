"""A rank that lacks the plugin, or has another version or other settings, is named at the start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.fake_distribution import add_distribution
from tests.support.ray_node import RayNode, seconds_within
from tests.support.ray_pair import two_ray_nodes
from tests.support.server import EXAMPLES, environment
from vllm_dsv4.serving.ranks import DISTRIBUTION, installed_version

START_SECONDS = 240.0
"""For a start that fails; one that succeeds takes as long here."""


def start(node: RayNode, model: Path) -> str:
    """Start two ranks, which must fail, and return what was printed."""
    with seconds_within(START_SECONDS, "a start with a rank that does not fit"):
        done = subprocess.run(
            [*node.enter, sys.executable, EXAMPLES / "ray_tp2.py", model, "--max-tokens", "1"],
            # Ray adds the driver's folder to the ranks' paths: not the source tree's metadata.
            cwd=EXAMPLES,
            env=environment() | node.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode != 0
    printed = done.stdout + done.stderr
    assert re.search(rf"RankMismatch: process \d+ on host {node.last_host} ", printed)
    return printed


def test_a_rank_whose_plugin_is_shut_out(model: Path) -> None:
    with two_ray_nodes({"VLLM_PLUGINS": ""}) as node:
        printed = start(node, model)
    assert "does not run the vllm-dsv4 plugin, the driver does" in printed
    assert "Check VLLM_PLUGINS" in printed


def test_a_rank_with_another_version(model: Path, tmp_path: Path) -> None:
    entry_points = {
        "vllm.platform_plugins": {"dsv4": "vllm_dsv4.entrypoints:platform"},
        "vllm.general_plugins": {"dsv4": "vllm_dsv4.entrypoints:register"},
    }
    add_distribution(tmp_path, DISTRIBUTION, "9.9.9", entry_points)
    with two_ray_nodes({"PYTHONPATH": str(tmp_path)}) as node:
        printed = start(node, model)
    assert f"has vllm-dsv4 9.9.9, the driver has {installed_version()}" in printed
    assert "install the same version on every node" in printed


def test_a_rank_with_another_setting(model: Path) -> None:
    with two_ray_nodes({"VLLM_DSV4_SLOTS": "3"}) as node:
        printed = start(node, model)
    assert "has VLLM_DSV4_SLOTS=3, the driver has not set it" in printed
    assert "unset VLLM_DSV4_SLOTS on that host and start its Ray node again" in printed
