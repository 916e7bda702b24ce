"""A CPU attention layer and its compressor, by content: their own code, without vLLM's operators.

The operators' stand-ins write a token's number where they are told to, and look for the numbers of
the tokens that they need where they are told to find them. So the code between them is tried on any
processor: what is written where, what is read from where, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dsv4.cpu.attention import RingCpuAttention
from vllm_dsv4.cpu.backend import CpuRingBackend, CpuRingMetadata, CpuRingMetadataBuilder
from vllm_dsv4.cpu.compressor import RingCpuCompressor
from vllm_dsv4.cpu.staging import Staging
from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingGeometry, RingKind
from vllm_dsv4.ring.layer import RingCache

BLOCK, MAX_LEN, MAX_TOKENS, MAX_REQUESTS = 256, 640, 64, 4
GEOMETRY = RingGeometry((4,), lookahead=2, max_model_len=MAX_LEN, num_slots=6, num_snapshots=4)
DATA_WORDS = 576 // 8
"""Of a window row, in int64; the scales of all rows follow the data of all rows."""


class ContentError(AssertionError):
    """A token reads a row that is not the one that it needs."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + length - 1`` of a sequence.

    Attributes:
        slot: ring slot.
        source: snapshot slot that was hit, with ``start`` as the hit's length.
        target: snapshot slot to fill at the first boundary.
    """

    sequence: int
    start: int
    length: int
    slot: int
    source: int = 0
    target: int = 0


def number(sequence: Any, position: Any) -> Any:
    return 1000 * (1 + sequence) + position


class Builder(CpuRingMetadataBuilder):
    def __init__(self, arena: RingArena) -> None:
        self.geometry, self.arenas, self.poison = arena.geometry, [arena], True
        self.numbers = row.SlotNumbers(self.geometry.num_slots, self.geometry.num_snapshots)
        self.kv_cache_spec: Any = SimpleNamespace(block_size=BLOCK)


class Attention(RingCpuAttention):
    """Window rows are written and read by number; there is no compressed history."""

    def __init__(self, arena: RingArena, staging: Staging) -> None:
        nn.Module.__init__(self)
        self.staging = staging
        self.swa_cache_layer = RingCache(RingKind.SWA, "window", arena, CpuRingBackend)

    def _places(self, cache: torch.Tensor, rows: torch.Tensor) -> tuple[Any, Any]:
        """Views of a row's data and of its scales, and the indices of ``rows`` in both."""
        per_slot = self.swa_cache_layer.shape.rows
        words = cache.view(torch.int64)
        data = words[:, : per_slot * DATA_WORDS].unflatten(1, (per_slot, DATA_WORDS))[..., 0]
        scales = words[:, per_slot * DATA_WORDS : per_slot * (DATA_WORDS + 1)]
        return (data, scales), (rows // per_slot, rows % per_slot)

    def _insert(self, q: Any, kv: Any, positions: Any, cache: Any, rows: Any) -> torch.Tensor:
        views, place = self._places(cache, rows)
        for view in views:
            view[place] = kv[:, 0].long()
        return q

    def _attend(self, output: Any, q: Any, window: Any, window_rows: Any, *_: Any) -> None:
        for one, (sequence, position) in zip(window_rows, q.tolist(), strict=True):
            oldest = max(0, position - 127)
            expected = [number(sequence, p) for p in range(oldest, position + 1)]
            views, place = self._places(window, one[one >= 0])
            for view in views:
                require(view[place].tolist(), expected, f"the window of {sequence} at {position}")

    def _compressed(self, metadata: Any, positions: torch.Tensor) -> Any:
        return None, positions.new_empty((metadata.step.num_tokens, 0)), 1

    def _ring_metadata(self) -> CpuRingMetadata:
        return World.now


class Compressor(RingCpuCompressor):
    """State rows are written and read by number; nothing is compressed."""

    def __init__(self, arena: RingArena, staging: Staging) -> None:
        nn.Module.__init__(self)
        self.staging, self.k_cache_prefix, self.ape = staging, "history", None
        self.state_cache = RingCache(RingKind.C4_ATTENTION, "state", arena, CpuRingBackend)

    def _compress(self, rows: Any, read: Any, positions: Any, sequences: Any, _: Any) -> None:
        per_slot = self.state_cache.shape.rows
        for one, position, sequence in zip(
            read, positions.tolist(), sequences.tolist(), strict=True
        ):
            if (position + 1) % 4 == 0:
                one = one[one >= 0]
                expected = [number(sequence, p) for p in range(max(0, position - 7), position + 1)]
                found = rows[one // per_slot, one % per_slot, 0].tolist()
                require(found, expected, f"the state of {sequence} at {position}")


def save_by_number(kv: Any, score: Any, ape: Any, positions: Any, rows: Any, write: Any) -> None:
    del score, ape, positions
    rows[write // rows.shape[1], write % rows.shape[1], 0] = kv[:, 0]


def require(found: list[float], expected: list[int], what: str) -> None:
    if found != expected:
        raise ContentError(f"{what} should be {expected}, and is {found}")


class World:
    """A layer, its compressor, their rings and the builder that describes steps to them."""

    now: Any = None
    """Metadata of the step that runs."""

    def __init__(self) -> None:
        self.arena = RingArena(GEOMETRY, "cpu")
        staging = Staging(GEOMETRY, MAX_TOKENS, MAX_REQUESTS)
        self.attention, self.compressor = (
            cls(self.arena, staging) for cls in (Attention, Compressor)
        )
        self.builder = Builder(self.arena)

    def begin(self, sequence: int, slot: int, tokens: int) -> None:
        """The first tokens of a sequence, as earlier steps would have left them in its slot."""
        for start in range(0, tokens, MAX_TOKENS):
            chunk = Chunk(sequence, start, min(MAX_TOKENS, tokens - start), slot)
            self.step([chunk])

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Run a batch, decodes first.

        Raises:
            ContentError: a token reads what it must not.
        """
        lengths = torch.tensor([c.length for c in chunks])
        sequences = torch.tensor([c.sequence for c in chunks]).repeat_interleave(lengths)
        positions = torch.cat([torch.arange(c.start, c.start + c.length) for c in chunks])
        tokens = number(sequences, positions).float()[:, None].repeat(1, 2)
        World.now = self.builder.build(0, common_metadata(chunks))
        with self._context(
            {"state": World.now, "history": SimpleNamespace(slot_mapping=sequences)}
        ):
            self.compressor.forward(tokens, positions, SimpleNamespace(cos_sin_cache=None))
            queries = torch.stack([sequences, positions], dim=1)
            rotated = self.attention._fused_qnorm_rope_kv_insert(queries, tokens, positions, {})
            self.attention.forward_mqa(rotated, tokens, positions, queries.clone())

    @contextmanager
    def _context(self, attn_metadata: dict[str, Any]) -> Iterator[None]:
        context = SimpleNamespace(attn_metadata=attn_metadata)
        with (
            patch("vllm_dsv4.cpu.attention.get_forward_context", lambda: context),
            patch("vllm_dsv4.cpu.compressor.get_forward_context", lambda: context),
            patch("vllm_dsv4.cpu.compressor.save_partial_states_cpu", save_by_number),
        ):
            yield


def common_metadata(chunks: Sequence[Chunk]) -> CommonAttentionMetadata:
    """What a model runner tells the ring group's builder."""
    lengths = torch.tensor([c.length for c in chunks])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    ends = torch.tensor([c.start + c.length for c in chunks]).int()
    table = torch.zeros(len(chunks), row.row_columns(MAX_LEN, BLOCK), dtype=torch.int32)
    for i, c in enumerate(chunks):
        table[i, : row.HEAD] = torch.tensor([c.slot, c.source, c.start // BLOCK])
        table[i, row.target_column(1)] = c.target
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(chunks),
        num_actual_tokens=int(lengths.sum()),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=table,
        slot_mapping=torch.full((int(lengths.sum()),), -1),
    )
