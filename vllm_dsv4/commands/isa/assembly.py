"""Figures read from the AMDGPU assembly of one kernel."""

import re
from dataclasses import dataclass

_WIDTHS = {
    "ubyte": 1,
    "u8": 1,
    "sbyte": 1,
    "i8": 1,
    "ushort": 2,
    "u16": 2,
    "sshort": 2,
    "short": 2,
    "i16": 2,
    "b16": 2,
    "dword": 4,
    "b32": 4,
    "dwordx2": 8,
    "b64": 8,
    "dwordx3": 12,
    "b96": 12,
    "dwordx4": 16,
    "b128": 16,
}
_LOAD = re.compile(r"^(?:global|buffer|flat)_load_(\w+)")
_NOT_WIDTH = re.compile(r"async_to_lds_|lds_|d16_hi_|d16_|_d16_hi|_d16")
_SCALAR_LOAD = re.compile(r"^s_load_\w+ \S+, (s\[\d+:\d+\])")


@dataclass(frozen=True)
class Figures:
    """What one compiled kernel takes; sizes in bytes, registers for one wave."""

    vgpr: int
    """Vector registers in all; where they are one file, accumulation registers are among them."""
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    waves_per_simd: int
    """How many waves of it a SIMD can hold by registers alone."""
    mfma: int
    """Matrix instructions (MFMA, or WMMA on gfx1250)."""
    global_load_bytes_widest: int
    global_loads: dict[int, int]
    """Global loads by their width in bytes."""
    instructions: int
    scalar_loads_of_data: int
    """Scalar loads from elsewhere than the kernel's arguments."""


def read_assembly(text: str, lds_bytes: int) -> Figures:
    """Figures of the one kernel in ``text``.

    ``lds_bytes`` comes from Triton: the assembly names it only where it is known to the linker.
    """
    instructions = _instructions(text)
    # A kernel reads its arguments first of all, from the pair of registers that points to them.
    bases = [match.group(1) for line in instructions if (match := _SCALAR_LOAD.match(line))]
    loads: dict[int, int] = {}
    for line in instructions:
        match = _LOAD.match(line)
        if match:
            width = _WIDTHS[_NOT_WIDTH.sub("", match.group(1))]
            loads[width] = loads.get(width, 0) + 1
    return Figures(
        vgpr=_number(text, r"\.vgpr_count:\s+(\d+)"),
        agpr=_number(text, r"\.agpr_count:\s+(\d+)", default=0),
        sgpr=_number(text, r"\.sgpr_count:\s+(\d+)"),
        vgpr_spills=_number(text, r"\.vgpr_spill_count:\s+(\d+)"),
        sgpr_spills=_number(text, r"\.sgpr_spill_count:\s+(\d+)"),
        scratch_bytes=_number(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        lds_bytes=lds_bytes,
        waves_per_simd=_number(text, r"^; Occupancy: (\d+)"),
        mfma=sum(line.startswith(("v_mfma", "v_smfma", "v_wmma")) for line in instructions),
        global_load_bytes_widest=max(loads, default=0),
        global_loads=dict(sorted(loads.items())),
        instructions=len(instructions),
        scalar_loads_of_data=sum(base != bases[0] for base in bases),
    )


def _instructions(text: str) -> list[str]:
    """The instructions, without labels, directives, comments and padding."""
    lines = (line.split(";")[0].strip() for line in text.splitlines())
    words = [line + " " for line in lines if re.match(r"[a-z]\w+(\s|$)", line)]
    return [line for line in words if not line.startswith("s_code_end")]


def _number(text: str, pattern: str, default: int | None = None) -> int:
    match = re.search(pattern, text, re.MULTILINE)
    if match:
        return int(match.group(1))
    if default is None:
        raise ValueError(f"the assembly has no line that matches {pattern!r}")
    return default
