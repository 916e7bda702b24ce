"""What a captured graph needs: fixed addresses, no host reads, and no Python value of its own step.

A replayed graph runs with the Python values of the step that it was captured in. That is rehearsed
here without a graph: metadata built for a dummy batch is kept, the builders are given a real batch,
and the layer runs with the old metadata.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime import interpreter
from vllm.forward_context import set_forward_context

from tests.rocm.rig import Chunk, Rig, positions_of

META = torch.device("meta")
DUMMY = tuple(Chunk(9, 0, 3, slot=0) for _ in range(3))
HISTORY = (Chunk(1, 0, 30, slot=4), Chunk(0, 0, 9, slot=2))
DECODE = (Chunk(1, 30, 3, slot=4), Chunk(0, 9, 3, slot=2))
PADDED = (*DECODE, DUMMY[0])


def fresh(tiny, layer: int) -> Rig:
    rig = Rig(tiny(), layer, "rocm")
    rig.step(HISTORY)
    return rig


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_replayed_decode_graph_gives_what_eager_gives(tiny, layer: int) -> None:
    expected = torch.cat(fresh(tiny, layer).step(DECODE))
    rig = fresh(tiny, layer)
    captured = rig.metadata(DUMMY, for_capture=True)
    rig.run(DUMMY, captured)
    rig.metadata(PADDED)
    replayed = rig.run(PADDED, captured)
    torch.testing.assert_close(replayed[:6], expected, rtol=0, atol=0.02)
    assert not replayed[6:].any(), "rows of padding are not zero"


def test_what_comes_before_attention_may_be_captured_for_batches_of_any_composition(tiny) -> None:
    """A piecewise graph holds queries, keys and compressors, and breaks for attention itself."""
    mixed = (Chunk(1, 30, 2, slot=4), Chunk(0, 9, 7, slot=2))
    dummy = tuple(Chunk(9, 0, 3, slot=0) for _ in range(3))
    expected = fresh(tiny, 2)
    outputs = [torch.cat(expected.step(mixed)), torch.cat(expected.step(after(mixed)))]
    rig = fresh(tiny, 2)
    captured = rig.metadata(dummy)
    attend = type(rig.layer).forward_mqa

    def attend_eagerly(*args: Any) -> None:
        with set_forward_context(rig.now, rig.config, num_tokens=9):
            attend(rig.layer, *args)

    rig.layer.forward_mqa = attend_eagerly
    for chunks, output in zip((mixed, after(mixed)), outputs, strict=True):
        rig.now = rig.metadata(chunks)
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            out = rig.run(
                chunks, captured | {"model.layers.2.attn": captured["model.layers.2.attn"]}
            )
        torch.testing.assert_close(out, output, rtol=0, atol=0.02)


def after(mixed: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """A decode step of both sequences, as many tokens as before."""
    return (Chunk(1, 32, 3, slot=4), Chunk(0, 16, 3, slot=2), Chunk(3, 0, 3, slot=1))


@pytest.mark.parametrize("attention", ["triton", "native"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_decode_step_reads_no_device_value_on_the_host(
    tiny, monkeypatch: pytest.MonkeyPatch, layer: int, attention: str
) -> None:
    """On meta tensors, which have no values to read; kernels are launched, and do nothing."""
    monkeypatch.setenv("VLLM_DSV4_ATTENTION", attention)
    rig = Rig(tiny(), layer, "rocm", device=META)
    launched = []

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(executor.fn.__name__)

    with patch.object(interpreter.GridExecutor, "__call__", launch):
        metadata = rig.metadata(DECODE)
        attend_on_meta(rig, metadata)
    ours = {"write_ring_kernel", "copy_slots_kernel"}
    ours |= {"decode_kernel"} if attention == "triton" else set()
    ours |= {"compress_kernel", "save_state_kernel"} if rig.layer.compressor else set()
    assert ours <= set(launched)


def attend_on_meta(rig: Rig, metadata: dict[str, Any]) -> None:
    """Everything of a forward pass that is ours."""
    layer, positions = rig.layer, positions_of(DECODE).to(META)
    tokens = len(positions)
    q = torch.empty(tokens, layer.n_local_heads, 512, dtype=torch.bfloat16, device=META)
    kv = torch.empty(tokens, 512, dtype=torch.bfloat16, device=META)
    layer.rotate_queries = lambda q, *_: q
    compressors = [layer.compressor] if layer.compressor else []
    if layer.indexer:
        layer.topk_indices_buffer = rig.topk.to(META)
        compressors.append(layer.indexer.compressor)
    with (
        set_forward_context(metadata, rig.config, num_tokens=tokens),
        patch("vllm_dsv4.rocm.attention.decode_natively"),
    ):
        for compressor in compressors:
            width = 2 * compressor.coff * compressor.head_dim
            scores = torch.empty(tokens, width, device=META)
            compressor(scores, positions, layer.rotary_emb)
        rotated = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
        layer.forward_mqa(rotated, kv, positions, torch.empty_like(q))


def test_index_tensors_stay_where_they_are(tiny) -> None:
    rig = Rig(tiny(), 0, "rocm")

    def addresses(metadata: Any) -> list[int]:
        step = metadata.step
        rounds = metadata.snapshots.rounds
        tensors = [
            *(getattr(one, name) for one in (step.all, step.decodes, step.prefills)
              for name in ("positions", "token_to_request", "query_start", "slots")),
            step.token_slots,
            step.live,
            *(tensor for one in rounds for tensor in (one.targets, one.prefill_targets, one.ends)),
        ]  # fmt: skip
        return [tensor.data_ptr() for tensor in tensors]

    (name,) = rig.builders
    first = addresses(rig.metadata(HISTORY)[name])
    assert addresses(rig.metadata(DECODE)[name]) == first
    assert addresses(rig.metadata(DUMMY, for_capture=True)[name]) == first
    assert all(address % 16 == 0 for address in first[:12])
