"""vLLM's own ROCm attention kernels, as variants to compile beside ours.

Their constants are those of vLLM 0.32's launchers for 16 heads of 512, a window cache of blocks of
64 rows and a compressed cache of blocks of 64 rows. Over bf16 rows vLLM has one kernel, which is
given one list of indices for both sources.
"""

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.backends import backends

from vllm_dsv4.kernels.variants import KernelVariant

_HEADS = 16
_ROW = 512
_BLOCK_BYTES = 37440  # 64 rows of 584, rounded up to a multiple of 576


def import_kernels() -> ModuleType:
    """vLLM's module of ROCm attention kernels, with Triton live though there is no card.

    vLLM puts a placeholder in Triton's place unless a Triton backend is active, and the CPU build
    asks for one named ``cpu``: an entry of that name is enough to have its kernels defined.
    """
    with patch.dict(backends, cpu=SimpleNamespace(driver=object())):
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.attention.ops import rocm_aiter_mla_sparse

    if not HAS_TRITON:
        raise RuntimeError("vLLM was imported before its Triton kernels could be defined")
    return rocm_aiter_mla_sparse


def vllm_variants() -> list[KernelVariant]:
    """Decode by card, decode over bf16 rows, its join of partial results, and prefill."""
    module = import_kernels()
    return [
        *_decode_variants(module),
        *_bf16_decode_variants(module),
        *_join_variants(module),
        *_prefill_variants(module),
    ]


def _strides(**values: int) -> dict[str, str]:
    return {name: "i32:16" if value % 16 == 0 else "i32" for name, value in values.items()}


def _decode_variants(module: ModuleType) -> list[KernelVariant]:
    pointers = {
        "q_ptr": "*bf16:16",
        "main_cache_ptr": "*u8:16",
        "main_indices_ptr": "*i32:16",
        "main_indptr_ptr": "*i32:16",
        "extra_cache_ptr": "*u8:16",
        "extra_indices_ptr": "*i32:16",
        "extra_indptr_ptr": "*i32:16",
    }
    parts = {"part_m_ptr": "*fp32:16", "part_l_ptr": "*fp32:16", "part_acc_ptr": "*fp32:16"}
    rows = {"main_num_rows": "i32:16", "extra_num_rows": "i32:16"}
    strides = {
        "q_stride0": _HEADS * _ROW,
        "q_stride1": _ROW,
        "main_cache_stride0": _BLOCK_BYTES,
        "extra_cache_stride0": _BLOCK_BYTES,
    }
    dims = {"NOPE_DIM": 448, "ROPE_DIM": 64, "BLOCK_H": 16, "IS_FNUZ_EXTRA": False}
    variants = []
    for has_extra in (False, True):
        source = "window+compressed" if has_extra else "window"
        variants.append(
            KernelVariant(
                kernel=module._sparse_attn_decode_gfx950_partial_kernel,
                name=f"fp8, {source}",
                types={**pointers, **parts, **rows},
                constants={
                    **dims,
                    **strides,
                    "MAIN_BLOCK_SIZE": 64,
                    "EXTRA_BLOCK_SIZE": 64,
                    "scale": 0.04419417382415922,
                    "num_heads": _HEADS,
                    "HAS_EXTRA": has_extra,
                    "IS_FNUZ_MAIN": False,
                    "TRUST_EXTRA_CACHE_NAN_FREE": False,
                    "ADAPTIVE_SPLITS": False,
                    "ONE_WAVE_SPLITS": 8,
                    "BLOCK_K": 32,
                    "NUM_SPLITS": 8,
                    "NUM_STAGES": 1,
                },
                num_warps=4,
                options={"waves_per_eu": 0},
                archs=("gfx950",),
                shape=f"decode, fp8, {source}",
            )
        )
        scalars = {"scale": "fp32", "num_heads": "i32:16"}
        blocks = {"main_block_size": "i32:16", "extra_block_size": "i32:16"}
        part_strides = _strides(
            pm_stride0=8 * _HEADS,
            pm_stride_s=_HEADS,
            pa_stride0=8 * _HEADS * _ROW,
            pa_stride_s=_HEADS * _ROW,
            pa_stride_h=_ROW,
        )
        constants: dict[str, Any] = {**dims, "NOPE_BLOCK": 512, "HAS_EXTRA": has_extra}
        variants.append(
            KernelVariant(
                kernel=module._sparse_attn_decode_partial_kernel,
                name=f"fp8, {source}",
                types={
                    **pointers,
                    **parts,
                    **rows,
                    **_strides(**strides),
                    **part_strides,
                    **blocks,
                    **scalars,
                },
                constants={
                    **constants,
                    "IS_FNUZ_MAIN": True,
                    "BLOCK_K": 32,
                    "NUM_SPLITS": 8,
                    "NUM_STAGES": 1,
                },
                num_warps=4,
                archs=("gfx942",),
                shape=f"decode, fp8, {source}",
            )
        )
        variants.append(
            KernelVariant(
                kernel=module._sparse_attn_decode_ragged_kernel,
                name=f"fp8, {source}",
                types={
                    **pointers,
                    "attn_sink_ptr": "*fp32:16",
                    "out_ptr": "*bf16:16",
                    **rows,
                    **_strides(**strides, out_stride0=_HEADS * _ROW, out_stride1=_ROW),
                    **blocks,
                    **scalars,
                },
                constants={
                    **constants,
                    "HAS_ATTN_SINK": True,
                    "IS_FNUZ_MAIN": False,
                    "BLOCK_K": 16,
                },
                num_warps=8,
                archs=("gfx1250",),
                shape=f"decode, fp8, {source}",
            )
        )
    return variants


def _bf16_decode_variants(module: ModuleType) -> list[KernelVariant]:
    kernel = module._sparse_attn_decode_ragged_bf16_partial_kernel
    return [
        KernelVariant(
            kernel=kernel,
            name=f"bf16, {source}",
            shape=f"decode, bf16, {source}",
            types={
                "q_ptr": "*bf16:16",
                "kv_ptr": "*bf16:16",
                "kv_indices_ptr": "*i32:16",
                "kv_indptr_ptr": "*i32:16",
                "part_m_ptr": "*fp32:16",
                "part_l_ptr": "*fp32:16",
                "part_acc_ptr": "*fp32:16",
                **_strides(
                    q_stride_t=_HEADS * _ROW,
                    q_stride_h=_ROW,
                    kv_stride_n=_ROW,
                    pm_stride0=8 * _HEADS,
                    pm_stride_s=_HEADS,
                    pa_stride0=8 * _HEADS * _ROW,
                    pa_stride_s=_HEADS * _ROW,
                    pa_stride_h=_ROW,
                    num_heads=_HEADS,
                    head_dim=_ROW,
                    num_kv=16,
                ),
                "scale": "fp32",
            },
            constants={
                "q_stride_d": 1,
                "kv_stride_d": 1,
                "BLOCK_H": 16,
                "BLOCK_D": 512,
                "BLOCK_K": 32,
                "NUM_SPLITS": 8,
            },
            num_warps=4,
        )
        for source in ("window", "window+compressed")
    ]


def _join_variants(module: ModuleType) -> list[KernelVariant]:
    return [
        KernelVariant(
            kernel=module._sparse_attn_decode_reduce_kernel,
            name="8 shares, rotated back",
            shape="join, 8 shares",
            types={
                "part_m_ptr": "*fp32:16",
                "part_l_ptr": "*fp32:16",
                "part_acc_ptr": "*fp32:16",
                "attn_sink_ptr": "*fp32:16",
                "out_ptr": "*bf16:16",
                "pos_ptr": "*i64:16",
                "cos_sin_ptr": "*fp32:16",
                **_strides(
                    out_stride0=_HEADS * _ROW,
                    out_stride1=_ROW,
                    os_stride0=0,
                    os_stride1=_ROW // 32,
                    pm_stride0=8 * _HEADS,
                    pm_stride_s=_HEADS,
                    pa_stride0=8 * _HEADS * _ROW,
                    pa_stride_s=_HEADS * _ROW,
                    pa_stride_h=_ROW,
                    cs_stride=64,
                    num_heads=_HEADS,
                ),
            },
            constants={
                "out_scale_ptr": None,
                "HAS_ATTN_SINK": True,
                "ADAPTIVE_SPLITS": False,
                "COMB_DIM": 512,
                "BLOCK_H": 1,
                "NUM_SPLITS": 8,
                "SPLITS_PAD": 8,
                "FUSE_INV_ROPE": True,
                "NOPE": 448,
                "HALF": 32,
                "QUANT_OUT": False,
            },
            num_warps=4,
        )
    ]


def _prefill_variants(module: ModuleType) -> list[KernelVariant]:
    return [
        KernelVariant(
            kernel=module._sparse_attn_prefill_ragged_kernel,
            name="bf16, gathered",
            shape="prefill",
            types={
                "q_ptr": "*bf16:16",
                "kv_ptr": "*bf16:16",
                "kv_indices_ptr": "*i32:16",
                "kv_indptr_ptr": "*i32:16",
                "attn_sink_ptr": "*fp32:16",
                "out_ptr": "*bf16:16",
                **_strides(
                    q_stride_t=_HEADS * _ROW,
                    q_stride_h=_ROW,
                    kv_stride_n=_ROW,
                    out_stride_t=_HEADS * _ROW,
                    out_stride_h=_ROW,
                    num_heads=_HEADS,
                    head_dim=_ROW,
                    num_kv=16,
                ),
                "scale": "fp32",
            },
            constants={
                "q_stride_d": 1,
                "kv_stride_d": 1,
                "out_stride_d": 1,
                "HAS_ATTN_SINK": True,
                "OUT_DV": 512,
                "BLOCK_H": 16,
                "BLOCK_D": 512,
                "BLOCK_K": 16,
            },
            num_warps=4,
        )
    ]
