"""Which setting asked for most of the rings: a plan that does not fit names it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_dsv4.commands.planner.options import GIB, PlanOptions
from vllm_dsv4.ring.geometry import RingGeometry
from vllm_dsv4.settings import Settings


@dataclass(frozen=True)
class Part:
    """A part of the rings.

    Attributes:
        cause: the setting that it follows, with its value.
        size: its bytes on one card.
        what: what it holds.
    """

    cause: str
    size: int
    what: str


def largest_part(options: PlanOptions, settings: Settings, rings: RingGeometry) -> Part:
    """The largest of slots, snapshots, and the rows that drafts add to both."""
    without_drafts = replace(rings, lookahead=0)
    snapshots = without_drafts.num_snapshots * without_drafts.bytes_per_snapshot
    default = "" if settings.snapshot_slots is not None else " (the default)"
    return max(
        Part(slots_setting(options, settings), without_drafts.total_bytes - snapshots, "slots"),
        Part(
            f"VLLM_DSV4_SNAPSHOT_SLOTS={rings.num_snapshots}{default}",
            snapshots,
            "snapshots",
        ),
        Part(
            f"--speculative-tokens {options.speculative_tokens}",
            rings.total_bytes - without_drafts.total_bytes,
            "drafts",
        ),
        key=lambda part: part.size,
    )


def slots_setting(options: PlanOptions, settings: Settings) -> str:
    """What the number of slots comes from, with its value."""
    if settings.slots is not None:
        return f"VLLM_DSV4_SLOTS={settings.slots}"
    return f"--max-num-seqs {options.max_num_seqs}"


def taken(part: Part, rings: RingGeometry) -> str:
    """What the rings take, and how much of it the part is where that is not plain."""
    size = f"rings take {rings.total_bytes / GIB:.2f} GiB of each card"
    if part.what == "slots":
        return f"its {size}"
    return f"the {size}, {part.size / GIB:.2f} GiB of it for {part.what}"
