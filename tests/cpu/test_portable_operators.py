"""The operators in plain C, against the references that the ROCm kernels are held against.

They stand in for vLLM's own only where a processor lacks those; they are tried on every one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_dsv4.kernels import fp8_ds_mla

from vllm_dsv4.cpu.portable import operators

ROWS, HEADS, TOKENS = 128, 4, 60
FN = torch.float8_e4m3fn


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_keys(count: int) -> torch.Tensor:
    spread = torch.exp2(torch.randint(-12, 8, (count, 1), generator=generator(1)).float())
    return (torch.randn(count, 512, generator=generator()) * spread).bfloat16()


def test_rows_are_stored_and_read_to_the_bit() -> None:
    keys = random_keys(300)
    keys[7] = 0
    cache = torch.zeros(3, ROWS * fp8_ds_mla.ROW_BYTES + 64, dtype=torch.uint8)
    expected = cache.clone()
    slots = torch.arange(300)
    slots[5] = -1
    still = torch.zeros(2000, 64)
    still[:, :32] = 1  # cosines of no rotation
    queries = keys[:, None].expand(-1, HEADS, -1)
    operators._queries_and_keys(queries, keys, slots, cache, slots, still, HEADS, 1e-6, ROWS)
    kept = slots[slots >= 0]
    fp8_ds_mla.store_rows(expected, ROWS, kept // ROWS, kept % ROWS, keys[kept], FN)
    assert torch.equal(cache, expected)
    loaded = torch.empty(len(kept), 512)
    operators._call("load_rows", cache, cache.stride(0), ROWS, kept, len(kept), loaded)
    assert torch.equal(loaded, fp8_ds_mla.load_rows(expected, ROWS, kept // ROWS, kept % ROWS, FN))


def test_attention_is_softmax_with_a_sink_over_the_listed_rows() -> None:
    keys = random_keys(2 * ROWS).clamp(-4, 4)
    cache = torch.zeros(2, ROWS * fp8_ds_mla.ROW_BYTES, dtype=torch.uint8)
    rows = torch.arange(2 * ROWS)
    fp8_ds_mla.store_rows(cache, ROWS, rows // ROWS, rows % ROWS, keys, FN)
    exact = fp8_ds_mla.load_rows(cache, ROWS, rows // ROWS, rows % ROWS, FN).double()
    window = torch.randint(-1, 2 * ROWS, (TOKENS, 40), generator=generator(2))
    history = torch.randint(-1, 2 * ROWS, (TOKENS, 9), generator=generator(3))
    window[0], history[0] = -1, -1
    q = torch.randn(TOKENS, HEADS, 512, generator=generator(4)).bfloat16()
    sink = torch.tensor([-1.0, 0.0, 2.0, -torch.inf])
    out = torch.empty_like(q)
    operators._attend(out, q, cache, window, ROWS, cache, history, ROWS, sink, 0.05)
    for token in range(1, TOKENS):
        seen = torch.cat([window[token], history[token]])
        read = exact[seen[seen >= 0]]
        scores = torch.cat([0.05 * q[token].double() @ read.T, sink[:, None].double()], dim=1)
        expected = scores.softmax(dim=1)[:, :-1] @ read
        assert (out[token].double() - expected).norm() < 0.003 * expected.norm(), token
    assert not out[0, :3].any()


def test_streams_are_mixed_as_in_vllms_own_reference() -> None:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    x = torch.randn(TOKENS, 4, 256, generator=generator()).bfloat16()
    fn = torch.randn(24, 1024, generator=generator(1)) / 32
    scale, base = torch.tensor([0.5, 1.5, 2.0]), torch.randn(24, generator=generator(2))
    y, post, comb = operators._streams_in(x, fn, scale, base, 4, 20, 1e-6, 1e-6)
    expected = mhc_pre_torch(x, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    torch.testing.assert_close(post, expected[0][..., 0])
    torch.testing.assert_close(comb, expected[1])
    torch.testing.assert_close(y, expected[2])
    out = operators._streams_out(y, x, post, comb)
    torch.testing.assert_close(out, mhc_post_torch(y, x, post[..., None], comb))


@pytest.mark.parametrize(("ratio", "head"), [(4, 512), (4, 128), (128, 512)])
def test_a_closed_group_is_the_softmax_mean_of_its_window(ratio: int, head: int) -> None:
    overlaps = 2 if ratio == 4 else 1
    width, window, tokens = overlaps * head, overlaps * ratio, 2 * ratio
    kv = torch.randn(tokens, width, generator=generator())
    score = 3 * torch.randn(tokens, width, generator=generator(1))
    bias = torch.randn(ratio, width, generator=generator(2))
    norm = 1 + 0.1 * torch.randn(head, generator=generator(3))
    angles = torch.randn(tokens, 32, generator=generator(4))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    state = torch.full((1, tokens, 2 * width), torch.nan)
    positions = torch.arange(tokens)
    operators._save_states(kv, score, bias, positions, state, positions)
    gather = positions[:, None] - window + 1 + torch.arange(window)
    cache = torch.zeros(1, 8 * 1024, dtype=torch.uint8)
    slots = positions // ratio
    operators._compress(state, gather, positions, slots, norm, 1e-6, cos_sin, cache, 2, ratio)
    # The second group: its window is full.
    half = torch.arange(window) // ratio
    rows = torch.arange(tokens - window, tokens)
    column = (half * head)[:, None] + torch.arange(head)
    keys = kv[rows[:, None], column].double()
    weights = (score[rows[:, None], column] + bias[(rows % ratio)[:, None], column]).double()
    mean = (weights.softmax(dim=0) * keys).sum(dim=0)
    normed = mean / (mean.square().mean() + 1e-6).sqrt() * norm.double()
    even, odd = normed[-64::2].clone(), normed[-63::2].clone()
    cos, sin = cos_sin[ratio].double().chunk(2)
    normed[-64::2], normed[-63::2] = even * cos - odd * sin, odd * cos + even * sin
    if head == 512:
        stored = fp8_ds_mla.load_rows(cache, 2, torch.tensor([0]), torch.tensor([1]), FN)[0]
    else:
        scale = cache[0, 2 * head : 2 * head + 8].view(torch.float32)[1]
        stored = cache[0, head : 2 * head].view(FN).float() * scale
    assert (stored.double() - normed).norm() < 0.03 * normed.norm()


def test_no_result_shares_memory_with_an_argument() -> None:
    """torch.compile refuses an operator that returns what it was given."""
    gates, experts = torch.randn(3, 8, generator=generator()), torch.zeros(3, 2, dtype=torch.int32)
    x, out = torch.ones(3, 4, 256).bfloat16(), torch.ones(3, 256).bfloat16()
    fn, scale, base = torch.ones(24, 1024), torch.ones(3), torch.ones(24)
    post, comb = torch.ones(3, 4), torch.ones(3, 4, 4)
    q, positions, cos_sin = torch.ones(3, 4, 512).bfloat16(), torch.arange(3), torch.ones(8, 64)
    cache = torch.zeros(1, ROWS * fp8_ds_mla.ROW_BYTES, dtype=torch.uint8)
    calls: dict[str, tuple[Any, ...]] = {
        "convert_weight_packed": (fn,),
        "fused_qnorm_rope_kv_insert_cpu": (
            q, q[:, 0].contiguous(), positions, cache, positions, cos_sin, 4, 1e-6, ROWS
        ),
        "inverse_gptj_rope_o_proj_cpu": (q.float(), positions, cos_sin, 64),
        "hc_pre_fused_cpu": (x, fn, scale, base, 4, 20, 1e-6, 1e-6),
        "hc_post_fused_cpu": (out, x, post, comb),
        "hc_head_fused_cpu": (x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6),
        "biased_topk_cpu": (out, gates, gates[0], 2, True, "sqrtsoftplus", 0, 1.5, True),
        "hash_topk_cpu": (gates, experts, 2, "sqrtsoftplus", 0, 8, 1.5),
        "fp8_paged_mqa_logits_cpu": (
            torch.ones(3, 4, 128).to(FN), cache, post, positions, torch.zeros(3, 1).int(), ROWS, 3
        ),
    }  # fmt: skip
    returning = {
        schema.partition("(")[0]: compute
        for schema, compute in operators.OPERATORS.items()
        if not schema.endswith("-> ()")
    }
    assert calls.keys() == returning.keys()
    for name, arguments in calls.items():
        results = returning[name](*arguments)
        given = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor)}
        for result in results if isinstance(results, tuple) else (results,):
            assert result.untyped_storage().data_ptr() not in given, name


def test_the_platform_registers_what_vllms_library_lacks_and_nothing_else() -> None:
    """Either every operator is vLLM's own, or every one is ours: never a mixture."""
    from vllm import _custom_ops  # noqa: F401
    from vllm.platforms import current_platform

    from vllm_dsv4.cpu.platform import Dsv4CpuPlatform

    assert isinstance(current_platform, Dsv4CpuPlatform)
    for schema in operators.OPERATORS:
        assert hasattr(torch.ops._C, schema.partition("(")[0]), schema
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    assert operators.in_use() == (not has_bf16), "vLLM builds its operators for other processors"


def test_every_operator_that_vllms_cpu_model_calls_is_there() -> None:
    """Also those that only long prompts, warm-ups and idle data-parallel engines reach."""
    import vllm
    from vllm import _custom_ops  # noqa: F401

    package = Path(vllm.__file__).parent
    files = [
        *(package / "models" / "deepseek_v4" / "cpu").glob("*.py"),
        package / "model_executor" / "layers" / "sparse_attn_indexer.py",
    ]
    called = {
        name
        for file in files
        for name in re.findall(r"\bops\.(?:_C\.)?(\w+_cpu)\(", file.read_text())
    }
    assert {"flash_mla_with_kvcache_cpu", "topk_transform_512_cpu"} <= called
    assert [name for name in sorted(called) if not hasattr(torch.ops._C, name)] == []


def test_without_a_compiler_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(operators, "COMPILER", "no-such-compiler")
    with pytest.raises(operators.NoPortableOperators, match=r"no-such-compiler.* Install one"):
        operators._compile(tmp_path / "made.so")


def test_what_the_compiler_says_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "operators.c"
    broken.write_text("not C")
    monkeypatch.setattr(operators, "SOURCE", broken)
    with pytest.raises(operators.NoPortableOperators, match="error"):
        operators._compile(tmp_path / "made.so")
