"""Compiles a kernel variant for an AMD architecture, on any machine."""

import os

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from vllm_dsv4.commands.isa.assembly import Figures, read_assembly
from vllm_dsv4.kernels.launch import WAVE_SIZES
from vllm_dsv4.kernels.variants import KernelVariant


def check_environment() -> None:
    """Raises RuntimeError where kernels cannot be compiled."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted; unset it to compile")


def compile_variant(variant: KernelVariant, arch: str) -> tuple[Figures, str]:
    """Figures and assembly of ``variant`` on ``arch``, one of ``ARCHS``."""
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
        target=GPUTarget("hip", arch, WAVE_SIZES[arch]),
        # Fusion is what a launch has by default; said outright, Triton does not warn of it.
        options={"num_warps": variant.num_warps, "enable_fp_fusion": True, **variant.options},
    )
    assembly = compiled.asm["amdgcn"]
    return read_assembly(assembly, compiled.metadata.shared), assembly
