"""``vllm-dsv4 doctor`` in environments where the plugin is live, shut out, and switched off."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_distribution import add_distribution
from vllm_dsv4.cpu.metadata_kernels import KERNELS

OURS = "vllm_dsv4."


def diagnose(*flags: str, **environment: str) -> tuple[int, dict[str, Any]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_dsv4.commands.cli.main", "doctor", "--json", *flags],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def live() -> tuple[int, dict[str, Any]]:
    return diagnose()


def test_an_installed_plugin_is_live_and_says_what_vllm_resolves(live):
    status, found = live
    assert (status, found["live"], found["reasons"]) == (0, True, [])
    assert found["platform"] == "vllm_dsv4.cpu.platform.Dsv4CpuPlatform"
    assert found["model"] == "vllm_dsv4.cpu.model.DeepseekV4ForCausalLM"
    assert found["spec"] == "vllm_dsv4.ring.spec.RingSpec"
    assert found["manager"] == "vllm_dsv4.serving.ring_manager.CountedRingManager"
    assert found["model_runner"] in ("v1", "v2")
    assert found["data_parallel"].startswith("data and expert parallelism over vllm_dsv4.fixes.")
    assert found["devices"][0]["memory_bytes"] > 0


def test_versions_are_those_that_are_installed(live):
    _, found = live
    assert found["versions"] == {
        name: metadata.version(name) for name in ("vllm", "torch", "triton", "ray", "vllm-dsv4")
    }


def test_both_entry_points_are_listed_under_one_name(live):
    _, found = live
    ours = [point for point in found["entry_points"] if point["value"].startswith(OURS)]
    assert [(p["group"], p["name"]) for p in ours] == [
        ("vllm.platform_plugins", "dsv4"),
        ("vllm.general_plugins", "dsv4"),
    ]


def test_workarounds_in_force_are_the_kernels_the_workers_and_not_the_paged_paths(live):
    _, found = live
    in_force = {w["name"]: w["in_force"] for w in found["workarounds"]}
    assert not in_force.pop("paged_swa_builder")
    assert not in_force.pop("triton_interpreter")
    assert not in_force.pop("cpu_expert_map")
    assert in_force.pop("seeded_chunks")
    assert in_force.pop("cpu_communicator")
    assert in_force == {f"metadata_kernels.{ours.__name__}": True for ours in KERNELS.values()}
    assert all(w["why"] for w in found["workarounds"])


def test_a_plugin_shut_out_by_vllm_plugins_is_not_live_and_the_variable_is_named():
    status, found = diagnose(VLLM_PLUGINS="")
    assert (status, found["live"]) == (1, False)
    assert any("VLLM_PLUGINS=''" in reason for reason in found["reasons"])
    assert not found["platform"].startswith(OURS)
    assert not found["model"].startswith(OURS)
    assert found["data_parallel"].startswith("one only: vllm.")
    assert found["manager"] != "vllm_dsv4.serving.ring_manager.CountedRingManager"


def test_with_rings_switched_off_the_paged_model_and_its_fix_are_reported():
    status, found = diagnose(VLLM_DSV4_RING="0")
    assert (status, found["live"]) == (1, False)
    assert any("VLLM_DSV4_RING=0" in reason for reason in found["reasons"])
    assert found["model"] == "vllm_dsv4.cpu.paged_model.PagedDeepseekV4ForCausalLM"
    in_force = {w["name"]: w["in_force"] for w in found["workarounds"]}
    assert in_force["paged_swa_builder"]
    assert not in_force["seeded_chunks"]


def test_with_tritons_interpreter_its_fix_is_in_force_and_the_kernels_are_not():
    status, found = diagnose(TRITON_INTERPRET="1")
    in_force = {w["name"]: w["in_force"] for w in found["workarounds"]}
    assert status == 0, found["reasons"]
    assert in_force.pop("triton_interpreter")
    assert in_force.pop("cpu_communicator")
    assert not any(in_force.values())


def test_a_setting_that_cannot_be_parsed_is_a_finding_and_not_a_traceback():
    status, found = diagnose(VLLM_DSV4_SLOTS="many")
    assert status == 1
    assert any("VLLM_DSV4_SLOTS='many'" in reason for reason in found["reasons"])


def test_a_setting_that_serve_would_refuse_is_not_live():
    status, found = diagnose(VLLM_DSV4_SNAPSHOT_INTERVAL="100")
    assert status == 1
    assert any("VLLM_DSV4_SNAPSHOT_INTERVAL=100" in reason for reason in found["reasons"])


@pytest.fixture
def rocm_image(tmp_path: Path) -> Path:
    """What a ROCm build of vLLM adds to the path, where no card is."""
    add_distribution(tmp_path, "vllm", "0.32.0+rocm721")
    (tmp_path / "amdsmi.py").write_text("raise AssertionError('not needed without a card')")
    return tmp_path


def test_without_a_card_a_rocm_build_is_told_installed_and_not_live(rocm_image: Path) -> None:
    status, found = diagnose("--without-card", PYTHONPATH=str(rocm_image))
    assert (status, found["reasons"]) == (0, [])
    assert (found["live"], found["vllm_was_asked"]) == (False, False)
    assert found["versions"]["vllm"] == "0.32.0+rocm721"


def test_without_a_card_what_shuts_the_plugin_out_is_seen_all_the_same(rocm_image: Path) -> None:
    status, found = diagnose("--without-card", PYTHONPATH=str(rocm_image), VLLM_PLUGINS="")
    assert status == 1
    assert any("VLLM_PLUGINS=''" in reason for reason in found["reasons"])


def test_without_a_card_a_build_that_could_not_see_one_is_told(rocm_image: Path) -> None:
    (rocm_image / "amdsmi.py").unlink()
    status, found = diagnose("--without-card", PYTHONPATH=str(rocm_image))
    assert status == 1
    assert found["reasons"] == [reason for reason in found["reasons"] if "amdsmi" in reason]


def test_a_cpu_build_is_asked_without_that_flag() -> None:
    status, found = diagnose("--without-card")
    assert status == 1
    assert any("leave out --without-card" in reason for reason in found["reasons"])
