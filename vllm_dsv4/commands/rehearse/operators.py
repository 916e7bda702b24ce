"""PyTorch counterparts of the compiled operators that vLLM's CPU build lacks.

Each is registered under the name of the operator that it stands for, unless the build has it. They
compute what the operator's documentation and vLLM's own fallbacks say, not how it rounds, and read
nothing on the host, so that they can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_dsv4.kernels.compress_reference import rotate_pairs
from vllm_dsv4.kernels.fp8_ds_mla import data_view, quantize_rows, scale_view

_LIBRARIES: list[torch.library.Library] = []
"""Kept alive: a registration ends with its library."""


def silu_and_mul_with_clamp(
    out: torch.Tensor, x: torch.Tensor, limit: float, alpha: float, beta: float
) -> None:
    """``_C.silu_and_mul_with_clamp``: gate and up of ``[tokens, 2 * width]``."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))


def topk_softplus_sqrt(
    weights: torch.Tensor,
    indices: torch.Tensor,
    _source: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    scale: float,
    bias: torch.Tensor | None,
    tokens: torch.Tensor | None,
    table: torch.Tensor | None,
    padding: torch.Tensor | None,
    _bias_of_images: torch.Tensor | None,
    _first_image_token: int,
) -> None:
    """``_moe_C.topk_softplus_sqrt``: experts of each token, by score or by a table of token ids."""
    scores = F.softplus(logits.float()).sqrt()
    if table is not None:
        assert tokens is not None
        chosen = table[tokens.long()].long()
    else:
        ranked = scores if bias is None else scores + bias
        chosen = ranked.topk(indices.shape[1], dim=1).indices
    found = scores.gather(1, chosen)
    if renormalize:
        found = found / (found.sum(1, keepdim=True) + 1e-20)
    weights.copy_(found * scale)
    indices.copy_(chosen)
    if padding is not None:
        rows = padding[: len(indices), None]
        indices.masked_fill_(rows, -1)
        weights.masked_fill_(rows, 0)


def _top_k_of_rows(
    logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, out: torch.Tensor, k: int
) -> None:
    """Columns of the ``k`` largest in ``[start, end)`` of each row, from ``start``; then -1."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    inside = (columns >= start[:, None]) & (columns < end[:, None])
    top = logits.float().masked_fill(~inside, -torch.inf).topk(min(k, logits.shape[1]), dim=1)
    found = torch.where(top.values == -torch.inf, -1, top.indices - start[:, None])
    out[:, :k] = -1
    out[:, : found.shape[1]] = found.to(out.dtype)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    _stride0: int,
    _stride1: int,
    k: int,
) -> None:
    """``_C.top_k_per_row_prefill``: the indexer's choice for tokens of a chunk."""
    _top_k_of_rows(logits[:rows], starts[:rows].long(), ends[:rows].long(), out[:rows], k)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    lengths: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    _stride0: int,
    _stride1: int,
    k: int,
) -> None:
    """``_C.top_k_per_row_decode``: the same for ``next_n`` tokens of each decoding request."""
    if lengths.dim() == 2:
        ends = lengths.reshape(-1)[:rows].long()
    else:
        row = torch.arange(rows, device=logits.device)
        ends = (lengths[row // next_n] - next_n + row % next_n + 1).long()
    _top_k_of_rows(logits[:rows], torch.zeros_like(ends), ends, out[:rows], k)


def fused_qnorm_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    padded_heads: int,
    eps: float,
    block_size: int,
) -> torch.Tensor:
    """``_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``, for cards with OCP fp8.

    Queries ``[tokens, heads, 512]`` are normalised and rotated, and padded with heads of zeros;
    keys ``[tokens, 512]`` are rotated, quantised and stored at ``slots``, of which -1 is nowhere.
    """
    tokens, heads, dim = q.shape
    table = cos_sin[positions].float()
    wide = q.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    rows = rotate_pairs(wide.flatten(0, 1), table.repeat_interleave(heads, dim=0))
    out = q.new_zeros(tokens, padded_heads, dim)
    out[:, :heads] = rows.unflatten(0, (tokens, heads)).to(q.dtype)
    _insert(rotate_pairs(kv.float(), table).to(kv.dtype), cache, slots, block_size)
    return out


def _insert(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, rows: int) -> None:
    """Keys to rows of an ``fp8_ds_mla`` cache ``[blocks, bytes]``.

    Without a read on the host: a key that is bound for nowhere stores the first row's bytes where
    they are. No key is bound for there, since block 0 belongs to nobody.
    """
    data, scales = quantize_rows(keys, torch.float8_e4m3fn)
    slots = slots[: len(keys)]
    live = (slots >= 0)[:, None]
    block, row = slots.clamp(min=0) // rows, slots.clamp(min=0) % rows
    for view, values in ((data_view(cache, rows), data), (scale_view(cache, rows), scales)):
        view[block, row] = torch.where(live, values, view[0, 0])


def experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """``TritonExperts.apply``, which runs under the interpreter too, for minutes.

    Every expert sees every token, so that no shape depends on the routing.
    """
    limit = self.activation_config.clamp_limit
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        weight = torch.where(topk_ids == expert, topk_weights, 0).sum(1, keepdim=True)
        both = F.linear(hidden_states, w1[expert])
        inner = torch.empty(len(both), both.shape[1] // 2, dtype=both.dtype)
        silu_and_mul_with_clamp(inner, both, limit, 1.0, 0.0)
        total += weight * F.linear(inner, w2[expert]).float()
    output.copy_(total)


def indexer_queries(
    _self: Any,
    positions: torch.Tensor,
    queries: torch.Tensor,
    cos_sin: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    out: torch.Tensor,
    weights_out: torch.Tensor,
    *,
    fp8_max: float,
    **_: Any,
) -> None:
    """``FusedIndexerQRopeQuantTritonKernel``: a program a token and head, of which it has 64.

    Queries ``[tokens, heads, 128]`` rotated and quantised, their scale folded into ``weights``.
    """
    tokens, heads, _dim = queries.shape
    table = cos_sin[positions].float().repeat_interleave(heads, dim=0)
    rows = rotate_pairs(queries.float().flatten(0, 1), table).bfloat16().float()
    largest = rows.abs().amax(1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / fp8_max)))
    out.copy_((rows / scale).to(out.dtype).unflatten(0, (tokens, heads)))
    folded = weights.float() * scale.view(tokens, heads) * softmax_scale * head_scale
    weights_out.copy_(folded)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``_C.weak_ref_tensor``: the same memory; here it is kept."""
    return tensor.view(tensor.shape)


SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "_C.silu_and_mul_with_clamp": (
        "(Tensor! out, Tensor x, float limit, float alpha, float beta) -> ()",
        silu_and_mul_with_clamp,
    ),
    "_moe_C.topk_softplus_sqrt": (
        "(Tensor! w, Tensor! ids, Tensor! source, Tensor logits, bool renormalize, float scale, "
        "Tensor? bias, Tensor? tokens, Tensor? table, Tensor? padding, Tensor? bias_vl, int lo) "
        "-> ()",
        topk_softplus_sqrt,
    ),
    "_C.top_k_per_row_prefill": (
        "(Tensor logits, Tensor starts, Tensor ends, Tensor! out, int rows, int s0, int s1, int k)"
        " -> ()",
        top_k_per_row_prefill,
    ),
    "_C.top_k_per_row_decode": (
        "(Tensor logits, int next_n, Tensor lengths, Tensor! out, int rows, int s0, int s1, int k)"
        " -> ()",
        top_k_per_row_decode,
    ),
    "_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": (
        "(Tensor q, Tensor kv, Tensor! cache, Tensor slots, Tensor positions, Tensor cos_sin, "
        "int padded, float eps, int block) -> Tensor",
        fused_qnorm_rope_kv_insert,
    ),
    "_C.weak_ref_tensor": ("(Tensor t) -> Tensor", weak_ref_tensor),
}
"""Operator, its schema, and its counterpart."""


NAMED = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "fused_qk_norm_rope",
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
)
"""Operators of ``_C`` that vLLM's compiler passes name when they are imported, as they are for a
draft model. Nothing calls them here; if something does, PyTorch says that none is implemented."""


def install() -> None:
    """Register what the build lacks. After its compiled operators are loaded."""
    for name, (schema, counterpart) in SCHEMAS.items():
        namespace, operator = name.split(".")
        if hasattr(getattr(torch.ops, namespace), operator):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(operator + schema)
        library.impl(operator, counterpart, "CPU")
        _LIBRARIES.append(library)
    for operator in NAMED:
        if not hasattr(torch.ops._C, operator):
            library = torch.library.Library("_C", "FRAGMENT")
            library.define(operator + "(Tensor x) -> Tensor")
            _LIBRARIES.append(library)
