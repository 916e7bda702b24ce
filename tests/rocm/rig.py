"""One DSV4 attention layer on rings, with real builders around it and no engine.

A rig holds a layer as vLLM builds it, adopted by our CPU or our ROCm path, the paged caches that
the layer reads beside its rings, and the metadata builders of both. ``Rig.step`` runs one batch
through builders and layer as a model runner would. Weights depend on the layer's index only, so
two rigs of one layer compute the same thing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_dsv4.kernels.compress_reference import rotate_pairs

from vllm_dsv4.cpu import attention as cpu
from vllm_dsv4.cpu.staging import Staging
from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.layer import RingCache
from vllm_dsv4.ring.plan import ring_geometry, ring_spec_of
from vllm_dsv4.rocm import attention as rocm

BLOCK = 256
MAX_MODEL_LEN = 640
MAX_TOKENS = 256
MAX_REQUESTS = 6
BLOCKS_PER_SEQUENCE = 3
NUM_BLOCKS = 1 + MAX_REQUESTS * BLOCKS_PER_SEQUENCE
RUNNER_BUFFERS = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "positions")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + length - 1`` of a sequence.

    Attributes:
        sequence: whose hidden states are run.
        slot: ring slot; 0 for tokens that pad a graph.
        blocks: the sequence whose paged blocks it uses, where not its own.
        source: snapshot slot that was hit, with ``start`` as the hit's length.
        target: snapshot slot to fill at the first boundary.
        wrong: of the last tokens, how many are drafts that the sequence does not go on with.
    """

    sequence: int
    start: int
    length: int
    slot: int
    blocks: int | None = None
    source: int = 0
    target: int = 0
    wrong: int = 0


def make_config(model: Path, drafts: int = 2, method: str = "ngram") -> VllmConfig:
    """A configuration with speculation and prefix caching; also starts a world of one process."""
    config = EngineArgs(
        model=str(model),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_REQUESTS,
        enforce_eager=True,
        enable_prefix_caching=True,
        speculative_config={"method": method, "num_speculative_tokens": drafts}
        | ({"prompt_lookup_max": 2} if method == "ngram" else {}),
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
            initialize_model_parallel(1)
    return config


@dataclass
class Rig:
    """See the module's docstring.

    Attributes:
        thin: keep every third of the compressed rows that the indexer selects.
    """

    model: Path
    index: int
    kind: str
    fp8: torch.dtype = torch.float8_e4m3fn
    thin: bool = False
    device: torch.device = CPU
    layer: Any = field(init=False)
    _buffers: dict[tuple[bool, str], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = make_config(self.model)
        self.hf = self.config.model_config.hf_config
        self.topk = torch.full((MAX_TOKENS, self.hf.index_topk), -1, dtype=torch.int32)
        self.context = self.config.compilation_config.static_forward_context
        with set_current_vllm_config(self.config):
            self.layer = self._build()
            self._randomise()
            with self._raw_weights_kept():
                holder = nn.ModuleList([self.layer])
                process_weights_after_loading(holder, self.config.model_config, CPU)
            # The rotary table is shared by all layers of the process.
            table = copy.deepcopy(self.layer.rotary_emb)
            self.layer.rotary_emb = self.layer.indexer_rotary_emb = table
            self.layer.to(self.device)
            self._adopt()
            self.builders = self._make_builders()

    def _build(self) -> Any:
        cls = DeepseekV4CPUAttention if self.kind == "cpu" else DeepseekV4ROCMAiterMLAAttention
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            prefix = f"model.layers.{self.index}.attn"
            return cls(self.config, prefix=prefix, topk_indices_buffer=self.topk)
        finally:
            torch.set_default_dtype(before)

    def _randomise(self) -> None:
        generator = torch.Generator().manual_seed(self.index)
        for name, parameter in sorted(self.layer.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2 and "ape" not in name:
                values *= 1.5 * parameter.shape[1] ** -0.5
            elif "norm" in name:
                values = 1 + 0.1 * values
            parameter.data.copy_(values)

    @contextmanager
    def _raw_weights_kept(self) -> Iterator[None]:
        """vLLM's linear layers on the CPU pack their weights. ROCm reads some of them itself."""
        linears = [
            module
            for name, module in self.layer.named_modules()
            if self.kind == "rocm" and name.endswith(("wo_a", "fused_wkv_wgate"))
        ]
        weights = [linear.weight.detach().clone() for linear in linears]
        yield
        for linear, weight in zip(linears, weights, strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)

    def _adopt(self) -> None:
        ratio = 0 if self.layer.compress_ratio == 1 else self.layer.compress_ratio
        geometry = ring_geometry(self.config, ratios=(ratio,))
        self.arena = RingArena(geometry, device=self.device)
        for buffer in self.arena.buffers.values():
            buffer.fill_(0xFF)
        if self.kind == "cpu":
            staging = Staging(geometry, MAX_TOKENS, MAX_REQUESTS)
            cpu.put_on_rings(self.layer, self.arena, staging, self.context)
        else:
            parts = rocm.RocmParts(self.arena, self.fp8, rotate_on_the_cpu)
            rocm.put_on_rings(self.layer, parts, self.context)
        self.arena.check_all_taken()

    def _make_builders(self) -> dict[str, Any]:
        """One builder for all rings, one for each paged cache, under the layers' names."""
        rings = [name for name, layer in self.context.items() if isinstance(layer, RingCache)]
        spec = ring_spec_of(self.config)
        cls = self.context[rings[0]].get_attn_backend().get_builder_cls()
        shared = cls(spec, rings, self.config, self.device)
        builders = dict.fromkeys(rings, shared)
        for name, layer in self.context.items():
            spec = None if name in builders else layer.get_kv_cache_spec(self.config)
            if spec is None:
                continue
            cls = layer.get_attn_backend().get_builder_cls()
            width = {"block_table_width": BLOCKS_PER_SEQUENCE}
            asked = width if cls.requires_block_table_width else {}
            builders[name] = cls(spec, [name], self.config, self.device, **asked)
            rows = BLOCK // spec.tokens_per_state
            shape = (NUM_BLOCKS, rows, 584 if layer is self.layer else 132)
            layer.kv_cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device)
        return builders

    def step(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Run a batch, decodes first; returns each chunk's output ``[length, hidden]``."""
        out = self.run(chunks, self.metadata(chunks))
        return list(out.split([c.length for c in chunks]))

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Run chunks whose outputs nobody looks at: as ``step``, without their attention, which
        takes nine tenths of the time under the interpreter and leaves nothing behind."""

        def attend(*_: Any, out: torch.Tensor, **__: Any) -> None:
            out.zero_()

        with patch.object(rocm, "prefill", attend):
            self.step(chunks)

    def run(self, chunks: Sequence[Chunk], metadata: dict[str, Any]) -> torch.Tensor:
        """The layer on a batch, with metadata that may be another's; ``[tokens, hidden]``."""
        hidden = torch.cat([self.hidden(c) for c in chunks])
        if self.thin:
            self._thin_before_attention(len(hidden))
        with set_forward_context(metadata, self.config, num_tokens=len(hidden)):
            out: torch.Tensor = self.layer(positions_of(chunks), hidden)
        return out

    def hidden(self, chunk: Chunk) -> torch.Tensor:
        """The layer's input, bf16 ``[length, hidden]``."""
        end = chunk.start + chunk.length
        right = self._states(100 + chunk.sequence)[chunk.start : end - chunk.wrong]
        wrong = self._states(200 + chunk.sequence)[end - chunk.wrong : end]
        return torch.cat([right, wrong])

    def _states(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(MAX_MODEL_LEN, self.hf.hidden_size, generator=generator).bfloat16()

    def _thin_before_attention(self, num_tokens: int) -> None:
        attend = type(self.layer).forward_mqa

        def thinned(*args: Any) -> None:
            keep_every_third(self.topk[:num_tokens])
            attend(self.layer, *args)

        self.layer.forward_mqa = thinned

    def metadata(self, chunks: Sequence[Chunk], *, for_capture: bool = False) -> dict[str, Any]:
        """What the builders make of a batch, under the layers' names."""
        built: dict[int, Any] = {}
        found = {}
        for name, builder in self.builders.items():
            if id(builder) not in built:
                is_ring = isinstance(self.context[name], RingCache)
                common = self._at_fixed_addresses(is_ring, common_metadata(chunks, is_ring))
                build = builder.build_for_cudagraph_capture if for_capture else builder.build
                built[id(builder)] = build(common) if for_capture else build(0, common)
            found[name] = built[id(builder)]
        return found

    def _at_fixed_addresses(
        self, is_ring: bool, common: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        """The same, its tensors copied to where the last step's were, as model runners do."""
        moved = {}
        for name in (
            "query_start_loc",
            "seq_lens",
            "block_table_tensor",
            "slot_mapping",
            "positions",
        ):
            value = getattr(common, name)
            if (is_ring, name) not in self._buffers:
                room = (MAX_TOKENS + 1, *value.shape[1:])
                buffer = torch.zeros(room, dtype=value.dtype, device=self.device)
                self._buffers[is_ring, name] = buffer
            moved[name] = self._buffers[is_ring, name][: len(value)]
            moved[name].copy_(value)
        return common.replace(**moved)


def positions_of(chunks: Sequence[Chunk]) -> torch.Tensor:
    return torch.cat([torch.arange(c.start, c.start + c.length) for c in chunks])


def common_metadata(chunks: Sequence[Chunk], is_ring: bool) -> CommonAttentionMetadata:
    """What a model runner tells builders of one KV cache group.

    A chunk in slot 0 is a graph's padding: its request has no tokens, no blocks, and its rows of
    the batch belong to nobody.
    """
    live = torch.tensor([c.length if c.slot else 0 for c in chunks])
    lengths = torch.tensor([c.length for c in chunks])
    starts = torch.nn.functional.pad(live.cumsum(0), (1, 0)).int()
    ends = torch.tensor([c.start + c.length if c.slot else 0 for c in chunks]).int()
    positions = positions_of(chunks)
    request = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
    if is_ring:
        table = torch.zeros(len(chunks), row.row_columns(MAX_MODEL_LEN, BLOCK), dtype=torch.int32)
        slot_mapping = torch.full((len(positions),), -1)
    else:
        table = torch.zeros(len(chunks), BLOCKS_PER_SEQUENCE, dtype=torch.int32)
    for i, c in enumerate(chunks):
        if is_ring:
            table[i, : row.HEAD] = torch.tensor([c.slot, c.source, c.start // BLOCK])
            table[i, row.target_column(1)] = c.target
        elif c.slot:
            owner = c.sequence if c.blocks is None else c.blocks
            table[i] = 1 + owner * BLOCKS_PER_SEQUENCE + torch.arange(BLOCKS_PER_SEQUENCE)
    if not is_ring:
        slot_mapping = table[request, positions // BLOCK].long() * BLOCK + positions % BLOCK
        slot_mapping[int(starts[-1]) :] = -1
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(chunks),
        num_actual_tokens=len(positions),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=table,
        slot_mapping=slot_mapping,
        positions=positions,
    )


def keep_every_third(rows: torch.Tensor) -> None:
    """Of each list, every third row, in reverse order, at the list's front."""
    for one in rows:
        kept = one[one >= 0][::3].flip(0)
        one.fill_(-1)
        one[: len(kept)] = kept


def rotate_on_the_cpu(
    queries: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    padded_heads: int,
    eps: float,
) -> torch.Tensor:
    """vLLM's C++ operator for cards, in PyTorch; like ours, it stores no key."""
    heads = queries.shape[1]
    values = queries.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    table = cos_sin[positions].float().repeat_interleave(heads, dim=0)
    rotated = rotate_pairs(values.flatten(0, 1), table).view_as(values).to(queries.dtype)
    return torch.nn.functional.pad(rotated, (0, 0, 0, padded_heads - heads))
