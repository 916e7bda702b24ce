"""Our PyTorch versions of vLLM's metadata kernels against the Triton originals, interpreted.

Each original is launched on the grid that its vLLM launcher uses. Outputs begin filled with a mark,
so that a value written outside the extent, or not written, differs too.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_dsv4.cpu import metadata_kernels
from vllm_dsv4.cpu.metadata_kernels import KERNELS

MARK = -77
PAD = -1


@dataclass(frozen=True)
class Launch:
    """Arguments by name, and the grid."""

    grid: tuple[int]
    arguments: dict[str, Any]


class Batch:
    """A random batch. Requests of no tokens and of one token are common.

    Attributes:
        query_start_loc: int32 ``[requests + 1]``, from ``start``.
        seq_lens: int32 ``[requests]``, at least the query's length.
        block_table: int32 ``[requests, columns]``, a view of wider rows, as vLLM passes it.
    """

    def __init__(self, seed: int, block_size: int, start: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.num_reqs = self.draw(1, 7)
        lens = torch.tensor([self.draw(0, 4) * self.draw(0, 40) for _ in range(self.num_reqs)])
        lens[self.draw(0, self.num_reqs)] = 1
        self.query_start_loc = torch.cat([torch.tensor([0]), lens.cumsum(0)]).int() + start
        before = torch.tensor([self.draw(0, 300) for _ in range(self.num_reqs)])
        self.seq_lens = (lens + before).int()
        self.num_tokens = int(lens.sum())
        columns = int(self.seq_lens.max()) // block_size + 1
        wide = torch.randint(
            1, 1000, (self.num_reqs, columns + 3), generator=self.random, dtype=torch.int32
        )
        self.block_table = wide[:, :columns]

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.random))

    def mask(self, length: int, share: float) -> torch.Tensor:
        return torch.rand(length, generator=self.random) < share

    @property
    def token_to_req(self) -> torch.Tensor:
        lens = self.query_start_loc.diff().long()
        return torch.repeat_interleave(torch.arange(self.num_reqs, dtype=torch.int32), lens)


def marked(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, MARK, dtype=dtype)


def token_request_mapping(seed: int) -> Launch:
    batch = Batch(seed, 16)
    tokens = batch.num_tokens + batch.draw(0, 300)
    return Launch(
        (-(-tokens // 256),),
        {
            "query_start_loc": batch.query_start_loc,
            "output": marked(tokens + 5),
            "num_reqs": batch.num_reqs,
            "num_mapped": batch.draw(0, tokens + 1),
            "num_tokens": tokens,
        },
    )


def compressed_slot_mapping(seed: int) -> Launch:
    ratio, block_size = [(4, 64), (128, 2), (4, 3)][seed % 3]
    batch = Batch(seed, block_size)
    slots = torch.arange(batch.num_tokens + 4)
    slots[batch.mask(len(slots), 0.2)] = PAD
    return Launch(
        (batch.num_reqs,),
        {
            "compressed_slot_mapping_ptr": marked(len(slots), dtype=torch.int64),
            "slot_mapping_ptr": slots,
            "query_start_loc_ptr": batch.query_start_loc,
            "seq_lens_ptr": batch.seq_lens,
            "block_table_ptr": batch.block_table,
            "block_table_stride": batch.block_table.stride(0),
            "block_size": block_size,
            "dcp_world_size": 1,
            "cp_interleave": 1,
            "COMPRESS_RATIO": ratio,
            "PAD_ID": PAD,
            "TRITON_BLOCK_SIZE": 16,
        },
    )


def prefill_chunk_metadata(seed: int) -> Launch:
    ratio = (1, 4, 128)[seed % 3]
    start = (0, 11)[seed % 2]
    batch = Batch(seed, 16, start)
    compressed = batch.seq_lens // ratio
    bounds = torch.cat([torch.tensor([0]), compressed.cumsum(0)]).int()
    first = start + batch.draw(0, batch.num_tokens)
    last = batch.draw(first + 1, start + batch.num_tokens + 1)
    return Launch(
        (batch.num_reqs,),
        {
            "query_start_loc_ptr": batch.query_start_loc,
            "uncompressed_seq_lens_ptr": batch.seq_lens,
            "cu_compressed_seq_lens_ptr": bounds,
            "row_start_cu_compressed_seq_lens_ptr": bounds,
            "token_to_seq_ptr": marked(int(bounds[-1]) + 3),
            "cu_compressed_seq_len_ks_ptr": marked(last - first + 3),
            "cu_compressed_seq_len_ke_ptr": marked(last - first + 3),
            "query_slice_start": first,
            "query_slice_stop": last,
            "DCP_RANK": 0,
            "DCP_WORLD": 1,
            "DCP_INTERLEAVE": 1,
            "BLOCK_SIZE": 16,
            "COMPRESS_RATIO": ratio,
        },
    )


def uniform_decode(seed: int) -> Launch:
    batch = Batch(seed, 16)
    drafts = batch.draw(1, 6)
    batch.seq_lens[batch.mask(batch.num_reqs, 0.3)] = 0  # padding requests
    width = batch.draw(1, batch.block_table.shape[1] + 1)
    rows = batch.num_reqs * drafts
    return Launch(
        (rows,),
        {
            "seq_lens_ptr": batch.seq_lens,
            "decode_seq_lens_ptr": marked(rows + 2),
            "block_table_ptr": batch.block_table,
            "block_table_stride": batch.block_table.stride(0),
            "expanded_block_table_ptr": marked(rows + 2, width),
            "expanded_bt_stride": width,
            "decode_lens_ptr": marked(rows + 2),
            "max_decode_len": drafts,
            "BLOCK_SIZE": 16,
        },
    )


def swa_indices_and_lens(seed: int) -> Launch:
    window, block_size = [(128, 64), (8, 4), (128, 3)][seed % 3]
    batch = Batch(seed, block_size)
    offset = batch.draw(0, batch.num_tokens)
    replay = torch.where(batch.mask(batch.num_reqs, 0.4), batch.seq_lens // 3, 0).int()
    rows = batch.num_tokens - offset
    return Launch(
        (rows,),
        {
            "swa_indices_ptr": marked(rows + 2, 1, window + 5),
            "swa_indices_stride": window + 5,
            "swa_lens_ptr": marked(rows + 2),
            "window_size": window,
            "index_width": window,
            "left_visible_ptr": marked(batch.num_tokens),
            "right_visible_ptr": marked(batch.num_tokens),
            "query_start_loc_ptr": batch.query_start_loc,
            "seq_lens_ptr": batch.seq_lens,
            "token_to_req_indices_ptr": batch.token_to_req,
            "is_valid_token_ptr": batch.mask(batch.num_tokens, 0.9),
            "block_table_ptr": batch.block_table,
            "block_table_stride": batch.block_table.stride(0),
            "block_size": block_size,
            "replay_start_ptr": torch.minimum(
                replay, batch.seq_lens - batch.query_start_loc.diff()
            ),
            "token_offset": offset,
            "HAS_IMAGE": False,
            "TRITON_BLOCK_SIZE": 64,
        },
    )


def prefill_gather_lens(seed: int) -> Launch:
    batch = Batch(seed, 16)
    decodes = batch.draw(0, batch.num_reqs)
    prefills = batch.num_reqs - decodes
    return Launch(
        (1,),
        {
            "prefill_gather_lens_ptr": marked(prefills + 2),
            "seq_lens_ptr": batch.seq_lens,
            "query_start_loc_ptr": batch.query_start_loc,
            "replay_start_ptr": (batch.seq_lens // 2).int(),
            "num_prefills": prefills,
            "num_decodes": decodes,
            "window_size": 128,
            "BLOCK_SIZE": 1 << (prefills - 1).bit_length(),
        },
    )


LAUNCHES: dict[Callable[..., None], Callable[[int], Launch]] = {
    metadata_kernels.token_request_mapping: token_request_mapping,
    metadata_kernels.compressed_slot_mapping: compressed_slot_mapping,
    metadata_kernels.prefill_chunk_metadata: prefill_chunk_metadata,
    metadata_kernels.uniform_decode: uniform_decode,
    metadata_kernels.swa_indices_and_lens: swa_indices_and_lens,
    metadata_kernels.prefill_gather_lens: prefill_gather_lens,
}


def original(name: str) -> Any:
    """vLLM's kernel behind a name of its dispatcher."""
    module, _, attribute = name.rpartition(".")
    outer, _, cls = module.rpartition(".")
    host = (
        getattr(importlib.import_module(outer), cls)
        if cls[0].isupper()
        else importlib.import_module(module)
    )
    return getattr(host, attribute)


def test_the_originals_are_run_by_the_interpreter() -> None:
    """Else the comparison below would compare placeholders."""
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON
    assert {type(original(name)).__name__ for name in KERNELS} == {"InterpretedFunction"}


def test_every_kernel_has_random_inputs() -> None:
    assert set(LAUNCHES) == set(KERNELS.values())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", KERNELS)
def test_ours_writes_what_the_original_writes(name: str, seed: int) -> None:
    launch = LAUNCHES[KERNELS[name]](seed)
    theirs, ours = copy.deepcopy(launch.arguments), copy.deepcopy(launch.arguments)
    original(name)[launch.grid](**theirs)
    KERNELS[name](**ours)
    for argument, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[argument], theirs[argument]), argument
    outputs = [n for n, v in launch.arguments.items() if isinstance(v, torch.Tensor)]
    changed = [n for n in outputs if not torch.equal(theirs[n], launch.arguments[n])]
    assert changed, "the original wrote nothing: these inputs test nothing"
