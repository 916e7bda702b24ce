"""``plan --host-gib --disk-gib``: what a tier holds, by the sizes that the tiers themselves use."""

from __future__ import annotations

import pytest

from vllm_dsv4.commands.planner.models import find_model
from vllm_dsv4.commands.planner.options import BadFlag, PlanOptions
from vllm_dsv4.commands.planner.plan import Plan, make_plan
from vllm_dsv4.commands.planner.report import describe

FLASH = {"page": 1_002_240, "snapshot": 4_934_656}
"""Bytes, of vLLM 0.32's layout and our rings."""


def plan(**options: object) -> Plan:
    return make_plan(PlanOptions(model=find_model("flash"), **options))  # type: ignore[arg-type]


def test_a_conversation_is_its_pages_and_a_snapshot_in_whole_units() -> None:
    tiers = plan(host_gib=64, disk_gib=500).to_json()["tiers"]
    pages = 8192 // 256 * FLASH["page"]
    units = -(-FLASH["snapshot"] // FLASH["page"])
    assert tiers["host"]["bytes_per_conversation"] == pages + units * FLASH["page"]
    assert tiers["disk"]["bytes_per_conversation"] == pages + FLASH["snapshot"]
    for tier, gib in (("host", 64), ("disk", 500)):
        found = tiers[tier]
        assert found["conversations"] == (gib << 30) // found["bytes_per_conversation"]
        assert found["tokens"] == 8192 * found["conversations"]
        assert found["bytes_per_token"] == FLASH["page"] / 256
        assert found["paged_bytes_per_token"] > 5 * found["bytes_per_token"]


def test_each_rank_keeps_its_own_bytes_in_host_memory_and_one_writes_the_disk() -> None:
    one = plan(host_gib=64, disk_gib=500).to_json()["tiers"]
    two = plan(host_gib=64, disk_gib=500, tensor_parallel_size=2).to_json()["tiers"]
    assert two["host"]["conversations"] == one["host"]["conversations"] // 2
    assert two["disk"]["conversations"] == one["disk"]["conversations"]
    assert "kept by each of 2 ranks" in describe(plan(host_gib=64, tensor_parallel_size=2))


def test_without_tiers_nothing_is_said_of_them() -> None:
    bare = plan()
    assert bare.to_json()["tiers"] == {}
    assert "Dsv4RingConnector" not in describe(bare)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_gib": -1}, "--host-gib -1"),
        ({"host_gib": float("nan")}, "--host-gib nan"),
        ({"host_gib": 1, "disk_gib": float("inf")}, "--disk-gib inf"),
        ({"disk_gib": 5}, "Give --host-gib too"),
    ],
)
def test_a_size_that_no_tier_has_is_named(options: dict[str, float], said: str) -> None:
    with pytest.raises(BadFlag) as refused:
        plan(**options)
    assert said in str(refused.value)
