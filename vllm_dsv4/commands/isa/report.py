"""Every variant compiled, as rows, and the bars that our own must meet."""

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import vllm_dsv4.kernels
from vllm_dsv4.commands.isa.assembly import Figures
from vllm_dsv4.commands.isa.build import compile_variant
from vllm_dsv4.commands.isa.vllm_kernels import vllm_variants
from vllm_dsv4.kernels.variants import KernelVariant
from vllm_dsv4.rocm.archs import LDS_BYTES_PER_CU

OURS = "vllm_dsv4"
THEIRS = "vllm"
WIDEST_LOAD = 16


@dataclass(frozen=True)
class Compiled:
    """A variant on one architecture, and what the machine code takes."""

    owner: str
    variant: KernelVariant
    arch: str
    figures: Figures

    @property
    def registers(self) -> int:
        """Vector registers of a workgroup, in units of one for each lane of a wave."""
        return self.figures.vgpr * self.variant.num_warps

    def row(self) -> dict[str, Any]:
        figures = asdict(self.figures)
        del figures["global_loads"], figures["scalar_loads_of_data"]
        return {
            "owner": self.owner,
            "kernel": self.variant.kernel.__name__,
            "variant": self.variant.name,
            "arch": self.arch,
            **figures,
        }


def our_variants() -> list[KernelVariant]:
    """What the modules of ``vllm_dsv4.kernels`` offer as ``isa_variants``, in order of name."""
    names = sorted(module.name for module in pkgutil.iter_modules(vllm_dsv4.kernels.__path__))
    modules = [import_module(f"vllm_dsv4.kernels.{name}") for name in names]
    return [
        variant
        for module in modules
        if hasattr(module, "isa_variants")
        for variant in module.isa_variants()
    ]


def compile_all(archs: Sequence[str]) -> Iterator[Compiled]:
    """Our variants, then vLLM's, each on those of ``archs`` that it is meant for."""
    for owner, variants in ((OURS, our_variants()), (THEIRS, vllm_variants())):
        for variant in variants:
            for arch in archs:
                if arch in variant.archs:
                    yield Compiled(owner, variant, arch, compile_variant(variant, arch)[0])


def failed_bars(compiled: Sequence[Compiled]) -> list[str]:
    """One sentence for each bar that one of our variants misses."""
    theirs = {
        (one.variant.shape, one.arch): one.registers for one in compiled if one.owner == THEIRS
    }
    return [
        f"{one.variant.kernel.__name__} ({one.variant.name}) on {one.arch}: {failure}"
        for one in compiled
        if one.owner == OURS
        for failure in _failures(one, theirs.get((one.variant.shape, one.arch)))
    ]


def _failures(one: Compiled, registers_of_vllm: int | None) -> Iterator[str]:
    figures, variant = one.figures, one.variant
    if figures.vgpr_spills or figures.sgpr_spills or figures.scratch_bytes:
        yield (
            f"spills {figures.vgpr_spills} vector and {figures.sgpr_spills} scalar registers, "
            f"{figures.scratch_bytes} bytes of scratch"
        )
    if figures.lds_bytes * variant.min_workgroups_per_cu > LDS_BYTES_PER_CU[one.arch]:
        yield f"{variant.min_workgroups_per_cu} workgroups of {figures.lds_bytes} bytes of LDS"
    if variant.wide_loads and figures.global_load_bytes_widest < WIDEST_LOAD:
        yield f"no global load is wider than {figures.global_load_bytes_widest} bytes"
    if variant.refreshed_by_host and figures.scalar_loads_of_data:
        yield f"{figures.scalar_loads_of_data} scalar loads of data, stale under graph replay"
    if registers_of_vllm is not None and one.registers > registers_of_vllm:
        yield f"{one.registers} registers a workgroup where vLLM takes {registers_of_vllm}"
