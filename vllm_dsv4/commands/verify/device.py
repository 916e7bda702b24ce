"""The card that this process can run on, or what is needed to have one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dsv4.rocm.archs import ARCHS

NEEDED = (
    f"an AMD card ({', '.join(ARCHS)}) with a ROCm build of PyTorch, or an NVIDIA card with a CUDA "
    "build, and the Triton of that build; `vllm-dsv4 isa` needs no card"
)


class NoDevice(RuntimeError):
    """Nothing here can run the kernels natively."""


@dataclass(frozen=True)
class Card:
    """A device and what its results depend on.

    Attributes:
        arch: ``gfx942`` and the like, or ``sm90`` for a card that is not AMD's.
        fp8: the fp8 type of window rows on it.
    """

    device: torch.device
    name: str
    arch: str
    compute_units: int
    memory_bytes: int
    fp8: torch.dtype

    @property
    def is_supported(self) -> bool:
        """Whether DSV4 is served on it; the kernels may run on others as well."""
        return self.arch in ARCHS

    @property
    def row_types(self) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
        """Types of window rows and of compressed rows that go together here."""
        return (self.fp8, torch.float8_e4m3fn), (torch.bfloat16, torch.bfloat16)


def find_card() -> Card:
    """The first card.

    Raises:
        NoDevice: naming what is missing.
    """
    if not torch.cuda.is_available():
        built = torch.version.hip or torch.version.cuda
        missing = "no card is visible" if built else f"PyTorch {torch.__version__} is a CPU build"
        raise NoDevice(f"{missing}. Needed: {NEEDED}")
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    return Card(
        device=torch.device("cuda", 0),
        name=properties.name,
        arch=arch,
        compute_units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        fp8=torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn,
    )
