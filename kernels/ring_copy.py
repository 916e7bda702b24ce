"""Copying slots of a ring onto other slots: how a snapshot is restored, and begun."""

import torch
import triton
import triton.language as tl

from .step_tokens import load_index

BLOCK_WORDS = 1024
"""8-byte words that one program copies."""


@triton.jit
def copy_slots_kernel(
    ring_ptr,  # int64, slots slot_stride words apart
    sources_ptr,
    targets_ptr,
    slot_stride,
    words,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    source = load_index(sources_ptr + request, True).to(tl.int64)
    target = load_index(targets_ptr + request, True).to(tl.int64)
    if (source <= 0) | (target <= 0):
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    content = tl.load(ring_ptr + source * slot_stride + word, mask=inside)
    tl.store(ring_ptr + target * slot_stride + word, content, mask=inside)


def copy_slots(
    ring: torch.Tensor, slot_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Copies the first ``slot_bytes`` bytes of slot ``sources[i]`` onto slot ``targets[i]``.

    Nothing is copied where either is 0 (or less): what a request does not need in this step, its
    entry says on the device. ``ring`` is ``[slots, width]`` of any dtype with unit stride, its slot
    stride, base address and ``slot_bytes`` multiples of 8 bytes; ``sources`` and ``targets`` are
    int32 ``[n]``. No target may be the source or the target of another entry.

    Raises ValueError for tensors of another dtype or shape.
    """
    _check(ring, slot_bytes, sources, targets)
    if len(sources) == 0:
        return
    content = ring[:, : slot_bytes // ring.element_size()].view(torch.int64)
    words = content.shape[1]
    copy_slots_kernel[(len(sources), triton.cdiv(words, BLOCK_WORDS))](
        content, sources, targets, content.stride(0), words, BLOCK=BLOCK_WORDS
    )


def copy_slots_reference(
    ring: torch.Tensor, slot_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """PyTorch twin of :func:`copy_slots`."""
    _check(ring, slot_bytes, sources, targets)
    width = slot_bytes // ring.element_size()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source > 0 and target > 0:
            ring[target, :width] = ring[source, :width]


def _check(
    ring: torch.Tensor, slot_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    for name, slots in (("sources", sources), ("targets", targets)):
        if slots.dtype != torch.int32 or slots.dim() != 1 or not slots.is_contiguous():
            raise ValueError(f"{name} is a contiguous int32 vector, not {slots.dtype}")
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
    if ring.dim() != 2 or ring.stride(1) != 1:
        raise ValueError(f"a ring is [slots, width] with unit stride, not {tuple(ring.shape)}")
    size = ring.element_size()
    if slot_bytes > ring.shape[1] * size:
        raise ValueError(f"a slot holds {ring.shape[1] * size} bytes, not {slot_bytes}")
    if slot_bytes % 8 or ring.stride(0) * size % 8 or ring.data_ptr() % 8:
        raise ValueError(
            "slots are copied by 8-byte words: slot bytes, slot stride and base address must be "
            f"multiples of 8, not {slot_bytes}, {ring.stride(0) * size} and {ring.data_ptr():#x}"
        )
