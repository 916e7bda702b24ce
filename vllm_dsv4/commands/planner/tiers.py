"""What host memory and disk hold of a planned deployment's prefix cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_dsv4.commands.planner.options import GIB, PlanOptions
from vllm_dsv4.offload.sizes import RankSizes
from vllm_dsv4.ring.geometry import BLOCK_SIZE

CONVERSATION_TOKENS = 8192
"""Of a resting conversation, by which tiers are compared."""


@dataclass(frozen=True)
class TierPlan:
    """One tier of one engine.

    Attributes:
        name: host or disk.
        gib: its size.
        copies: how often a byte is kept in it: once on disk, by each tensor-parallel rank in host
            memory.
        tokens: that it holds of conversations of ``CONVERSATION_TOKENS``.
        conversations: of that length.
        bytes_per_token: of pages, without what rests at a conversation's end.
        bytes_per_conversation: its pages and one snapshot, each copy of it.
        paged_bytes_per_token: what a token takes in vLLM's own pool without rings: what a tier
            for the paged path would move.
    """

    name: str
    gib: float
    copies: int
    tokens: int
    conversations: int
    bytes_per_token: float
    bytes_per_conversation: int
    paged_bytes_per_token: float

    def describe(self) -> str:
        copies = f", kept by each of {self.copies} ranks" if self.copies > 1 else ""
        return (
            f"  {self.name:<5}{self.gib:>9g} GiB   {self.conversations:,} resting conversations of "
            f"{CONVERSATION_TOKENS:,} tokens, {self.tokens:,} tokens{copies}"
        )


def plan_tiers(
    options: PlanOptions, bytes_per_block: int, bytes_per_snapshot: int, paged_tokens: int
) -> list[TierPlan]:
    """The tiers that the options name.

    Args:
        paged_tokens: that vLLM's own pool holds in the same memory.
    """
    sizes = RankSizes.of(bytes_per_block, bytes_per_snapshot, 0)
    blocks = CONVERSATION_TOKENS // BLOCK_SIZE
    units = blocks + sizes.units_per_snapshot
    tiers = []
    for name, gib, copies, nbytes in (
        ("host", options.host_gib, options.tensor_parallel_size, units * sizes.unit_bytes),
        ("disk", options.disk_gib, 1, blocks * sizes.page_bytes + sizes.snapshot_bytes),
    ):
        if gib:
            conversations = int(gib * GIB / copies) // nbytes
            tiers.append(
                TierPlan(
                    name=name,
                    gib=gib,
                    copies=copies,
                    tokens=conversations * CONVERSATION_TOKENS,
                    conversations=conversations,
                    bytes_per_token=sizes.page_bytes / BLOCK_SIZE,
                    bytes_per_conversation=nbytes,
                    paged_bytes_per_token=options.cache_bytes / paged_tokens,
                )
            )
    return tiers


def describe_tiers(tiers: list[TierPlan]) -> str:
    """The tiers in words, with what a byte of them is spent on."""
    first = tiers[0]
    return "\n".join(
        [
            "Prefix cache behind the cards (--kv-transfer-config, Dsv4RingConnector), an engine:",
            *(tier.describe() for tier in tiers),
            f"  A token takes {first.bytes_per_token:,.0f} bytes there, and a conversation at rest "
            f"{first.bytes_per_conversation / 1e6:.1f} MB; in vLLM's paged pool a token takes "
            f"{first.paged_bytes_per_token:,.0f}.",
        ]
    )


def tiers_as_json(tiers: list[TierPlan]) -> dict[str, Any]:
    return {tier.name: asdict(tier) for tier in tiers}
