"""Copying slots of a ring onto other slots: how a snapshot is restored, and begun."""

import torch
import triton
import triton.language as tl

from .caches import ALIGNMENT
from .launch import LANES, WAVE_SIZES, warps
from .step_tokens import check_vector, load_index
from .variants import KernelVariant

BLOCK_BYTES = 2 * 16 * LANES
"""Bytes that one workgroup copies: two 16-byte loads a lane."""


@triton.jit
def copy_slots_kernel(
    ring_ptr,  # uint8, slots slot_stride apart
    sources_ptr,
    targets_ptr,
    slot_stride,
    slot_bytes,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    source = load_index(sources_ptr + request, True).to(tl.int64)
    target = load_index(targets_ptr + request, True).to(tl.int64)
    if (source <= 0) | (target <= 0):
        return
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < slot_bytes
    content = tl.load(ring_ptr + source * slot_stride + byte, mask=inside)
    tl.store(ring_ptr + target * slot_stride + byte, content, mask=inside)


def copy_slots(ring: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies all of slot ``sources[i]`` onto slot ``targets[i]``.

    Nothing is copied where either is 0 (or less): whether a request needs its copy in this step is
    said on the device. ``ring`` is ``[slots, width]`` of any dtype with unit stride; its base, slot
    stride and width are multiples of 16 bytes. ``sources`` and ``targets`` are int32 ``[n]``. No
    target may be the source or the target of another entry.

    Raises ValueError for tensors of another dtype, shape or alignment.
    """
    _check(ring, sources, targets)
    if len(sources) == 0:
        return
    content = ring.view(torch.uint8)
    slot_bytes = content.shape[1]
    copy_slots_kernel[(len(sources), triton.cdiv(slot_bytes, BLOCK_BYTES))](
        content,
        sources,
        targets,
        content.stride(0),
        slot_bytes,
        BLOCK=BLOCK_BYTES,
        num_warps=warps(ring.device),
    )


def copy_slots_reference(ring: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """PyTorch twin of :func:`copy_slots`."""
    _check(ring, sources, targets)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source > 0 and target > 0:
            ring[target] = ring[source]


def _check(ring: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    check_vector("sources", sources, torch.int32)
    check_vector("targets", targets, torch.int32)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
    if ring.dim() != 2 or ring.stride(1) != 1:
        raise ValueError(f"a ring is [slots, width] with unit stride, not {tuple(ring.shape)}")
    width, stride = (count * ring.element_size() for count in (ring.shape[1], ring.stride(0)))
    if width % ALIGNMENT or stride % ALIGNMENT or ring.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"slots are copied {ALIGNMENT} bytes at a time: their width, stride and base must be "
            f"multiples of it, not {width}, {stride} and {ring.data_ptr():#x}"
        )


def isa_variants() -> list[KernelVariant]:
    """The one shape, by the size of a wave."""
    return [
        KernelVariant(
            kernel=copy_slots_kernel,
            name="slots",
            types={
                "ring_ptr": "*u8:16",
                "sources_ptr": "*i32:16",
                "targets_ptr": "*i32:16",
                "slot_stride": "i32:16",
                "slot_bytes": "i32:16",
            },
            constants={"BLOCK": BLOCK_BYTES},
            num_warps=LANES // wave_size,
            archs=(arch,),
            refreshed_by_host=True,
        )
        for arch, wave_size in WAVE_SIZES.items()
    ]
