"""Sizes of the rings: the one place that turns a model and its flags into rows and bytes.

The allocator, the planner, ``vllm-dsv4 plan`` and the start-up line all read this module.
Row sizes follow DeepSeek-V4's caches as vLLM 0.32 lays them out
(``vllm/models/deepseek_v4/attention.py`` and ``compressor.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

BLOCK_SIZE = 256
"""Tokens of a paged block: what vLLM sets for DSV4, whatever ``--block-size`` says."""
SWA_WINDOW = 128
HEAD_DIM = 512
ROPE_HEAD_DIM = 64
INDEX_HEAD_DIM = 128

FP8_DS_MLA_DATA_BYTES = 576
"""448 fp8 values and 64 bf16 rotary values."""
FP8_DS_MLA_SCALE_BYTES = 8
"""Seven UE8M0 scales, one per 64 fp8 values, and one byte of padding."""
FP8_DS_MLA_ROW_BYTES = FP8_DS_MLA_DATA_BYTES + FP8_DS_MLA_SCALE_BYTES

SLOT_ALIGNMENT = 128
"""Bytes. Slots start on a multiple of it, so that the widest device loads stay aligned."""

_FLOAT32_BYTES = 4


class GeometryError(ValueError):
    """A size that the rings cannot have; the message names the cause and the remedy."""


class RingKind(Enum):
    """What a ring holds. The value is used in logs and metrics."""

    SWA = "swa"
    C4_ATTENTION = "c4_attention"
    C4_INDEXER = "c4_indexer"
    C128 = "c128"

    @property
    def window(self) -> int:
        """Rows that a query at one position may read, its own included."""
        return _WINDOW[self]


_WINDOW = {
    RingKind.SWA: SWA_WINDOW,
    RingKind.C4_ATTENTION: 8,  # two overlapping groups of 4 (paper: CSA)
    RingKind.C4_INDEXER: 8,
    RingKind.C128: 128,  # one group of 128 (paper: HCA)
}


class C128State(StrEnum):
    """How an open C128 group is kept: as its raw rows, or as its running softmax."""

    EXACT = "exact"
    ONLINE = "online"


FOLDED_ROWS = 2
"""Rows of a slot's online state before the raw ones: maximum, denominator, numerator and how far
they go (``kernels/online_state.py``)."""


def online_rows(lookahead: int) -> int:
    """Rows of a slot's online C128 state: what is folded, and each token that may be rejected."""
    return FOLDED_ROWS + lookahead


def state_row_bytes(head_dim: int, overlap: bool) -> int:
    """Bytes of one compressor-state row: float32 key and score, twice where groups overlap."""
    return 2 * (2 if overlap else 1) * head_dim * _FLOAT32_BYTES


def row_bytes(kind: RingKind, swa_row_bytes: int = FP8_DS_MLA_ROW_BYTES) -> int:
    """Bytes of one row of ``kind``."""
    if kind is RingKind.SWA:
        return swa_row_bytes
    if kind is RingKind.C4_ATTENTION:
        return state_row_bytes(HEAD_DIM, overlap=True)
    if kind is RingKind.C4_INDEXER:
        return state_row_bytes(INDEX_HEAD_DIM, overlap=True)
    return state_row_bytes(HEAD_DIM, overlap=False)


def kinds_of_layer(compress_ratio: int) -> tuple[RingKind, ...]:
    """The rings that a layer with this compression ratio owns.

    Raises:
        GeometryError: the ratio is none of 0, 1, 4, 128.
    """
    if compress_ratio in (0, 1):
        return (RingKind.SWA,)
    if compress_ratio == 4:
        return (RingKind.SWA, RingKind.C4_ATTENTION, RingKind.C4_INDEXER)
    if compress_ratio == 128:
        return (RingKind.SWA, RingKind.C128)
    raise GeometryError(
        f"compress_ratios holds {compress_ratio}; the rings know 0 (window only), 4 and 128. "
        "Serve this checkpoint on vLLM's own path with VLLM_DSV4_RING=0."
    )


@dataclass(frozen=True)
class RingShape:
    """One ring of one layer.

    Attributes:
        kind: what the rows hold.
        rows: rows of one slot, ``window + lookahead``.
        row_bytes: bytes of one row.
        slot_bytes: bytes from one slot to the next, ``rows * row_bytes`` rounded up to
            ``SLOT_ALIGNMENT``.
    """

    kind: RingKind
    rows: int
    row_bytes: int

    @property
    def slot_bytes(self) -> int:
        return -(-self.rows * self.row_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def ring_rows(window: int, lookahead: int, max_model_len: int) -> int:
    """Rows of a slot: the window, and one row for every token that may still be rejected.

    A verify step writes ``1 + lookahead`` rows before it reads. With ``window + lookahead`` rows
    the last of these writes lands on the row just outside the first query's window. A context
    shorter than the window never wraps and needs no more rows than it has tokens.

    Raises:
        GeometryError: a size is negative or zero.
    """
    if lookahead < 0:
        raise GeometryError(f"lookahead is {lookahead}; it counts speculative tokens, 0 or more.")
    if max_model_len < 1:
        raise GeometryError(f"--max-model-len is {max_model_len}; it must be at least 1.")
    return min(window, max_model_len) + lookahead


def check_rows(kind: RingKind, rows: int, lookahead: int, max_model_len: int) -> None:
    """Refuse rows that a step of ``1 + lookahead`` tokens would overrun (invariant 7)."""
    window = min(kind.window, max_model_len)
    if 1 + lookahead > rows - window + 1:
        raise GeometryError(
            f"a {kind.value} ring of {rows} rows cannot take steps of 1 + {lookahead} tokens over "
            f"a window of {window}: it needs at least {window + lookahead} rows. "
            "Lower num_speculative_tokens in --speculative-config."
        )


@dataclass(frozen=True)
class RingGeometry:
    """All rings of a model (of one pipeline stage, if it has several).

    Attributes:
        layer_ratios: compression ratio of each layer, 0 for window only.
        lookahead: speculative tokens of a step.
        max_model_len: tokens.
        num_slots: slots that can be lent. One more, slot 0, is the null slot.
        num_snapshots: snapshot slots behind the live ones, for prefix caching.
        swa_row_bytes: bytes of a window row in the cache format in use.
        c128_state: how open C128 groups are kept.
    """

    layer_ratios: tuple[int, ...]
    lookahead: int
    max_model_len: int
    num_slots: int
    num_snapshots: int = 0
    swa_row_bytes: int = FP8_DS_MLA_ROW_BYTES
    c128_state: C128State = C128State.EXACT

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise GeometryError(
                f"VLLM_DSV4_SLOTS (default: --max-num-seqs) is {self.num_slots}; "
                "at least one sequence needs a slot."
            )
        if self.num_snapshots < 0:
            raise GeometryError(f"VLLM_DSV4_SNAPSHOT_SLOTS is {self.num_snapshots}; use 0 or more.")
        for kind in self.layers_of_kind:
            if self.folds(kind):
                continue
            check_rows(kind, self.shape(kind).rows, self.lookahead, self.max_model_len)

    def shape(self, kind: RingKind) -> RingShape:
        """The shape that every layer's ring of ``kind`` has."""
        rows = ring_rows(kind.window, self.lookahead, self.max_model_len)
        return RingShape(
            kind=kind,
            rows=online_rows(self.lookahead) if self.folds(kind) else rows,
            row_bytes=row_bytes(kind, self.swa_row_bytes),
        )

    def folds(self, kind: RingKind) -> bool:
        """Whether slots of ``kind`` hold a running softmax rather than rows by position."""
        return kind is RingKind.C128 and self.c128_state is C128State.ONLINE

    @property
    def layers_of_kind(self) -> Mapping[RingKind, int]:
        """How many layers own a ring of each kind."""
        counts: dict[RingKind, int] = {}
        for ratio in self.layer_ratios:
            for kind in kinds_of_layer(ratio):
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one sequence holds, over all layers and kinds."""
        return sum(n * self.shape(kind).slot_bytes for kind, n in self.layers_of_kind.items())

    @property
    def bytes_per_snapshot(self) -> int:
        """Bytes of one snapshot: a slot without C128 state, which is empty at every boundary."""
        return sum(
            n * self.shape(kind).slot_bytes
            for kind, n in self.layers_of_kind.items()
            if kind in SNAPSHOT_KINDS
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all rings: lendable slots, the null slot, snapshots."""
        return (
            self.num_slots + 1
        ) * self.bytes_per_slot + self.num_snapshots * self.bytes_per_snapshot


SNAPSHOT_KINDS = frozenset({RingKind.SWA, RingKind.C4_ATTENTION, RingKind.C4_INDEXER})
"""Kinds whose rows still matter at a multiple of 128 tokens (paged blocks hold 256)."""


def layer_ratios(
    config: Mapping[str, Any] | Any, with_draft_layers: bool = False
) -> tuple[int, ...]:
    """Compression ratio of every layer of a DSV4 config (``compress_ratios``).

    Args:
        config: a Hugging Face config object or its dictionary.
        with_draft_layers: count the draft layers too; they read a window only.
    """

    def get(name: str, default: Any = None) -> Any:
        if isinstance(config, Mapping):
            return config.get(name, default)
        return getattr(config, name, default)

    num_layers = get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise GeometryError(
            f"num_hidden_layers is {num_layers!r}, not a whole number of 1 or more; "
            "the checkpoint's config.json is damaged."
        )
    ratios: Sequence[int] = get("compress_ratios") or ()
    if not ratios and get("layer_types"):  # Transformers' form of the same, which vLLM 0.33 reads
        rates: Mapping[str, int] = get("compress_rates") or {}
        ratios = [rates.get(kind, 0) for kind in get("layer_types")]
    if not isinstance(ratios, list | tuple) or not all(isinstance(r, int) for r in ratios):
        raise GeometryError(
            f"compress_ratios is {ratios!r}, not a list of whole numbers; "
            "the checkpoint's config.json is damaged."
        )
    if len(ratios) < num_layers:
        raise GeometryError(
            f"compress_ratios has {len(ratios)} entries for {num_layers} layers "
            "(num_hidden_layers); the checkpoint's config.json is damaged."
        )
    layers = tuple(ratios[:num_layers])
    for ratio in layers:
        kinds_of_layer(ratio)
    if with_draft_layers:
        layers += (0,) * int(get("num_nextn_predict_layers", 0) or 0)
    return layers


def has_history(ratios: Sequence[int]) -> bool:
    """Whether any layer compresses: else nothing is paged, and vLLM has nothing to plan."""
    return any(ratio > 1 for ratio in ratios)


def lookahead_tokens(num_speculative_tokens: int, num_lookahead_tokens: int) -> int:
    """Tokens of a step that may still be rejected.

    vLLM's ``num_lookahead_tokens`` is 0 for drafts without a model (n-gram), though a verify
    step writes all of them: the larger of the two is what the rings must hold.
    """
    return max(num_speculative_tokens, num_lookahead_tokens, 0)
