"""What ``--kv-transfer-config`` may ask of the tiers; anything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dsv4.offload.config import CONNECTOR, check_host_memory, check_tiers, read_config
from vllm_dsv4.offload.sizes import RankSizes
from vllm_dsv4.ring.refusal import Refusal


def config(
    extra: dict[str, Any] | None = None,
    *,
    role: str = "kv_both",
    path: str | None = None,
    caching: bool = True,
    algorithm: str = "sha256",
) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=CONNECTOR,
            kv_role=role,
            kv_connector_module_path=path,
            kv_connector_extra_config={"host_gib": 1} if extra is None else extra,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=caching, prefix_caching_hash_algo=algorithm
        ),
    )


def test_sizes_are_read(tmp_path: Path) -> None:
    read = read_config({"host_gib": 0.5, "disk": str(tmp_path / "new"), "disk_gib": 2})
    assert (read.host_bytes, read.disk, read.disk_bytes) == (1 << 29, tmp_path / "new", 2 << 30)
    assert (tmp_path / "new").is_dir()
    check_tiers(config({"host_gib": 1}))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "host_gib"),
        ({"host_gib": 0}, "host_gib=0"),
        ({"host_gib": "64"}, "host_gib=64"),
        ({"host_gib": True}, "host_gib=True"),
        ({"host_gib": float("nan")}, "host_gib=nan"),
        ({"host_gib": 1, "disk": "/tmp"}, "disk_gib"),
        ({"host_gib": 1, "disk_gib": 5}, "disk=None"),
        ({"host_gib": 1, "disk": "here", "disk_gib": 5}, "disk=here"),
        ({"host_gib": 1, "disk": "/proc/none", "disk_gib": 5}, "disk=/proc/none"),
        ({"host_gib": 1, "hostgib": 5}, "hostgib=5"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(Refusal) as refused:
        check_tiers(config(extra))
    assert named in str(refused.value)
    assert "--kv-transfer-config" in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (config(role="kv_producer"), "kv_role=kv_producer"),
        (config(path="some.module"), "kv_connector_module_path=some.module"),
        (config(caching=False), "--no-enable-prefix-caching"),
        (
            config({"host_gib": 1, "disk": "/tmp", "disk_gib": 1}, algorithm="xxhash"),
            "--prefix-caching-hash-algo=xxhash",
        ),
    ],
)
def test_what_else_does_not_go_with_it_is_named(
    asked: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(Refusal) as refused:
        check_tiers(asked)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("host_bytes", "ranks", "said"),
    [
        (5_000_000, 1, "less than one block and one snapshot"),
        (64 << 30, 2, "gives each of 2 ranks 64.00 GiB, and this host has 20.00 GiB left"),
    ],
)
def test_a_pool_that_cannot_be_or_cannot_serve_is_refused(
    host_bytes: int, ranks: int, said: str
) -> None:
    sizes = RankSizes.of(1 << 20, 5 << 20, host_bytes)
    with pytest.raises(Refusal, match="host_gib=") as refused:
        check_host_memory(sizes, ranks, available=20 << 30)
    assert said in str(refused.value)


def test_a_pool_that_fits_passes() -> None:
    check_host_memory(RankSizes.of(1 << 20, 5 << 20, 6 << 20), 8, available=20 << 30)
