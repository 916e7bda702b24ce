"""Ours against vLLM's own ROCm kernels, run by the interpreter on the same caches.

vLLM's window cache is paged: a ring is given to it as a cache whose blocks are slots, with the
index of every row of the window. Its launchers refuse CPU tensors, so its kernels are launched
here with its launchers' constants.
"""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.prefill import prefill

from tests.kernels.inputs import (
    BF16,
    E4M3FN,
    E4M3FNUZ,
    SCALE,
    WINDOW,
    cos_sin_table,
    fill_window,
    poisoned_cache,
    random_compressed,
    random_queries,
    random_rows,
    random_sink,
)
from vllm_dsv4.commands.isa.vllm_kernels import import_kernels
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

POSITIONS = torch.tensor([0, 127, 128, 300])
LENGTHS = [0, 40, 33, 100]
HEADS = 16
SPLITS = 2
KERNEL_DIMS = {"NOPE_DIM": 448, "ROPE_DIM": 64, "BLOCK_H": 16}


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


@pytest.fixture(scope="module")
def vllm() -> ModuleType:
    return import_kernels()


def assert_same(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both round weights and outputs to bf16, in a different order of tiles."""
    relative = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    assert relative < 0.002, f"{name}: {relative:.5f} apart"


def rings(dtype: torch.dtype, rows: int = WINDOW + 2) -> tuple[KeyCache, torch.Tensor]:
    ring = poisoned_cache(len(POSITIONS) + 1, rows, dtype)
    for slot, position in enumerate(POSITIONS.tolist(), start=1):
        fill_window(ring, slot, position - WINDOW + 1, position, seed=slot)
    return ring, torch.arange(1, len(POSITIONS) + 1, dtype=torch.int32)


def ring_indices(ring: KeyCache, slots: torch.Tensor) -> list[torch.Tensor]:
    """For each token, the rows of its window counted through the slots."""
    return [
        int(slot) * ring.rows + torch.arange(max(0, int(p) - WINDOW + 1), int(p) + 1) % ring.rows
        for slot, p in zip(slots, POSITIONS, strict=True)
    ]


def history_indices(compressed: CompressedKeys) -> list[torch.Tensor]:
    return [
        row[:length]
        for row, length in zip(compressed.indices, compressed.lengths.tolist(), strict=True)
    ]


def ragged(lists: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0).int()
    return torch.cat(lists).int(), ends


class Partials:
    """vLLM's partial results, as its launcher allocates them."""

    def __init__(self, tokens: int) -> None:
        self.m = torch.full((tokens, SPLITS, HEADS), torch.nan)
        self.l = torch.full_like(self.m, torch.nan)
        self.a = torch.full((tokens, SPLITS, HEADS, 512), torch.nan)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.m, self.l, self.a

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.m.stride()[:2], *self.a.stride()[:3])

    def reduce(
        self, vllm: ModuleType, sink: torch.Tensor, cos_sin: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.full((len(self.m), HEADS, 512), torch.nan, dtype=BF16)
        vllm._sparse_attn_decode_reduce_kernel[(len(self.m), HEADS)](
            *self.tensors,
            sink,
            out,
            None if cos_sin is None else POSITIONS,
            cos_sin,
            None,
            *out.stride()[:2],
            0,
            16,
            *self.strides,
            0 if cos_sin is None else cos_sin.stride(0),
            HEADS,
            HAS_ATTN_SINK=True,
            ADAPTIVE_SPLITS=False,
            COMB_DIM=512,
            BLOCK_H=1,
            NUM_SPLITS=SPLITS,
            SPLITS_PAD=SPLITS,
            FUSE_INV_ROPE=cos_sin is not None,
            NOPE=448,
            HALF=32,
            QUANT_OUT=False,
        )
        return out


def _sources(ring: KeyCache, slots: torch.Tensor, compressed: CompressedKeys) -> tuple:
    return (
        ring.buffer,
        *ragged(ring_indices(ring, slots)),
        compressed.cache.buffer,
        *ragged(history_indices(compressed)),
    )


def _sizes(ring: KeyCache, compressed: CompressedKeys) -> tuple[int, ...]:
    caches = (ring, compressed.cache)
    return (
        *(cache.stride for cache in caches),
        *(len(cache.buffer) * cache.rows for cache in caches),
    )


@pytest.mark.parametrize("rotate", [False, True])
def test_decode_as_on_gfx950(vllm: ModuleType, rotate: bool) -> None:
    ring, slots = rings(E4M3FN)
    compressed = random_compressed(LENGTHS, 128, E4M3FN, seed=5)
    queries, sink = random_queries(4, HEADS), random_sink(HEADS)
    cos_sin = cos_sin_table(301) if rotate else None
    parts = Partials(4)
    main_stride, extra_stride, main_rows, extra_rows = _sizes(ring, compressed)
    vllm._sparse_attn_decode_gfx950_partial_kernel[(4, SPLITS, 1)](
        queries,
        *_sources(ring, slots, compressed),
        *parts.tensors,
        *queries.stride()[:2],
        main_stride,
        extra_stride,
        main_rows,
        extra_rows,
        ring.rows,
        compressed.cache.rows,
        SCALE,
        HEADS,
        HAS_EXTRA=True,
        **KERNEL_DIMS,
        IS_FNUZ_MAIN=False,
        IS_FNUZ_EXTRA=False,
        TRUST_EXTRA_CACHE_NAN_FREE=False,
        ADAPTIVE_SPLITS=False,
        ONE_WAVE_SPLITS=SPLITS,
        BLOCK_K=32,
        NUM_SPLITS=SPLITS,
        NUM_STAGES=1,
    )
    for num_splits in (1, 3):
        ours = decode(
            queries,
            ring,
            slots,
            POSITIONS,
            scale=SCALE,
            sink=sink,
            compressed=compressed,
            inverse_rope=cos_sin,
            num_splits=num_splits,
        )
        assert_same("gfx950", ours, parts.reduce(vllm, sink, cos_sin))


def test_decode_as_on_gfx942_with_fnuz_rings(vllm: ModuleType) -> None:
    ring, slots = rings(E4M3FNUZ)
    compressed = random_compressed(LENGTHS, 128, E4M3FN, seed=5)
    queries, sink = random_queries(4, HEADS), random_sink(HEADS)
    parts = Partials(4)
    vllm._sparse_attn_decode_partial_kernel[(4, SPLITS, 1)](
        queries,
        *_sources(ring, slots, compressed),
        *parts.tensors,
        *queries.stride()[:2],
        *_sizes(ring, compressed)[:2],
        *parts.strides,
        *_sizes(ring, compressed)[2:],
        ring.rows,
        compressed.cache.rows,
        SCALE,
        HEADS,
        HAS_EXTRA=True,
        NOPE_BLOCK=512,
        **KERNEL_DIMS,
        IS_FNUZ_MAIN=True,
        IS_FNUZ_EXTRA=False,
        BLOCK_K=32,
        NUM_SPLITS=SPLITS,
        NUM_STAGES=1,
    )
    ours = decode(queries, ring, slots, POSITIONS, scale=SCALE, sink=sink, compressed=compressed)
    assert_same("gfx942", ours, parts.reduce(vllm, sink, None))


def test_decode_as_on_other_cards(vllm: ModuleType) -> None:
    ring, slots = rings(E4M3FN)
    compressed = random_compressed(LENGTHS, 128, E4M3FN, seed=5)
    queries, sink = random_queries(4, HEADS), random_sink(HEADS)
    theirs = torch.full_like(queries, torch.nan)
    vllm._sparse_attn_decode_ragged_kernel[(4, 1)](
        queries,
        *_sources(ring, slots, compressed),
        sink,
        theirs,
        *queries.stride()[:2],
        *theirs.stride()[:2],
        *_sizes(ring, compressed),
        ring.rows,
        compressed.cache.rows,
        SCALE,
        HEADS,
        HAS_ATTN_SINK=True,
        HAS_EXTRA=True,
        NOPE_BLOCK=512,
        **KERNEL_DIMS,
        IS_FNUZ_MAIN=False,
        IS_FNUZ_EXTRA=False,
        BLOCK_K=16,
    )
    ours = decode(queries, ring, slots, POSITIONS, scale=SCALE, sink=sink, compressed=compressed)
    assert_same("portable", ours, theirs)


def test_decode_over_bf16_rows(vllm: ModuleType) -> None:
    """vLLM's kernel has one cache: the window of a ring without padding between its slots."""
    ring = poisoned_cache(5, WINDOW, BF16, padding=0)
    for slot, position in enumerate(POSITIONS.tolist(), start=1):
        fill_window(ring, slot, position - WINDOW + 1, position, seed=slot)
    slots = torch.arange(1, 5, dtype=torch.int32)
    queries, sink = random_queries(4, HEADS), random_sink(HEADS)
    rows = ring.buffer.view(BF16).reshape(-1, 512)
    parts = Partials(4)
    vllm._sparse_attn_decode_ragged_bf16_partial_kernel[(4, SPLITS, 1)](
        queries,
        rows,
        *ragged(ring_indices(ring, slots)),
        *parts.tensors,
        *queries.stride(),
        *rows.stride(),
        *parts.strides,
        HEADS,
        512,
        len(rows),
        SCALE,
        BLOCK_H=16,
        BLOCK_D=512,
        BLOCK_K=32,
        NUM_SPLITS=SPLITS,
    )
    ours = decode(queries, ring, slots, POSITIONS, scale=SCALE, sink=sink)
    assert_same("bf16", ours, parts.reduce(vllm, sink, None))


def test_prefill_over_gathered_rows(vllm: ModuleType) -> None:
    """Two chunks: their older rows, their keys and their history gathered in one list of rows."""
    firsts, counts = [100, 0], [6, 3]
    ring = poisoned_cache(3, WINDOW, E4M3FN)
    fill_window(ring, 1, 0, 99, seed=1)
    keys, queries = random_rows(9, seed=2), random_queries(9, HEADS)
    sink = random_sink(HEADS)
    compressed = random_compressed([25] * 6 + [0] * 3, 32, E4M3FN, seed=3)
    positions = torch.cat([torch.arange(100, 106), torch.arange(3)])
    older = ring.load_rows(torch.ones(100), torch.arange(100)).to(BF16)
    rows = compressed.cache.rows
    blocks = torch.arange(len(compressed.cache.buffer)).repeat_interleave(rows)
    history = compressed.cache.load_rows(blocks, torch.arange(rows).repeat(len(blocks) // rows))
    gathered = torch.cat([older, keys, history.to(BF16)])
    lists = []
    for token in range(9):
        first = 0 if token < 6 else 106
        own = torch.arange(first, 101 + token)
        chosen = history_indices(compressed)[token]
        lists.append(torch.cat([own, torch.where(chosen < 0, -1, chosen + 109)]))
    theirs = torch.full_like(queries, torch.nan)
    vllm._sparse_attn_prefill_ragged_kernel[(9, 1)](
        queries,
        gathered,
        *ragged(lists),
        sink,
        theirs,
        *queries.stride(),
        *gathered.stride(),
        *theirs.stride(),
        HEADS,
        512,
        len(gathered),
        SCALE,
        HAS_ATTN_SINK=True,
        OUT_DV=512,
        BLOCK_H=16,
        BLOCK_D=512,
        BLOCK_K=16,
    )
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    sequences = torch.arange(2).repeat_interleave(torch.tensor(counts)).int()
    slots = torch.tensor([1, 2], dtype=torch.int32)
    assert firsts == positions[starts[:2].long()].tolist()
    ours = prefill(
        queries,
        keys,
        ring,
        slots,
        starts,
        sequences,
        positions,
        scale=SCALE,
        sink=sink,
        compressed=compressed,
    )
    assert_same("prefill", ours, theirs)
