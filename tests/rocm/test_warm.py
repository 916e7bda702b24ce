"""No kernel of ours is compiled after the first step: what later steps launch was launched then.

Triton compiles a kernel for its constants, for the types of its arguments, and for which of them
are multiples of 16 or 1. Here launches are recorded by just that, and none is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime import interpreter
from vllm_dsv4.kernels.launch import MAX_SPLITS, choose_num_splits, share_counts

from tests.rocm import rig
from tests.rocm.rig import Chunk, Rig

Variant = tuple[str, frozenset[tuple[str, Any]]]


def variant(executor: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Variant:
    named = dict(zip(executor.arg_names, args, strict=False)) | kwargs

    def key(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if name in executor.constexprs or name == "num_warps" or not isinstance(value, int):
            return value
        return value == 1, value % 16 == 0, value < 1 << 31

    return executor.fn.__name__, frozenset(
        (name, key(name, value)) for name, value in named.items()
    )


@pytest.fixture
def launched() -> Iterator[set[Variant]]:
    found: set[Variant] = set()

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        found.add(variant(executor, args, kwargs))

    with patch.object(interpreter.GridExecutor, "__call__", launch):
        yield found


@pytest.fixture
def odd_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as no buffer's row would by itself begin on a multiple of 16 bytes with."""
    monkeypatch.setattr(rig, "MAX_REQUESTS", 5)


STEPS = (
    (Chunk(0, 0, 1, slot=1),),
    (Chunk(0, 1, 3, slot=1), Chunk(1, 0, 2, slot=2)),
    (Chunk(0, 254, 3, slot=1, target=9), Chunk(1, 2, 20, slot=2)),
    (Chunk(2, 0, 7, slot=3), Chunk(3, 0, 11, slot=4), Chunk(4, 0, 13, slot=5)),
    (Chunk(0, 256, 5, slot=1, source=9),),
    (Chunk(0, 300, 40, slot=2),),
    tuple(Chunk(n, 40, 3, slot=n + 1) for n in range(5)),
)
"""Decode, verify, chunks, mixed steps, snapshots written and restored; any number of tokens."""


@pytest.mark.parametrize(("layer", "first"), [(0, 0), (2, 5), (3, 0)], ids=["window", "C4", "C128"])
def test_the_first_step_launches_every_variant_that_later_ones_do(
    tiny,
    odd_requests: None,
    launched: set[Variant],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
    first: int,
) -> None:
    monkeypatch.setattr(rig, "rotate_on_the_cpu", pad_heads)
    one = Rig(tiny(), layer, "rocm")
    with patch("vllm_dsv4.kernels.decode.compute_units", lambda _: 304):
        ours = only_ours(launched, lambda: one.step(STEPS[first]))
        for chunks in STEPS:
            later = only_ours(launched, lambda chunks=chunks: one.step(chunks))
            assert later <= ours, sorted(name for name, _ in later - ours)


OURS = (
    "decode",
    "join",
    "prefill",
    "prepare_keys",
    "write_ring",
    "copy_slots",
    "compress",
    "save_state",
)


def only_ours(launched: set[Variant], run: Callable[[], Any]) -> set[Variant]:
    launched.clear()
    run()
    return {found for found in launched if found[0] in {f"{name}_kernel" for name in OURS}}


def pad_heads(queries: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.nn.functional.pad(queries, (0, 0, 0, arguments[3] - queries.shape[1]))


@pytest.mark.parametrize("units", [80, 256, 304])
def test_every_number_of_shares_is_one_of_those_that_are_warmed(units: int) -> None:
    """For all token counts and heads of a step (from ``2 * units`` workgroups on there is one
    share), and lists of every length up to the longest."""
    for longest in (4, 20, 36, 68, 260):
        counts = share_counts(longest)
        assert counts[-1] <= MAX_SPLITS and all(n & (n - 1) == 0 for n in counts)
        for most in range(4, longest + 1, 4):
            found = {choose_num_splits(n, most, units) for n in range(1, 2 * units + 2)}
            assert found <= set(counts) and 1 in found
