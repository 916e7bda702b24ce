"""Plans against published figures and against sums done by hand. No engine is started."""

import re
from dataclasses import replace
from math import ceil

import pytest

from vllm_dsv4.commands.planner.models import RELEASED, PlannedModel
from vllm_dsv4.commands.planner.options import GIB, MAX_DRAFTS, PlanOptions
from vllm_dsv4.commands.planner.plan import DoesNotFit, make_plan
from vllm_dsv4.commands.planner.suggest import fits, suggestions
from vllm_dsv4.settings import Settings

FLASH = PlanOptions(RELEASED["flash"])
PRO = PlanOptions(RELEASED["pro"])


def rounded(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple


def block_bytes(model: PlannedModel) -> int:
    """A block of 256 tokens: C4 rows and indexer rows of 64 states, C128 rows of 2."""
    c4 = rounded(64 * 584, 576) + rounded(64 * 132, 576)
    c128 = rounded(2 * 584, 576)
    return model.layer_ratios.count(4) * c4 + model.layer_ratios.count(128) * c128


def slot_bytes(model: PlannedModel, lookahead: int = 0, draft_layers: int = 0) -> int:
    """Rows of one sequence over all layers, each layer's ring on a multiple of 128 bytes."""
    swa = rounded((128 + lookahead) * 584, 128)
    c4 = (8 + lookahead) * (8192 + 2048)
    c128 = (128 + lookahead) * 4096
    layers = model.layer_ratios
    window_layers = len(layers) + draft_layers
    return window_layers * swa + layers.count(4) * c4 + layers.count(128) * c128


def test_flash_in_100_gib_at_131072_is_the_published_figure_on_both_sides():
    plan = make_plan(FLASH)
    assert plan.bytes_per_block == 1_002_240
    assert plan.native.tokens == 3_632_247
    assert plan.rings.tokens == 26_414_080
    assert plan.rings.ring_bytes / GIB == pytest.approx(3.7, abs=0.05)
    assert plan.token_ratio == pytest.approx(7.27, abs=0.005)
    assert plan.native.blocks_reserved_per_prefill == 3354
    assert plan.native.blocks_per_decoding_request == 26


def test_with_c128_state_as_a_running_softmax_a_slot_is_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = make_plan(FLASH)
    monkeypatch.setenv("VLLM_DSV4_C128_STATE", "online")
    online = make_plan(FLASH)
    found = online.to_json()["rings"]
    assert (found["c128_state"], exact.to_json()["rings"]["c128_state"]) == ("online", "exact")
    assert found["bytes_per_slot"] == slot_bytes(FLASH.model) - 20 * 126 * 4096 <= 5.2e6
    assert online.rings.num_blocks > exact.rings.num_blocks
    assert online.bytes_per_block == exact.bytes_per_block


def test_with_a_million_tokens_a_request_flash_gains_1_8x_and_with_8192_a_hundredfold():
    million = make_plan(replace(FLASH, max_model_len=1_000_000))
    assert million.native.tokens / 1e6 == pytest.approx(14.75, abs=0.01)
    assert million.rings.tokens / 1e6 == pytest.approx(26.41, abs=0.01)
    short = make_plan(replace(FLASH, max_model_len=8192))
    assert short.native.tokens / 1e6 == pytest.approx(0.26, abs=0.005)
    assert short.rings.tokens / 1e6 == pytest.approx(26.41, abs=0.01)


@pytest.mark.parametrize("options", [FLASH, PRO], ids=["flash", "pro"])
def test_the_pool_is_what_blocks_of_hand_counted_bytes_leave_room_for(options: PlanOptions):
    plan = make_plan(options)
    ring_bytes = (options.max_num_seqs + 1) * slot_bytes(options.model)
    assert plan.bytes_per_block == block_bytes(options.model)
    assert plan.rings.bytes_per_slot == slot_bytes(options.model)
    assert plan.rings.ring_bytes == ring_bytes
    assert plan.native.num_blocks == 100 * GIB // block_bytes(options.model)
    assert plan.rings.num_blocks == (100 * GIB - ring_bytes) // block_bytes(options.model)
    blocks_per_request = options.max_model_len // 256
    assert plan.rings.concurrency == plan.rings.num_blocks / blocks_per_request
    assert plan.native.concurrency == plan.native.num_blocks / (3354 + blocks_per_request)


def test_capacity_depends_on_the_batch_without_rings_and_not_with_them():
    small, large = (make_plan(replace(FLASH, max_num_batched_tokens=n)) for n in (2048, 16384))
    assert small.rings == large.rings
    assert small.native.tokens > 3 * large.native.tokens
    # Blocks of 64 (two groups), 4 and 8 tokens for the window and the tokens in flight.
    for plan, tokens in ((small, 2048), (large, 16384)):
        expected = (
            2 * (ceil((127 + tokens) / 64) + 1)
            + (ceil((7 + tokens) / 4) + 1)
            + (ceil((127 + tokens) / 8) + 1)
        )
        assert plan.native.blocks_reserved_per_prefill == expected


def test_asynchronous_scheduling_doubles_what_the_paged_path_reserves():
    one, two = (make_plan(replace(FLASH, async_scheduling=on)) for on in (False, True))
    assert two.native.blocks_reserved_per_prefill == pytest.approx(
        2 * one.native.blocks_reserved_per_prefill, rel=0.02
    )
    assert two.rings == one.rings


def test_every_card_holds_the_whole_ring_and_only_weights_are_shared():
    one = make_plan(replace(FLASH, gpu_memory_gib=100))
    eight = make_plan(replace(FLASH, gpu_memory_gib=120, weights_gib=160, tensor_parallel_size=8))
    assert eight.rings == one.rings
    assert eight.native == one.native


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_speculation_lengthens_each_ring_by_its_drafts(drafts: int):
    plan = make_plan(replace(FLASH, speculative_tokens=drafts))
    assert plan.rings.bytes_per_slot == slot_bytes(FLASH.model, drafts, draft_layers=1)
    ngram = make_plan(replace(FLASH, speculative_tokens=drafts, speculative_method="ngram"))
    assert ngram.rings.bytes_per_slot == slot_bytes(FLASH.model, drafts)


def test_slots_follow_the_environment_as_the_server_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DSV4_SLOTS", "300")
    assert make_plan(FLASH).rings.num_slots == 300


def test_where_only_the_rings_start_vllms_own_refusal_is_kept():
    plan = make_plan(replace(FLASH, gpu_memory_gib=3, max_num_seqs=16))
    assert "To serve at least one request" in plan.native_refusal
    assert plan.native.concurrency < 1 < plan.rings.concurrency


TOO_SMALL = {
    "rings": replace(FLASH, gpu_memory_gib=3),
    "pages": replace(FLASH, gpu_memory_gib=4, max_model_len=1_000_000),
    "weights": replace(PRO, gpu_memory_gib=90, weights_gib=860, tensor_parallel_size=8),
}


@pytest.mark.parametrize("options", TOO_SMALL.values(), ids=TOO_SMALL.keys())
def test_every_suggestion_fits_and_one_less_does_not(options: PlanOptions):
    with pytest.raises(DoesNotFit, match=r"--(max-num-seqs|max-model-len|weights-gib) "):
        make_plan(options)
    found = suggestions(options)
    assert found
    for suggestion in found:
        flag, value = suggestion.split()
        name = flag.removeprefix("--").replace("-", "_")
        number = float(value) if name == "gpu_memory_gib" else int(value)
        assert fits(replace(options, **{name: number})), suggestion
        if name == "max_num_seqs":
            assert not fits(replace(options, max_num_seqs=int(number) + 1))
        if name == "gpu_memory_gib":
            assert not fits(replace(options, gpu_memory_gib=number - 1))


CACHED = replace(FLASH, enable_prefix_caching=True)
AT_FAULT = {
    "slots": (FLASH, {"SLOTS": "100000"}, "VLLM_DSV4_SLOTS=100000: ", "VLLM_DSV4_SLOTS="),
    "snapshots": (
        CACHED,
        {"SNAPSHOT_SLOTS": "1000000"},
        "VLLM_DSV4_SNAPSHOT_SLOTS=1000000: ",
        "VLLM_DSV4_SNAPSHOT_SLOTS=",
    ),
    "snapshots by default": (
        replace(CACHED, gpu_memory_gib=1, max_num_seqs=2, max_model_len=8192),
        {},
        "VLLM_DSV4_SNAPSHOT_SLOTS=256 (the default): ",
        "VLLM_DSV4_SNAPSHOT_SLOTS=",
    ),
    "drafts": (
        replace(FLASH, gpu_memory_gib=12, speculative_tokens=128),
        {},
        "--speculative-tokens 128: ",
        "--speculative-tokens ",
    ),
    "slots that drafts lengthen": (
        replace(FLASH, gpu_memory_gib=9, max_num_seqs=512, speculative_tokens=16),
        {},
        "--max-num-seqs 512: ",
        "--speculative-tokens ",
    ),
    "pages": (
        replace(FLASH, gpu_memory_gib=4, max_model_len=1_000_000),
        {"SLOTS": "256"},
        "--max-model-len 1000000 with VLLM_DSV4_SLOTS=256: ",
        "VLLM_DSV4_SLOTS=",
    ),
}


@pytest.mark.parametrize(
    ("options", "environment", "cause", "remedy"), AT_FAULT.values(), ids=AT_FAULT.keys()
)
def test_what_asked_for_most_of_the_rings_is_blamed_and_gets_a_value_that_fits(
    options: PlanOptions,
    environment: dict[str, str],
    cause: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in environment.items():
        monkeypatch.setenv(f"VLLM_DSV4_{name}", value)
    with pytest.raises(DoesNotFit, match=f"^{re.escape(cause)}"):
        make_plan(options)
    found = suggestions(options)
    offered = next(one for one in found if one.startswith(remedy))
    value = int(offered.removeprefix(remedy))
    assert not any(one.startswith("--max-num-seqs") for one in found if "SLOTS" in environment)

    def fits_with(value: int) -> bool:
        if remedy == "VLLM_DSV4_SLOTS=":
            return fits(options, Settings(slots=value))
        if remedy == "VLLM_DSV4_SNAPSHOT_SLOTS=":
            return fits(options, Settings(snapshot_slots=value))
        return fits(replace(options, speculative_tokens=value))

    assert fits_with(value) and not fits_with(value + 1)
    without = "--no-enable-prefix-caching"
    assert (without in found) == options.enable_prefix_caching


def test_drafts_are_left_out_where_only_that_fits():
    options = replace(FLASH, gpu_memory_gib=4, speculative_tokens=1, max_model_len=64_000)
    assert "--speculative-tokens 0" in suggestions(options)


def test_prefix_caching_is_not_blamed_where_leaving_it_out_helps_nothing():
    options = replace(CACHED, gpu_memory_gib=1, max_model_len=1_000_000, max_num_seqs=512)
    assert "--no-enable-prefix-caching" not in suggestions(options)


def test_no_more_drafts_are_planned_than_vllm_samples():
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    assert MAX_DRAFTS == MAX_SPEC_LEN
