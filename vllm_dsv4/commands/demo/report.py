"""The demonstration's figures as text."""

from vllm_dsv4.commands.demo.result import Result, SlotTable, ring_wraps
from vllm_dsv4.ring.geometry import RingGeometry

MIB = 2**20


def requests_table(result: Result, rows: int) -> str:
    """One line a request: prompt tokens, wraps of a ring of ``rows`` rows, tokens, speed."""
    lines = ["request  prompt tokens  ring wraps  generated  tokens/s"]
    for number, served in enumerate(result.requests):
        wraps = ring_wraps(served.prompt_tokens, len(served.tokens), rows)
        lines.append(
            f"{number:7d}  {served.prompt_tokens:13,d}  {wraps:10d}  {len(served.tokens):9d}  "
            f"{served.tokens_per_second:8.1f}"
        )
    generated = sum(len(served.tokens) for served in result.requests)
    lines.append(
        f"all: {generated} tokens in {result.seconds:.1f} s, "
        f"{generated / result.seconds:.1f} tokens/s, prompts included"
    )
    return "\n".join(lines)


def slots_table(slots: SlotTable, rows: int) -> str:
    """Who held which slot when most were in use, and how the pool stood afterwards."""
    lines = [f"slot table when busiest ({slots.waiting} requests waiting):"]
    for holder in slots.busiest:
        row = (holder.tokens - 1) % rows
        lines.append(
            f"  slot {holder.slot}: request {holder.request}, {holder.tokens:,d} tokens, "
            f"newest in row {row} of {rows}"
            if holder.tokens
            else f"  slot {holder.slot}: request {holder.request}, in prefill"
        )
    lines.append(
        f"afterwards: {slots.total} slots, {slots.free_after} free, "
        f"{slots.total - slots.free_after} held; lent {slots.lent} times"
    )
    return "\n".join(lines)


def capacity_table(rings: Result, paged: Result, geometry: RingGeometry, budget: int) -> str:
    """What vLLM reports that ``budget`` bytes hold, with rings and without."""
    ratio = rings.capacity_tokens / paged.capacity_tokens
    return "\n".join(
        [
            f"capacity in {budget / MIB:.0f} MiB, as vLLM reports it for requests of up to "
            f"{geometry.max_model_len:,d} tokens:",
            f"  paged  {paged.capacity_tokens:11,d} tokens; window and state blocks of a whole "
            "prefill are reserved for each request",
            f"  rings  {rings.capacity_tokens:11,d} tokens ({ratio:.1f} times); "
            f"{geometry.num_slots} slots and the null slot of {geometry.bytes_per_slot / MIB:.1f} "
            f"MiB each, {geometry.total_bytes / MIB:.1f} MiB in all, are paid from the same memory",
        ]
    )


def agreement(rings: Result, paged: Result) -> str:
    """How many requests got the same tokens from both."""
    pairs = zip(rings.requests, paged.requests, strict=True)
    same = sum(ours.tokens == theirs.tokens for ours, theirs in pairs)
    return f"tokens equal to vLLM's own paged path: {same} of {len(rings.requests)} requests"
