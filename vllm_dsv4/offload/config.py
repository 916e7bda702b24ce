"""What the operator asks of the tiers: ``--kv-transfer-config``, checked before anything starts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dsv4.ring.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dsv4.offload.sizes import RankSizes

CONNECTOR = "Dsv4RingConnector"
FLAG = "--kv-transfer-config"
EXAMPLE = (
    '{"kv_connector": "Dsv4RingConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"host_gib": 64}}'
)
HOST, DISK, DISK_SIZE, STAGING = "host_gib", "disk", "disk_gib", "staging_mib"
DEFAULT_STAGING_MIB = 64


@dataclass(frozen=True)
class OffloadConfig:
    """Sizes of the tiers.

    Attributes:
        host_bytes: host memory of all ranks of an engine together. Each rank keeps what it needs
            itself; tensor-parallel ranks hold the same bytes.
        disk: folder of the files, or None.
        disk_bytes: bytes of files that this engine keeps there.
        staging_bytes: device memory of each rank through which saves leave the card.
    """

    host_bytes: int
    disk: Path | None
    disk_bytes: int
    staging_bytes: int


def uses_tiers(vllm_config: VllmConfig) -> bool:
    """Whether the configuration names our connector."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def read_config(extra: dict[str, Any]) -> OffloadConfig:
    """Parse ``kv_connector_extra_config``.

    Raises:
        Refusal: naming the entry, its value and what can be used.
    """
    known = {HOST, DISK, DISK_SIZE, STAGING}
    for name in extra:
        if name not in known:
            raise _refusal(name, extra[name], "is not known", f"Known are {sorted(known)}")
    if HOST not in extra:
        raise _refusal(HOST, None, "says how much host memory to use", "Give a size in GiB")
    disk = extra.get(DISK)
    if (disk is None) != (DISK_SIZE not in extra):
        missing, given = (DISK, DISK_SIZE) if disk is None else (DISK_SIZE, DISK)
        raise _refusal(missing, None, f"is needed beside {given}", "Give both or neither")
    return OffloadConfig(
        host_bytes=_size(extra, HOST, 1 << 30),
        disk=None if disk is None else _folder(disk),
        disk_bytes=0 if disk is None else _size(extra, DISK_SIZE, 1 << 30),
        staging_bytes=_size({STAGING: DEFAULT_STAGING_MIB} | extra, STAGING, 1 << 20),
    )


def check_tiers(vllm_config: VllmConfig) -> None:
    """Refuse what the tiers cannot do.

    Raises:
        Refusal: before anything is allocated.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_role != "kv_both":
        raise Refusal(
            f"{FLAG} kv_role",
            transfer.kv_role,
            "host memory and disk are written and read by the same server",
            "Use kv_both",
        )
    if transfer.kv_connector_module_path:
        raise Refusal(
            f"{FLAG} kv_connector_module_path",
            transfer.kv_connector_module_path,
            f"the plugin registers {CONNECTOR} itself",
            "Remove the entry",
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise Refusal(
            "--no-enable-prefix-caching",
            True,
            f"{CONNECTOR} keeps what prefix caching finds",
            f"Remove the flag, or {FLAG}",
        )
    config = read_config(transfer.kv_connector_extra_config)
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if config.disk and algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise Refusal(
            "--prefix-caching-hash-algo",
            algorithm,
            "vLLM begins its hashes with another random number at each start, so that no file "
            "would be found again",
            "Use sha256, or set PYTHONHASHSEED",
        )


def check_host_memory(sizes: RankSizes, ranks: int, available: int) -> None:
    """Refuse a pool that this host has no memory for, or that could never serve a load.

    Args:
        sizes: of one rank.
        ranks: of the engine, which share ``host_gib``.
        available: bytes of this host.

    Raises:
        Refusal: before the pool is allocated.
    """
    wanted = sizes.num_units * sizes.unit_bytes
    given = round(wanted * ranks / 2**30, 2)
    least = (1 + sizes.units_per_snapshot) * sizes.unit_bytes
    if wanted < least:
        raise _refusal(
            HOST,
            given,
            f"leaves each of {ranks} ranks less than one block and one snapshot, {least:,} bytes",
            f"Give {least * ranks / 2**30:.2f} or more",
        )
    if wanted > available:
        raise _refusal(
            HOST,
            given,
            f"gives each of {ranks} ranks {wanted / 2**30:.2f} GiB, and this host has "
            f"{available / 2**30:.2f} GiB left",
            "Give less",
        )


def _size(extra: dict[str, Any], name: str, unit: int) -> int:
    value = extra[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(name, value, "is no number", "Give a size above 0")
    if not (math.isfinite(value) and value > 0):
        raise _refusal(name, value, "is no size", "Give a size above 0")
    return int(value * unit)


def _folder(value: object) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise _refusal(DISK, value, "is no absolute path", "Name a folder from / on")
    folder = Path(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(DISK, value, f"cannot be made ({error.strerror})", "Name another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refusal(DISK, value, "cannot be written", "Name a folder that this user may write")
    return folder


def _refusal(name: str, value: object, reason: str, remedy: str) -> Refusal:
    return Refusal(f"{FLAG} kv_connector_extra_config.{name}", value, f"it {reason}", remedy)
