"""Ring writes and compression against vLLM's own operators and Triton kernels, on equal inputs.

vLLM's CPU operators are C++; its Triton kernels run under the interpreter. Both are given paged
caches, or our rings as caches whose blocks are slots.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.compress_state import save_state
from vllm_dsv4.kernels.fp8_ds_mla import FP8_MAX, NOPE_DIM, ROW_BYTES, data_view
from vllm_dsv4.kernels.prepare_keys import prepare_keys
from vllm_dsv4.kernels.ring_write import write_ring

from tests.kernels.compressing import (
    BLOCK_ROWS,
    HISTORY_POISON,
    SHAPES,
    Bench,
    Values,
    random_weights,
)
from tests.kernels.steps import Chunk, make_step
from vllm_dsv4.commands.isa.vllm_kernels import import_kernels
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

E4M3FN = torch.float8_e4m3fn
TOKENS = 261
ROUNDED_OTHERWISE = 1e-3
"""Share of values that may come out as the next one of their type, where sums end near a tie."""


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    import_kernels()
    from vllm import _custom_ops
    from vllm.models.deepseek_v4.common.ops import (
        cache_utils,
        fused_compress_quant_cache,
        save_partial_states,
    )

    return SimpleNamespace(
        cpu=_custom_ops,
        rows=cache_utils,
        compress=fused_compress_quant_cache,
        save_state=save_partial_states.SavePartialStatesKernel.kernel,
    )


class Paged:
    """One sequence's state and history as vLLM keeps them, and our own rows for comparison."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(len(name))
        self.shape = SHAPES[name]
        self.weights = random_weights(self.shape)
        self.values = Values.random(TOKENS, self.shape)
        self.ours = Bench(self.weights, slots=2, dtype=E4M3FN)
        self.ours.run(0, self.values, [(0, 130), (130, 131), (131, TOKENS)])
        self.positions = torch.arange(TOKENS)
        self.history_rows = self.ours.block_rows(0, self.positions // self.shape.ratio)
        self.block_size = 4 if self.shape.ratio == 4 else 8
        blocks = -(-TOKENS // self.block_size)
        self.state = torch.full((blocks, self.block_size, 2 * self.shape.width), float("nan"))
        self.history = torch.full_like(self.ours.history.buffer, HISTORY_POISON)

    def check(self) -> None:
        groups = torch.arange(TOKENS // self.shape.ratio)
        rows = self.ours.block_rows(0, groups)
        theirs = type(self.ours.history)(self.history, BLOCK_ROWS, E4M3FN)
        their_rows = theirs.load_rows(rows // BLOCK_ROWS, rows % BLOCK_ROWS)
        our_rows = self.ours.stored(0, len(groups))
        differ = our_rows != their_rows
        assert differ.float().mean() <= ROUNDED_OTHERWISE
        neighbours = (our_rows - their_rows).abs() <= their_rows.abs() / 8 + 1e-4
        assert neighbours.all()
        untouched = self.ours.history.buffer == HISTORY_POISON
        assert (self.history[untouched] == HISTORY_POISON).float().mean() >= 1 - ROUNDED_OTHERWISE


@pytest.mark.parametrize("name", SHAPES)
def test_compressed_rows_are_those_of_vllm_on_the_cpu(vllm: SimpleNamespace, name: str) -> None:
    case = Paged(name)
    values, weights, shape = case.values, case.weights, case.shape
    vllm.cpu.save_partial_states_cpu(
        values.keys, values.scores, weights.bias, case.positions, case.state, case.positions
    )
    window = case.positions[:, None] - shape.window + 1 + torch.arange(shape.window)
    store = (
        vllm.cpu.compress_norm_rope_store_cpu
        if shape.head == 512
        else vllm.cpu.compress_norm_rope_store_indexer_cpu
    )
    store(
        case.state,
        window.clamp_min(-1),
        case.positions,
        case.history_rows,
        weights.norm.float(),
        weights.eps,
        weights.cos_sin,
        case.history,
        BLOCK_ROWS,
        shape.ratio,
    )
    case.check()


@pytest.mark.parametrize(
    ("name", "stages"), [("c4", 1), ("c4-indexer", 1), ("c128", 1), ("c128", 2)]
)
def test_compressed_rows_are_those_of_vllm_in_triton(
    vllm: SimpleNamespace, name: str, stages: int
) -> None:
    case = Paged(name)
    values, weights, shape = case.values, case.weights, case.shape
    vllm.save_state[(TOKENS,)](
        values.keys,
        values.keys.stride(0),
        values.scores,
        values.scores.stride(0),
        weights.bias,
        weights.bias.stride(0),
        case.positions,
        case.state,
        case.state.stride(0),
        case.state.stride(1),
        case.positions,
        case.block_size,
        HEAD_SIZE=shape.width,
        TRITON_BLOCK_SIZE=shape.width,
        STATE_WIDTH=shape.width,
        COMPRESS_RATIO=shape.ratio,
    )
    requests = torch.zeros(TOKENS, dtype=torch.int32)
    block_table = torch.arange(len(case.state), dtype=torch.int32)[None]
    is_attention = shape.head == 512
    quantisation = {
        "quant_block": 64 if is_attention else 128,
        "token_stride": 576 if is_attention else 128,
        "scale_dim": 8 if is_attention else 4,
    }
    if stages == 2:
        blocks = case.history.as_strided(
            (len(case.history), BLOCK_ROWS, 1), (case.history.stride(0), 1, 1)
        )
        with patch.object(vllm.compress, "_n_cu", lambda: 4):
            vllm.compress._launch_two_stage_sparse_attn_compressor(
                state_cache=case.state,
                token_to_req_indices=requests,
                positions=case.positions,
                slot_mapping=case.positions,
                block_table=block_table,
                block_size=case.block_size,
                state_width=shape.width,
                compress_ratio=shape.ratio,
                cos_sin_cache=weights.cos_sin,
                kv_cache=blocks,
                kv_slot_mapping=case.history_rows,
                rms_norm_weight=weights.norm,
                rms_norm_eps=weights.eps,
                head_dim=shape.head,
                rope_head_dim=64,
                num_actual=TOKENS,
                compress_scratch=torch.empty(TOKENS, shape.head),
                **quantisation,
            )
    else:
        kernel = (
            vllm.compress._fused_kv_compress_norm_rope_insert_sparse_attn
            if is_attention
            else vllm.compress._fused_kv_compress_norm_rope_insert_indexer_attn
        )
        kernel[(TOKENS,)](
            case.state,
            case.state.stride(0),
            case.state.stride(1),
            requests,
            case.positions,
            case.positions,
            block_table,
            block_table.stride(0),
            case.block_size,
            weights.norm,
            weights.eps,
            weights.cos_sin,
            weights.cos_sin.stride(0),
            case.history,
            case.history_rows,
            BLOCK_ROWS,
            HEAD_SIZE=shape.head,
            TRITON_BLOCK_SIZE=shape.head,
            STATE_WIDTH=shape.width,
            COMPRESS_RATIO=shape.ratio,
            OVERLAP=shape.overlaps,
            ROPE_HEAD_DIM=64,
            FP8_MAX=448.0,
            KV_BLOCK_STRIDE=case.history.stride(0),
            **{key.upper(): value for key, value in quantisation.items()},
            **({"SANITIZE_CACHE_NANS": False} if is_attention else {}),
        )
    case.check()


@pytest.mark.parametrize("name", SHAPES)
def test_state_rows_are_those_of_vllm_to_the_bit(vllm: SimpleNamespace, name: str) -> None:
    torch.manual_seed(4)
    shape = SHAPES[name]
    bench = Bench(random_weights(shape), slots=4, dtype=E4M3FN, lookahead=2)
    chunks = [Chunk(3, 126, 5), Chunk(1, 7, 4)]
    step = make_step(chunks, padding_tokens=1)
    values = Values.random(10, shape)
    rows = bench.ring.rows
    slots = torch.tensor([3] * 5 + [1] * 4 + [-1])
    mapping = torch.where(slots < 0, -1, slots * rows + step.positions % rows)
    theirs = bench.ring.rows_view().clone().flatten(2)
    vllm.cpu.save_partial_states_cpu(
        values.keys, values.scores, bench.weights.bias, step.positions, theirs, mapping
    )
    save_state(values.keys, values.scores, bench.weights, bench.ring, step)
    ours = bench.ring.rows_view().flatten(2).view(torch.int32)
    assert torch.equal(ours, theirs.view(torch.int32))


def _keys_for_two_sequences(
    smallest_exponent: int,
) -> tuple[torch.Tensor, list[Chunk], torch.Tensor]:
    """bf16 keys from ``10 ** smallest_exponent``, their chunks, and ``slot * 128 + row``."""
    magnitude = 10.0 ** torch.empty(138, 8, 1).uniform_(smallest_exponent, 3)
    keys = (torch.randn(138, 8, 64) * magnitude).flatten(1).bfloat16()
    chunks = [Chunk(2, 120, 128), Chunk(1, 250, 10)]
    positions = make_step(chunks).positions
    slots = torch.tensor([2] * 128 + [1] * 10)
    return keys, chunks, slots * 128 + positions % 128


def _ring(dtype: torch.dtype) -> KeyCache:
    return KeyCache(torch.full((3, 128 * ROW_BYTES), 0xA7, dtype=torch.uint8), 128, dtype)


def test_key_rows_are_those_of_vllm_on_the_cpu(vllm: SimpleNamespace) -> None:
    torch.manual_seed(10)
    # The CPU operator takes a scale to be 2**-13 or more, vLLM's GPU kernels and we 2**-22.
    keys, chunks, mapping = _keys_for_two_sequences(smallest_exponent=-1)
    ours, theirs = _ring(E4M3FN), _ring(E4M3FN)
    step = make_step(chunks)
    cos_sin = random_weights(SHAPES["c4"]).cos_sin
    write_ring(prepare_keys(keys, cos_sin, torch.bfloat16, step), ours, step)
    queries = torch.randn(138, 1, 512).bfloat16()
    vllm.cpu.fused_qnorm_rope_kv_insert_cpu(
        queries, keys, step.positions, theirs.buffer, mapping, cos_sin, 1, 1e-6, 128
    )
    # Below the normal values of fp8, the CPU operator stores zero.
    subnormal = data_view(ours.buffer, 128)[..., :NOPE_DIM] & 0x7F < 8
    for ring in (ours, theirs):
        data_view(ring.buffer, 128)[..., :NOPE_DIM][subnormal] &= 0x80
    assert subnormal.float().mean() < 0.05
    assert torch.equal(ours.buffer, theirs.buffer)


@pytest.mark.parametrize("dtype", [E4M3FN, torch.float8_e4m3fnuz], ids=str)
def test_key_rows_are_those_of_vllm_in_triton(vllm: SimpleNamespace, dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    keys, chunks, mapping = _keys_for_two_sequences(smallest_exponent=-6)
    ours, theirs = _ring(dtype), _ring(dtype)
    write_ring(keys, ours, make_step(chunks))
    vllm.rows.quantize_and_insert_k_kernel[(138,)](
        keys,
        mapping,
        theirs.buffer,
        138,
        input_dim=512,
        fp8_dim=448,
        bf16_dim=64,
        scale_dim=8,
        quant_block=64,
        cache_block_size=128,
        token_data_size=576,
        block_stride=theirs.stride,
        fp8_max=FP8_MAX[dtype],
        n_quant_blocks=8,
        use_fnuz=dtype == torch.float8_e4m3fnuz,
    )
    assert torch.equal(ours.buffer, theirs.buffer)
