"""Names, shapes and number formats of every tensor of a checkpoint, in the released naming."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from vllm_dsv4.checkpoint.config import Shape


class Kind(Enum):
    """What a tensor is for: decides how its values are drawn (see ``weights``)."""

    EMBEDDING = auto()
    HEAD = auto()
    LINEAR = auto()
    EXPERT_OUTPUT = auto()
    ROUTER = auto()
    ROUTER_BIAS = auto()
    EXPERT_TABLE = auto()
    NORM = auto()
    KEY_NORM = auto()
    C128_GATE = auto()
    C128_KEY_NORM = auto()
    SINK = auto()
    POSITION_BIAS = auto()
    STREAM_MIX = auto()
    STREAM_BASE = auto()
    STREAM_SCALE = auto()


class Quant(Enum):
    """Number format of a tensor in the released form."""

    NONE = auto()
    BLOCK_FP8 = auto()
    FP4 = auto()


FLOAT32_KINDS = frozenset(
    {
        Kind.ROUTER_BIAS,
        Kind.SINK,
        Kind.POSITION_BIAS,
        Kind.STREAM_MIX,
        Kind.STREAM_BASE,
        Kind.STREAM_SCALE,
    }
)
"""Kinds kept in float32 in every form; the expert table is int32, all others are bf16."""


@dataclass(frozen=True)
class Spec:
    """One tensor: its name and shape as stored in bf16, its purpose and its released format.

    ``copy_of`` names the tensor that this one repeats, if it does.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.LINEAR
    quant: Quant = Quant.NONE
    copy_of: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes before quantisation."""
        count = 1
        for size in self.shape:
            count *= size
        wide = self.kind in FLOAT32_KINDS or self.kind is Kind.EXPERT_TABLE
        return count * (4 if wide else 2)


def tensors(shape: Shape) -> Iterator[Spec]:
    """Every tensor of a checkpoint of ``shape``, layer by layer."""
    yield Spec("embed.weight", (shape.vocab, shape.hidden), Kind.EMBEDDING)
    for layer, ratio in enumerate(shape.ratios):
        yield from _layer(f"layers.{layer}.", shape, ratio, shape.is_hashed(layer))
    yield Spec("norm.weight", (shape.hidden,), Kind.NORM)
    yield from _stream_head("hc_head_", shape)
    yield Spec("head.weight", (shape.vocab, shape.hidden), Kind.HEAD)
    for draft in range(shape.mtp):
        yield from _draft(f"mtp.{draft}.", shape)


def _layer(prefix: str, shape: Shape, ratio: int, hashed: bool) -> Iterator[Spec]:
    yield Spec(f"{prefix}attn_norm.weight", (shape.hidden,), Kind.NORM)
    yield Spec(f"{prefix}ffn_norm.weight", (shape.hidden,), Kind.NORM)
    mixes = (2 + shape.streams) * shape.streams
    for part in ("attn", "ffn"):
        yield Spec(f"{prefix}hc_{part}_fn", (mixes, shape.streams * shape.hidden), Kind.STREAM_MIX)
        yield Spec(f"{prefix}hc_{part}_base", (mixes,), Kind.STREAM_BASE)
        yield Spec(f"{prefix}hc_{part}_scale", (3,), Kind.STREAM_SCALE)
    yield from _attention(f"{prefix}attn.", shape, ratio)
    yield from _experts(f"{prefix}ffn.", shape, hashed)


def _attention(prefix: str, shape: Shape, ratio: int) -> Iterator[Spec]:
    wide = shape.heads * shape.head_dim
    low = shape.o_groups * shape.o_lora_rank
    yield _linear(f"{prefix}wq_a", shape.q_lora_rank, shape.hidden)
    yield Spec(f"{prefix}q_norm.weight", (shape.q_lora_rank,), Kind.NORM)
    yield _linear(f"{prefix}wq_b", wide, shape.q_lora_rank)
    yield _linear(f"{prefix}wkv", shape.head_dim, shape.hidden)
    yield Spec(f"{prefix}kv_norm.weight", (shape.head_dim,), Kind.KEY_NORM)
    yield _linear(f"{prefix}wo_a", low, wide // shape.o_groups)
    yield _linear(f"{prefix}wo_b", shape.hidden, low)
    yield Spec(f"{prefix}attn_sink", (shape.heads,), Kind.SINK)
    if ratio:
        yield from _compressor(f"{prefix}compressor.", shape.hidden, shape.head_dim, ratio)
    if ratio == 4:
        index = f"{prefix}indexer."
        yield _linear(f"{index}wq_b", shape.index_heads * shape.index_head_dim, shape.q_lora_rank)
        yield Spec(f"{index}weights_proj.weight", (shape.index_heads, shape.hidden))
        yield from _compressor(f"{index}compressor.", shape.hidden, shape.index_head_dim, ratio)


def _compressor(prefix: str, hidden: int, head_dim: int, ratio: int) -> Iterator[Spec]:
    """A C4 compressor's groups overlap: it projects to two series of ``head_dim``."""
    width = (2 if ratio == 4 else 1) * head_dim
    yield Spec(f"{prefix}wkv.weight", (width, hidden))
    gate, norm = (
        (Kind.C128_GATE, Kind.C128_KEY_NORM) if ratio == 128 else (Kind.LINEAR, Kind.KEY_NORM)
    )
    yield Spec(f"{prefix}wgate.weight", (width, hidden), gate)
    yield Spec(f"{prefix}ape", (ratio, width), Kind.POSITION_BIAS)
    yield Spec(f"{prefix}norm.weight", (head_dim,), norm)


def _experts(prefix: str, shape: Shape, hashed: bool) -> Iterator[Spec]:
    yield Spec(f"{prefix}gate.weight", (shape.experts, shape.hidden), Kind.ROUTER)
    if hashed:
        table = (shape.vocab, shape.experts_per_token)
        yield Spec(f"{prefix}gate.tid2eid", table, Kind.EXPERT_TABLE)
    else:
        yield Spec(f"{prefix}gate.bias", (shape.experts,), Kind.ROUTER_BIAS)
    yield from _expert(f"{prefix}shared_experts.", shape, Kind.LINEAR, Quant.BLOCK_FP8)
    for expert in range(shape.experts):
        yield from _expert(f"{prefix}experts.{expert}.", shape, Kind.EXPERT_OUTPUT, Quant.FP4)


def _expert(prefix: str, shape: Shape, output: Kind, quant: Quant) -> Iterator[Spec]:
    up = (shape.expert_width, shape.hidden)
    yield Spec(f"{prefix}w1.weight", up, quant=quant)
    yield Spec(f"{prefix}w2.weight", (shape.hidden, shape.expert_width), output, quant)
    yield Spec(f"{prefix}w3.weight", up, quant=quant)


def _stream_head(prefix: str, shape: Shape) -> Iterator[Spec]:
    mix = (shape.streams, shape.streams * shape.hidden)
    yield Spec(f"{prefix}fn", mix, Kind.STREAM_MIX)
    yield Spec(f"{prefix}base", (shape.streams,), Kind.STREAM_BASE)
    yield Spec(f"{prefix}scale", (1,), Kind.STREAM_SCALE)


def _draft(prefix: str, shape: Shape) -> Iterator[Spec]:
    """A draft layer: window-only attention, routed experts, projections of its own.

    It repeats the embedding and the head, which vLLM's draft model reads from under its prefix.
    """
    table = (shape.vocab, shape.hidden)
    yield Spec(f"{prefix}emb.tok_emb.weight", table, Kind.EMBEDDING, copy_of="embed.weight")
    yield Spec(f"{prefix}enorm.weight", (shape.hidden,), Kind.NORM)
    yield Spec(f"{prefix}hnorm.weight", (shape.hidden,), Kind.NORM)
    yield _linear(f"{prefix}e_proj", shape.hidden, shape.hidden)
    yield _linear(f"{prefix}h_proj", shape.hidden, shape.hidden)
    yield from _layer(prefix, shape, ratio=0, hashed=False)
    yield Spec(f"{prefix}norm.weight", (shape.hidden,), Kind.NORM)
    yield from _stream_head(f"{prefix}hc_head_", shape)
    yield Spec(f"{prefix}head.weight", table, Kind.HEAD, copy_of="head.weight")


def _linear(name: str, rows: int, columns: int) -> Spec:
    return Spec(f"{name}.weight", (rows, columns), quant=Quant.BLOCK_FP8)
