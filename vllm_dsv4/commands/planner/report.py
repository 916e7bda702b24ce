"""A plan in words, for a terminal."""

from __future__ import annotations

from dataclasses import replace

from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.options import GIB, PlanOptions
from vllm_dsv4.commands.planner.plan import DoesNotFit, Plan, make_plan
from vllm_dsv4.commands.planner.suggest import most_snapshots
from vllm_dsv4.commands.planner.tiers import describe_tiers
from vllm_dsv4.ring.geometry import C128State
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.settings import read_settings


def describe(plan: Plan) -> str:
    """The whole plan: ratios first, then what each side has, then what limits it."""
    parts = [_headline(plan), _asked(plan.options), _memory(plan), _table(plan)]
    if plan.options.data_parallel_size > 1:
        parts.append(_all_engines(plan))
    if plan.tiers:
        parts.append(describe_tiers(plan.tiers))
    parts += _notes(plan)
    return "\n\n".join(parts)


def _headline(plan: Plan) -> str:
    options = plan.options
    engine = ", an engine" if options.data_parallel_size > 1 else ""
    return (
        f"{options.model.name}: {plan.token_ratio:.2f}x the KV capacity in tokens with rings, "
        f"{plan.rings.tokens:,} against {plan.native.tokens:,}{engine}"
    )


def _asked(options: PlanOptions) -> str:
    cards, engines = options.cards, options.data_parallel_size
    drafts = (
        f", {options.speculative_tokens} speculative tokens ({options.speculative_method})"
        if options.speculative_tokens
        else ""
    )
    batches = "two batches" if options.async_scheduling else "one batch"
    in_engines = f" in {engines} engines" if engines > 1 else ""
    if options.enable_expert_parallel:
        in_engines += ", experts in parallel"
    return (
        f"{cards} card{'s' if cards > 1 else ''} of {options.gpu_memory_gib:g} GiB{in_engines}, "
        f"{options.weights_gib:g} GiB of weights, max_model_len {options.max_model_len:,}, "
        f"max_num_seqs {options.max_num_seqs:,}, "
        f"max_num_batched_tokens {options.max_num_batched_tokens:,}{drafts}; "
        f"{batches} in flight"
    )


def _memory(plan: Plan) -> str:
    rings = plan.rings
    caches = plan.options.cache_bytes
    online = "; C128 state online" if plan.c128_state is C128State.ONLINE else ""
    snapshots = (
        f"; {plan.num_snapshots:,} snapshots of {plan.bytes_per_snapshot / 1e6:.2f} MB"
        if plan.num_snapshots
        else ""
    )
    options = plan.options
    several = options.data_parallel_size > 1
    whose = "its engine's" if several else "the"
    weights = f"  weights        {options.card_weights_gib:10.2f} GiB"
    return "\n".join(
        [
            f"Memory of each card (every card holds {whose} whole KV cache):",
            *([weights] if several or options.enable_expert_parallel else []),
            f"  caches in all  {caches / GIB:10.2f} GiB",
            f"  rings          {rings.ring_bytes / GIB:10.2f} GiB   {rings.num_slots:,} slots of "
            f"{rings.bytes_per_slot / 1e6:.2f} MB, and the null slot{snapshots}"
            f"{online}",
            f"  pages          {(caches - rings.ring_bytes) / GIB:10.2f} GiB   "
            f"{rings.num_blocks:,} blocks of {plan.bytes_per_block:,} bytes, 256 tokens each",
        ]
    )


def _table(plan: Plan) -> str:
    native, rings = plan.native, plan.rings
    length = f"{plan.options.max_model_len:,}"
    rows = [
        ("", "paged", "rings"),
        ("blocks in the pool", f"{native.num_blocks:,}", f"{rings.num_blocks:,}"),
        ("KV capacity, tokens", f"{native.tokens:,}", f"{rings.tokens:,}"),
        (f"requests of {length} tokens", f"{native.concurrency:.2f}", f"{rings.concurrency:.2f}"),
        (
            "window and state blocks: decoding request",
            f"{native.blocks_per_decoding_request:,}",
            f"{rings.blocks_per_decoding_request:,}",
        ),
        (
            "window and state blocks: reserved for a prefill",
            f"{native.blocks_reserved_per_prefill:,}",
            f"{rings.blocks_reserved_per_prefill:,}",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"  {label:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}".rstrip()
        for label, a, b in rows
    )


def _all_engines(plan: Plan) -> str:
    engines, rings = plan.options.data_parallel_size, plan.rings
    at_once = engines * min(rings.num_slots, plan.options.max_num_seqs, int(rings.concurrency))
    return (
        f"{engines} engines, each with slots, snapshots and pages of its own: "
        f"{engines * rings.num_slots:,} slots and {engines * rings.tokens:,} tokens in all, "
        f"{at_once:,} requests of {plan.options.max_model_len:,} tokens at once. "
        "A request belongs to one engine, and so does the prefix that it leaves cached."
    )


def _notes(plan: Plan) -> list[str]:
    notes = []
    if plan.native_refusal:
        notes.append(f"Without the plugin vLLM would not start: {plan.native_refusal}")
    idle = plan.rings.num_slots - plan.options.max_num_seqs
    if idle > 0:
        size = idle * plan.rings.bytes_per_slot / GIB
        notes.append(
            f"VLLM_DSV4_SLOTS={plan.rings.num_slots}: only {plan.options.max_num_seqs:,} run at "
            f"once (--max-num-seqs), and {idle:,} slots, {size:.2f} GiB of each card, can never be "
            f"used. Set it to {plan.options.max_num_seqs}, or raise --max-num-seqs."
        )
    elif plan.rings.concurrency > plan.rings.num_slots:
        limits = ["VLLM_DSV4_SLOTS"] if read_settings().slots is not None else []
        limits += ["--max-num-seqs"] if idle == 0 else []
        notes.append(
            f"Pages would hold {plan.rings.concurrency:,.0f} requests of this length; "
            f"{plan.rings.num_slots:,} run at once, one a slot. A higher {' and '.join(limits)} "
            f"lets more run, at {plan.rings.bytes_per_slot / 1e6:.2f} MB of each card a slot."
        )
    if not plan.options.enable_prefix_caching:
        notes += _with_prefix_caching(plan.options)
    return notes


def _with_prefix_caching(options: PlanOptions) -> list[str]:
    """What vLLM's default makes of a plan that leaves it out."""
    note = "Prefix caching, on in vLLM unless switched off, is not counted above"
    options = replace(options, enable_prefix_caching=True)
    try:
        plan = make_plan(options)
    except DoesNotFit:
        return [f"{note}, and {_snapshots_that_do_not_fit(options)}"]
    if plan.num_snapshots == 0:
        return []
    snapshots = plan.num_snapshots * plan.bytes_per_snapshot / GIB
    return [
        f"{note}. Its {plan.num_snapshots:,} snapshots take {snapshots:.2f} GiB: "
        f"{plan.token_ratio:.2f}x, {plan.rings.tokens:,} tokens (--enable-prefix-caching)."
    ]


def _snapshots_that_do_not_fit(options: PlanOptions) -> str:
    rings = ring_geometry(planning_config(options), options.all_ratios)
    fewer = most_snapshots(options, read_settings())
    remedy = f"set VLLM_DSV4_SNAPSHOT_SLOTS to {fewer} or less, or " if fewer else ""
    remedy += "switch it off with --no-enable-prefix-caching"
    return (
        f"its {rings.num_snapshots:,} snapshots would not fit: with them the rings take "
        f"{rings.total_bytes / GIB:.2f} GiB of each card, and weights leave "
        f"{options.cache_bytes / GIB:.2f} GiB for rings and pages. {remedy[0].upper()}{remedy[1:]}."
    )
