"""The ROCm layer with its kernels' PyTorch twins: for tests of the layer, not of the kernels.

The interpreter takes a tenth of a second for a token; a twin, less than a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.compress_state import save_state_reference
from vllm_dsv4.kernels.decode_reference import decode_reference
from vllm_dsv4.kernels.prefill_reference import prefill_reference
from vllm_dsv4.kernels.prepare_keys import prepare_keys_reference
from vllm_dsv4.kernels.ring_copy import copy_slots_reference
from vllm_dsv4.kernels.ring_write import write_ring_reference


def _prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    ring: KeyCache,
    slots: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The twin finds each token's sequence by itself."""
    del sequences
    return prefill_reference(queries, keys, ring, slots, starts, positions, **options)


def _into_out(reference: Callable[..., torch.Tensor]) -> Callable[..., None]:
    def attend(*args: Any, out: torch.Tensor, **kwargs: Any) -> None:
        out.copy_(reference(*args, **kwargs))

    return attend


TWINS = {
    "attention.write_ring": write_ring_reference,
    "attention.copy_slots": copy_slots_reference,
    "attention.prepare_keys": prepare_keys_reference,
    "attention.prefill": _into_out(_prefill),
    "attention.decode": _into_out(decode_reference),
    "compressor.save_state": save_state_reference,
    "compressor.copy_slots": copy_slots_reference,
    "snapshots.copy_slots": copy_slots_reference,
}


@contextmanager
def twins_in_place_of_kernels() -> Iterator[None]:
    """``compress`` stays a kernel: its reference takes whole sequences."""
    with ExitStack() as stack:
        for place, twin in TWINS.items():
            stack.enter_context(patch(f"vllm_dsv4.rocm.{place}", twin))
        yield
