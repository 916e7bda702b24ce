"""Sizes of the rings, against the figures of the released models."""

from typing import Any

import pytest

from vllm_dsv4.ring.geometry import (
    C128State,
    GeometryError,
    RingGeometry,
    RingKind,
    check_rows,
    kinds_of_layer,
    layer_ratios,
    lookahead_tokens,
    ring_rows,
)

FLASH = (0, 0, *([4, 128] * 20), 4)
PRO = (128, 128, *([4, 128] * 29), 4)


def geometry(ratios: tuple[int, ...] = FLASH, **kwargs: Any) -> RingGeometry:
    sizes: dict[str, Any] = {"lookahead": 0, "max_model_len": 131072, "num_slots": 256} | kwargs
    return RingGeometry(layer_ratios=ratios, **sizes)


def test_a_flash_sequence_holds_15_4_megabytes() -> None:
    kinds = geometry().layers_of_kind
    assert kinds == {
        RingKind.SWA: 43,
        RingKind.C4_ATTENTION: 21,
        RingKind.C4_INDEXER: 21,
        RingKind.C128: 20,
    }
    swa, c4, c128 = 43 * 128 * 584, 21 * 8 * (8192 + 2048), 20 * 128 * 4096
    assert geometry().bytes_per_slot == swa + c4 + c128 == 15_420_416
    assert geometry().bytes_per_snapshot == swa + c4


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_running_softmax_takes_a_third_of_a_flash_slot(lookahead: int) -> None:
    sizes = geometry(lookahead=lookahead, c128_state=C128State.ONLINE)
    c128 = 20 * (2 + lookahead) * 4096
    assert sizes.shape(RingKind.C128).rows == 2 + lookahead
    exact = geometry(lookahead=lookahead)
    of_rows = 20 * (128 + lookahead) * 4096
    assert sizes.bytes_per_slot == exact.bytes_per_slot - of_rows + c128
    assert geometry(c128_state=C128State.ONLINE).bytes_per_slot <= 5.2e6
    assert sizes.bytes_per_snapshot == exact.bytes_per_snapshot


def test_pro_has_30_c4_and_31_c128_layers() -> None:
    kinds = geometry(PRO).layers_of_kind
    assert (kinds[RingKind.C4_ATTENTION], kinds[RingKind.C128]) == (30, 31)


def test_the_null_slot_and_the_snapshots_are_paid_for() -> None:
    sizes = geometry(num_snapshots=10)
    assert sizes.total_bytes == 257 * sizes.bytes_per_slot + 10 * sizes.bytes_per_snapshot


@pytest.mark.parametrize("lookahead", range(9))
def test_every_kind_keeps_its_window_beside_the_drafts(lookahead: int) -> None:
    for kind in RingKind:
        rows = geometry(lookahead=lookahead).shape(kind).rows
        assert rows == kind.window + lookahead
        assert 1 + lookahead <= rows - kind.window + 1


def test_too_few_rows_for_the_drafts_are_refused() -> None:
    with pytest.raises(GeometryError, match="num_speculative_tokens"):
        check_rows(RingKind.SWA, rows=130, lookahead=3, max_model_len=4096)


def test_a_context_shorter_than_the_window_needs_no_whole_window() -> None:
    assert ring_rows(128, 0, max_model_len=64) == 64
    assert ring_rows(128, 2, max_model_len=64) == 66
    assert geometry(max_model_len=64).bytes_per_slot < geometry().bytes_per_slot


def test_slots_start_on_aligned_bytes_whatever_the_lookahead() -> None:
    for lookahead in range(9):
        for kind in RingKind:
            shape = geometry(lookahead=lookahead).shape(kind)
            assert shape.slot_bytes % 128 == 0
            assert 0 <= shape.slot_bytes - shape.rows * shape.row_bytes < 128


def test_ngram_drafts_count_as_lookahead_though_vllm_reserves_none() -> None:
    assert lookahead_tokens(num_speculative_tokens=6, num_lookahead_tokens=0) == 6


def test_window_only_layers_may_be_written_as_0_or_1() -> None:
    assert kinds_of_layer(0) == kinds_of_layer(1) == (RingKind.SWA,)


@pytest.mark.parametrize("ratio", [2, 8, -1, 64])
def test_an_unknown_ratio_is_refused_by_name(ratio: int) -> None:
    with pytest.raises(GeometryError, match=f"compress_ratios holds {ratio}"):
        layer_ratios({"num_hidden_layers": 1, "compress_ratios": [ratio]})


def test_a_short_ratio_list_is_refused() -> None:
    with pytest.raises(GeometryError, match="compress_ratios has 2 entries for 3 layers"):
        layer_ratios({"num_hidden_layers": 3, "compress_ratios": [0, 4]})


def test_ratios_are_read_from_transformers_form_too() -> None:
    """vLLM 0.33 hands models Transformers' configuration, which has no ``compress_ratios``."""
    config = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "csa", "hca"],
        "compress_rates": {"csa": 4, "hca": 128},
    }
    assert layer_ratios(config) == (0, 4, 128)


def test_draft_layers_read_a_window_only() -> None:
    config = {"num_hidden_layers": 2, "compress_ratios": [0, 4], "num_nextn_predict_layers": 1}
    assert layer_ratios(config) == (0, 4)
    assert layer_ratios(config, with_draft_layers=True) == (0, 4, 0)


@pytest.mark.parametrize(("name", "value"), [("num_slots", 0), ("num_snapshots", -1)])
def test_absurd_counts_are_refused(name: str, value: int) -> None:
    with pytest.raises(GeometryError, match=str(value)):
        geometry(**{name: value})
