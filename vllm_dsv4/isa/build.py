"""Compiles a kernel variant for an AMD architecture, on any machine."""

import os
from functools import cache

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from vllm_dsv4.isa.assembly import Figures, read_assembly
from vllm_dsv4.kernels.variants import KernelVariant

WAVE_SIZE = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}
LDS_BYTES_PER_CU = {"gfx942": 64 * 1024, "gfx950": 160 * 1024, "gfx1250": 320 * 1024}


def check_environment() -> None:
    """Raises RuntimeError where kernels cannot be compiled."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted; unset it to compile")


def compile_variant(variant: KernelVariant, arch: str) -> tuple[Figures, str]:
    """Figures and assembly of ``variant`` on ``arch``, one of ``WAVE_SIZE``."""
    names = variant.kernel.arg_names
    given = {*variant.types, *variant.constants}
    if given != set(names) or set(variant.types) & set(variant.constants):
        raise ValueError(
            f"{variant.name}: arguments {sorted(set(names) ^ given)} of "
            f"{variant.kernel.__name__} are not given exactly once"
        )
    signature = {name: variant.types.get(name, "constexpr").split(":")[0] for name in names}
    aligned = [name for name, kind in variant.types.items() if kind.endswith(":16")]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs=dict(variant.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton_compile(
        source,
        target=GPUTarget("hip", arch, WAVE_SIZE[arch]),
        options={"num_warps": variant.num_warps, **variant.options},
    )
    assembly = compiled.asm["amdgcn"]
    return read_assembly(assembly, compiled.metadata.shared), assembly


@cache
def known_archs() -> tuple[str, ...]:
    return tuple(WAVE_SIZE)
