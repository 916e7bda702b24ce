"""Build ``operators.c`` and register what vLLM's library for this processor lacks."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_dsv4.cpu.portable import indexer

SOURCE = Path(__file__).with_name("operators.c")
COMPILER = "cc"
FLAGS = (
    "-O3", "-march=native", "-std=c11", "-fPIC", "-shared",
    # Sums may be vectorised; NaN and infinity keep their meaning.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
    "-freciprocal-math",
)  # fmt: skip
HEAD = 512
TELLING = "flash_mla_with_kvcache_cpu"
"""vLLM's library has all of them or none: by this one we know."""


class NoPortableOperators(RuntimeError):
    """The processor needs the portable operators, and they cannot be built here."""


def register_missing() -> bool:
    """Register the operators where vLLM's library has none. Idempotent; builds nothing yet.

    Call before ``vllm._custom_ops`` is imported, which describes their results to torch.compile.

    Returns:
        Whether the operators of this process are ours.
    """
    if not _LIBRARIES and not hasattr(torch.ops._C, TELLING):
        library = torch.library.Library("_C", "FRAGMENT")
        for schema, compute in OPERATORS.items():
            library.define(schema)
            library.impl(schema.partition("(")[0], compute, "CPU")
        _LIBRARIES.append(library)
    return in_use()


def in_use() -> bool:
    """Whether the operators of this process are ours."""
    return bool(_LIBRARIES)


def build() -> None:
    """Compile them now, once a machine.

    Raises:
        NoPortableOperators: naming what is missing and the remedy.
    """
    _code()


_LIBRARIES: list[Any] = []
"""Operators are registered as long as their library lives."""


@cache
def _code() -> ctypes.CDLL:
    from vllm import envs

    processor = Path("/proc/cpuinfo").read_bytes()[:400]
    key = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode() + processor).hexdigest()
    path = Path(envs.VLLM_CACHE_ROOT) / "vllm_dsv4" / f"operators-{key[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        _compile(made)
        made.replace(path)
    return ctypes.CDLL(str(path))


def _compile(target: Path) -> None:
    command = [COMPILER, *FLAGS, str(SOURCE), "-o", str(target), "-lm"]
    reason = (
        f"this processor ({platform.machine()} without AVX-512 bf16) is not one that vLLM's CPU "
        f"operators for DeepSeek-V4 were built for, and ours cannot be built: "
    )
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoPortableOperators(
            f"{reason}there is no C compiler {COMPILER!r}. Install one (for example gcc)."
        ) from None
    except subprocess.CalledProcessError as failed:
        raise NoPortableOperators(f"{reason}{COMPILER} said {failed.stderr[-500:]}") from failed


def _call(name: str, *arguments: torch.Tensor | float | int) -> None:
    kinds: dict[type, Callable[[Any], Any]] = {int: ctypes.c_int64, float: ctypes.c_float}
    getattr(_code(), name)(
        *(
            ctypes.c_void_p(value.data_ptr())
            if isinstance(value, torch.Tensor)
            else kinds[type(value)](value)
            for value in arguments
        )
    )


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone()


def _bmm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, packed: bool, scale: object
) -> None:
    del packed, scale
    out.copy_(torch.bmm(x.float(), weight.float().transpose(1, 2)))


def _queries_and_keys(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    padded: int,
    eps: float,
    rows: int,
) -> torch.Tensor:
    tokens, heads, _ = q.shape
    positions, slots = positions.long().contiguous(), slots.long().contiguous()
    q, kv, cos_sin = q.contiguous(), kv.contiguous(), cos_sin.float().contiguous()
    out = q.new_zeros(tokens, padded, HEAD)
    _call("normalise_queries", q, positions, cos_sin, tokens, heads, padded, eps, out)
    _call("insert_keys", kv, positions, cos_sin, slots, len(slots), cache, cache.stride(0), rows)
    return out


def _attend(
    out: torch.Tensor,
    q: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: int,
    history: torch.Tensor,
    history_slots: torch.Tensor,
    history_rows: int,
    sink: torch.Tensor,
    scale: float,
) -> None:
    keys, indices = [], []
    known = 0
    for cache_, slots, rows in (
        (window, window_slots, window_rows),
        (history, history_slots, history_rows),
    ):
        distinct, index = torch.unique(slots.long(), return_inverse=True)
        absent = int((distinct < 0).sum())
        distinct = distinct[absent:].contiguous()
        loaded = torch.empty(len(distinct), HEAD)
        if len(distinct):
            _call("load_rows", cache_, cache_.stride(0), rows, distinct, len(distinct), loaded)
        indices.append(torch.where(index < absent, -1, index - absent + known))
        keys.append(loaded)
        known += len(distinct)
    index = torch.cat(indices, dim=1).int().contiguous()
    tokens, heads, _ = q.shape
    scores = torch.empty(index.shape[1])
    _call(
        "attend", q, q.stride(0), torch.cat(keys), index, tokens, heads, index.shape[1],
        sink.float().contiguous(), scale, scores, out, out.stride(0),
    )  # fmt: skip


def _turn_back(
    o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, rope: int
) -> torch.Tensor:
    del rope
    out = o.new_empty(o.shape, dtype=torch.float32)
    positions, cos_sin = positions.long().contiguous(), cos_sin.float().contiguous()
    _call("turn_back", o, o.stride(0), positions, cos_sin, o.shape[0], o.shape[1], out)
    return out


def _save_states(
    kv: torch.Tensor,
    score: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    assert kv.stride() == score.stride()
    bias = bias.float().contiguous()
    positions, slots = positions.long().contiguous(), slots.long().contiguous()
    _call(
        "save_states", kv, score, kv.stride(0), bias, len(bias), positions, slots,
        len(slots), kv.shape[1], state, state.stride(0), state.shape[1],
    )  # fmt: skip


def _compress(
    state: torch.Tensor,
    gather: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    cache_rows: int,
    ratio: int,
) -> None:
    tokens, window = gather.shape
    gather, positions = gather.long().contiguous(), positions.long().contiguous()
    slots, cos_sin = slots.long().contiguous(), cos_sin.float().contiguous()
    _call(
        "compress", state, state.stride(0), state.shape[1], gather, positions, slots, tokens,
        window, ratio, len(norm), state.shape[2] // 2, norm, eps, cos_sin,
        cache, cache.stride(0), cache_rows,
    )  # fmt: skip


def _streams_in(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    streams: int,
    iterations: int,
    rms_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, _, width = x.shape
    y = x.new_empty(tokens, width)
    post = x.new_empty((tokens, streams), dtype=torch.float32)
    comb = x.new_empty((tokens, streams, streams), dtype=torch.float32)
    x, fn, values = x.contiguous(), fn.contiguous(), torch.empty(x[:1].numel())
    _call(
        "streams_in", x, fn, scale, base, len(x), x.shape[2], iterations, rms_eps, eps,
        values, y, post, comb,
    )  # fmt: skip
    return y, post, comb


def _streams_out(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    x, residual = x.contiguous(), residual.contiguous()
    post, comb = post.contiguous(), comb.contiguous()
    _call("streams_out", x, residual, post, comb, len(x), x.shape[1], out)
    return out


def _streams_head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    rms_eps: float,
) -> torch.Tensor:
    out = x.new_empty(len(x), x.shape[2])
    x, fn, values = x.contiguous(), fn.contiguous(), torch.empty(x[:1].numel())
    _call("streams_head", x, fn, scale, base, len(x), x.shape[2], eps, rms_eps, values, out)
    return out


def _route(weights: torch.Tensor, chosen: torch.Tensor, factor: float | None) -> Any:
    picked = weights.gather(1, chosen.long())
    picked = picked / picked.sum(dim=1, keepdim=True) * (factor or 1.0)
    # torch.compile takes no result that is an argument.
    return picked, chosen.to(torch.int32, copy=True)


def _biased_topk(
    hidden: object,
    gates: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring: str,
    shared: int,
    factor: float | None,
    on_output: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert renormalize and on_output and scoring == "sqrtsoftplus" and not shared
    weights = F.softplus(gates.float()).sqrt()
    return _route(weights, (weights + bias).topk(topk, dim=1).indices, factor)


def _hash_topk(
    gates: torch.Tensor,
    experts: torch.Tensor,
    topk: int,
    scoring: str,
    shared: int,
    count: int,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert scoring == "sqrtsoftplus" and not shared and experts.shape[1] == topk
    return _route(F.softplus(gates.float()).sqrt(), experts, factor)


_STATE = (
    "Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, "
    "Tensor rms_norm_weight, float rms_norm_eps, Tensor cos_sin_cache, Tensor(a!) kv_cache_2d, "
    "int kv_cache_block_size, int compress_ratio"
)
_FUNCTION = "Tensor hc_fn, Tensor hc_scale, Tensor hc_base"
OPERATORS: dict[str, Callable[..., Any]] = {
    "convert_weight_packed(Tensor! weight) -> Tensor": _packed,
    "bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()": _bmm,
    "fused_qnorm_rope_kv_insert_cpu(Tensor q, Tensor kv, Tensor positions, "
    "Tensor(a!) swa_kv_cache_2d, Tensor slot_mapping, Tensor cos_sin_cache, int q_head_padded, "
    "float eps, int cache_block_size) -> Tensor": _queries_and_keys,
    "flash_mla_with_kvcache_cpu(Tensor(a!) out, Tensor q, Tensor window_cache_2d, "
    "Tensor window_slots, int window_block_size, Tensor compressed_cache_2d, "
    "Tensor compressed_slots, int compressed_block_size, Tensor attn_sink, float scale) "
    "-> ()": _attend,
    "inverse_gptj_rope_o_proj_cpu(Tensor o, Tensor positions, Tensor cos_sin_cache, "
    "int rope_dim) -> Tensor": _turn_back,
    "save_partial_states_cpu(Tensor kv, Tensor score, Tensor ape, Tensor positions, "
    "Tensor(a!) state_cache, Tensor slot_mapping) -> ()": _save_states,
    f"compress_norm_rope_store_cpu({_STATE}) -> ()": _compress,
    f"compress_norm_rope_store_indexer_cpu({_STATE}) -> ()": _compress,
    f"hc_pre_fused_cpu(Tensor x, {_FUNCTION}, int hc_mult, int sinkhorn_iters, "
    "float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)": _streams_in,
    "hc_post_fused_cpu(Tensor x, Tensor residual, Tensor post, Tensor comb) "
    "-> Tensor": _streams_out,
    f"hc_head_fused_cpu(Tensor x, {_FUNCTION}, float hc_eps, float norm_eps) "
    "-> Tensor": _streams_head,
    "biased_topk_cpu(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, "
    "int topk, bool renormalize, str scoring_func, int num_fused_shared_experts, "
    "float? routed_scaling_factor, bool apply_routed_scaling_factor_on_output) "
    "-> (Tensor, Tensor)": _biased_topk,
    "hash_topk_cpu(Tensor gating_output, Tensor tid2eid, int topk, str scoring_func, "
    "int num_fused_shared_experts, int num_experts, float routed_scaling_factor) "
    "-> (Tensor, Tensor)": _hash_topk,
    "fused_indexer_q_rope_quant_cpu(Tensor positions, Tensor index_q, "
    "Tensor index_q_cos_sin_cache, Tensor(a!) index_q_fp8, Tensor index_weights, "
    "float index_weights_softmax_scale, float index_weights_head_scale, "
    "Tensor(b!) index_weights_out) -> ()": indexer.quantise_queries,
    "fp8_paged_mqa_logits_cpu(Tensor q_fp8, Tensor kvcache_fp8, Tensor weight, Tensor seq_lens, "
    "Tensor page_table, int block_size, int max_seq_len) -> Tensor": indexer.score_keys,
    "topk_transform_512_cpu(Tensor scores, Tensor seq_lens, Tensor page_tables, "
    "Tensor(a!) out_page_indices, int page_size, Tensor(b!)? out_raw_indices) "
    "-> ()": indexer.pick_keys,
}
"""Schema, as vLLM's library has it (``csrc/cpu/torch_bindings.cpp``), to what computes it."""
