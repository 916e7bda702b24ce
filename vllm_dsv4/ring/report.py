"""The start-up line: what the rings cost, what is left for pages, and what each number means."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from vllm_dsv4.ring.geometry import C128State

if TYPE_CHECKING:
    from vllm_dsv4.ring.spec import RingSpec

MIB = 1 << 20


def describe_rings(spec: RingSpec, num_blocks: int) -> str:
    """One line for the operator.

    Args:
        num_blocks: blocks of the paged pool, its null block included.
    """
    slots = (spec.num_slots + 1) * spec.bytes_per_slot
    snapshots = spec.num_snapshots * spec.bytes_per_snapshot
    line = (
        f"vllm-dsv4 {metadata.version('vllm-dsv4')} serves DeepSeek-V4 on rings: {spec.num_slots} "
        f"slots of {spec.bytes_per_slot / MIB:.2f} MiB, one per running sequence, and the null slot"
    )
    if spec.c128_state is C128State.ONLINE:
        line += ", open C128 groups as running softmaxes (VLLM_DSV4_C128_STATE=online)"
    if spec.num_snapshots:
        line += (
            f"; {spec.num_snapshots} prefix-cache snapshots of "
            f"{spec.bytes_per_snapshot / MIB:.2f} MiB"
        )
    tokens = (num_blocks - 1) * spec.block_size
    return line + (
        f": {(slots + snapshots) / MIB:.1f} MiB per model replica, outside the paged pool. The "
        f"pool's {num_blocks:,} blocks of {spec.block_size} tokens hold compressed history only, "
        f"{tokens:,} tokens of it over all sequences, the null block left out; the window takes "
        "none of them."
    )
