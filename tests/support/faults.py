"""Deliberate faults, put into a function for the length of a test."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def rewritten(function: Callable[..., Any], *changes: tuple[str, str]) -> Callable[..., Any]:
    """The function, compiled again with pieces of its source replaced.

    Args:
        changes: what stands in the source exactly once, and what takes its place.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is not in {function.__qualname__} once"
        source = source.replace(old, new)
    scope: dict[str, Any] = {}
    code = f"from __future__ import annotations\n{source}"
    exec(compile(code, inspect.getfile(function), "exec"), function.__globals__, scope)
    changed: Callable[..., Any] = scope[function.__name__]
    return changed


def swapped(function: Callable[..., Any], first: str, then: str) -> Callable[..., Any]:
    """The function with two pieces of its source in each other's place."""
    mark = "THE_FIRST_PIECE"
    return rewritten(function, (first, mark), (then, first), (mark, then))
