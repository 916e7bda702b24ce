"""Flags that fit, where the asked ones do not. Every suggestion was planned before it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.commands.planner.plan import DoesNotFit, plan_rings
from vllm_dsv4.ring.geometry import GeometryError
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.settings import Settings, read_settings

MODEL_LEN_STEP = 1024
MAX_GIB = 4096
MAX_RANKS = 64


def fits(options: PlanOptions, settings: Settings | None = None) -> bool:
    """Whether a server with rings would start with these flags.

    Args:
        settings: those of the environment if None.
    """
    if options.cache_bytes <= 0:
        return False
    config = planning_config(options)
    try:
        plan_rings(config, options, ring_geometry(config, options.all_ratios, settings))
    except (DoesNotFit, GeometryError):
        return False
    return True


def suggestions(options: PlanOptions) -> list[str]:
    """Changes of one flag that would each make the deployment fit, smallest change of each."""
    found = _of_the_rings(options, read_settings())
    steps = _most(
        1,
        (options.max_model_len - 1) // MODEL_LEN_STEP,
        lambda n: fits(replace(options, max_model_len=n * MODEL_LEN_STEP)),
    )
    if steps:
        found.append(f"--max-model-len {steps * MODEL_LEN_STEP}")
    if options.weights_gib:
        ranks = options.tensor_parallel_size * 2
        while ranks <= MAX_RANKS and not fits(replace(options, tensor_parallel_size=ranks)):
            ranks *= 2
        if ranks <= MAX_RANKS:
            found.append(f"--tensor-parallel-size {ranks}")
        if options.data_parallel_size > 1:
            found += _more_engines(options)
    asked = int(options.gpu_memory_gib)
    missing = _least(asked + 1, MAX_GIB, lambda n: fits(replace(options, gpu_memory_gib=float(n))))
    if missing:
        found.append(f"--gpu-memory-gib {missing}")
    return found


def _more_engines(options: PlanOptions) -> list[str]:
    """Engines share the experts: with more of them each card holds fewer."""
    engines = options.data_parallel_size * 2
    while engines * options.tensor_parallel_size <= MAX_RANKS:
        if fits(replace(options, data_parallel_size=engines)):
            return [f"--data-parallel-size {engines}"]
        engines *= 2
    return []


def most_snapshots(options: PlanOptions, settings: Settings) -> int:
    """Most snapshot slots that fit, fewer than there are; 0 if not even one does."""
    asked = ring_geometry(planning_config(options), options.all_ratios, settings).num_snapshots
    return _most(1, asked - 1, lambda n: fits(options, replace(settings, snapshot_slots=n)))


def _of_the_rings(options: PlanOptions, settings: Settings) -> list[str]:
    """Suggestions that make the rings smaller."""
    found = []
    if settings.slots is not None:
        slots = _most(1, settings.slots - 1, lambda n: fits(options, replace(settings, slots=n)))
        if slots:
            found.append(f"VLLM_DSV4_SLOTS={slots}")
    else:
        seqs = _most(1, options.max_num_seqs - 1, lambda n: fits(replace(options, max_num_seqs=n)))
        if seqs:
            found.append(f"--max-num-seqs {seqs}")
    if options.enable_prefix_caching:
        snapshots = most_snapshots(options, settings)
        if snapshots:
            found.append(f"VLLM_DSV4_SNAPSHOT_SLOTS={snapshots}")
        if fits(replace(options, enable_prefix_caching=False)):
            found.append("--no-enable-prefix-caching")
    drafts = _most(
        1,
        options.speculative_tokens - 1,
        lambda n: fits(replace(options, speculative_tokens=n)),
    )
    if drafts:
        found.append(f"--speculative-tokens {drafts}")
    elif options.speculative_tokens and fits(replace(options, speculative_tokens=0)):
        found.append("--speculative-tokens 0")
    return found


def _most(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The largest good number of a range whose good ones come first; 0 if none is."""
    best = 0
    while low <= high:
        middle = (low + high) // 2
        if good(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def _least(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The smallest good number of a range whose good ones come last; 0 if none is."""
    best = 0
    while low <= high:
        middle = (low + high) // 2
        if good(middle):
            best, high = middle, middle - 1
        else:
            low = middle + 1
    return best
