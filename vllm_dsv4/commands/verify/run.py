"""All checks in order: a kernel that is wrong is not timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from vllm_dsv4.commands.verify.attention import check_decode, check_prefill
from vllm_dsv4.commands.verify.device import Card
from vllm_dsv4.commands.verify.report import Report
from vllm_dsv4.commands.verify.result import Result
from vllm_dsv4.commands.verify.speed import copy_gb_per_s, measure_decode
from vllm_dsv4.commands.verify.writes import check_compressors, check_keys

HEADS = (1, 16, 20, 64, 128)
"""Query heads of a rank, and counts that do not fill a tile."""


def check_kernels(
    card: Card, heads: tuple[int, ...] = HEADS, tell: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """Every kernel against its reference. One that raises is a failed result, not the end.

    Args:
        tell: is given a line for each group of checks.
    """
    results: list[Result] = []
    for name, checks in (
        ("keys and rings", check_keys(card)),
        ("compressors", check_compressors(card)),
        ("prefill", check_prefill(card, heads)),
        ("decode", check_decode(card, heads)),
    ):
        found = list(_caught(name, checks))
        results += found
        failed = sum(not one.passed for one in found)
        tell(f"{name}: {len(found) - failed} of {len(found)} passed")
    return results


def verify(card: Card, tell: Callable[[str], None]) -> Report:
    """Check, and if all is right, measure."""
    report = Report(card, check_kernels(card, tell=tell))
    if report.failures:
        report.speed_note = "a kernel is wrong on this card."
        return report
    report.copy_gb_per_s = copy_gb_per_s(card)
    report.speeds = list(measure_decode(card))
    if any(one.vllm_us is None for one in report.speeds):
        report.speed_note = "vLLM's kernel was not timed: vLLM could not be imported."
    return report


def _caught(name: str, checks: Iterator[Result]) -> Iterator[Result]:
    try:
        yield from checks
    except Exception as error:  # a card may fail in any way, and the report shall say how
        yield Result(name, "", math.inf, 0.0, "", note=f"{type(error).__name__}: {error}"[:500])
