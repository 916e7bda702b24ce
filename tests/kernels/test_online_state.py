"""C128 state as a running softmax: against float64, however a group is cut into steps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from vllm_dsv4.kernels.compress_online import compress_online, online_reference
from vllm_dsv4.kernels.compress_reference import compress_reference
from vllm_dsv4.kernels.online_state import OnlineState, fold_state, online_rows

from tests.kernels.compressing import BLOCK_ROWS, SHAPES, Values, make_history, random_weights
from tests.kernels.steps import Chunk, last_program_first, make_step, split_evenly
from tests.kernels.test_compress import check_close
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

SHAPE = SHAPES["c128"]
SLOT = 1
E4M3FN = torch.float8_e4m3fn
BLOCKS = 4


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


class Online:
    """One sequence in slot 1, its compressed row ``g`` in row ``g`` of the history."""

    def __init__(
        self, lookahead: int = 0, dtype: torch.dtype = E4M3FN, poison: float = float("nan")
    ) -> None:
        torch.manual_seed(3)
        self.weights = random_weights(SHAPE)
        width = online_rows(lookahead) * 1024 + 16
        self.state = OnlineState(torch.full((3, width), poison), lookahead)
        self.history = make_history(SHAPE, BLOCKS, dtype)

    def step(self, values: Values, start: int, stop: int, reference: bool = False) -> None:
        """Two tokens of padding follow the chunk."""
        step = make_step([Chunk(SLOT, start, stop - start)], padding_tokens=2)
        padded = Values(
            *(torch.cat([part, torch.full((2, 512), 7.0)]) for part in (values.keys, values.scores))
        )
        rows = torch.cat([torch.arange(start, stop) // 128, torch.zeros(2, dtype=torch.int64)])
        where = {"history": self.history, "history_rows": rows}
        if reference:
            online_reference(padded.keys, padded.scores, self.weights, self.state, step, **where)
            return
        compress_online(padded.keys, padded.scores, self.weights, self.state, step, **where)
        fold_state(padded.keys, padded.scores, self.weights, self.state, step)

    def run(
        self, values: Values, splits: Sequence[tuple[int, int]], reference: bool = False
    ) -> None:
        for start, stop in splits:
            self.step(values.part(start, stop), start, stop, reference)

    def stored(self, groups: int) -> torch.Tensor:
        rows = torch.arange(groups)
        return self.history.load_rows(rows // BLOCK_ROWS, rows % BLOCK_ROWS)


SPLITS = {
    "whole": [(0, 300)],
    "one by one at the ends": [(0, 126), (126, 127), (127, 128), (128, 129), (129, 300)],
    "by 63": split_evenly(300, 63),
    "by 129": split_evenly(300, 129),
    "a group within a chunk": [(0, 5), (5, 290), (290, 300)],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("lookahead", [0, 3])
def test_any_split_matches_float64(split: str, lookahead: int) -> None:
    torch.manual_seed(1)
    values = Values.random(300, SHAPE)
    bench = Online(lookahead)
    bench.run(values, SPLITS[split])
    wanted = compress_reference(values.keys, values.scores, bench.weights)
    check_close(bench.stored(2), wanted, E4M3FN)


@pytest.mark.parametrize("dtype", [E4M3FN, torch.bfloat16])
def test_the_twin_gives_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    values = Values.random(300, SHAPE)
    kernel, twin = Online(2, dtype), Online(2, dtype)
    splits = [(0, 100), (100, 101), (101, 131), (131, 133), (133, 300)]
    kernel.run(values, splits)
    twin.run(values, splits, reference=True)
    wanted = compress_reference(values.keys, values.scores, twin.weights)
    check_close(twin.stored(2), wanted, dtype)
    ours, theirs = kernel.state.rows_view()[SLOT], twin.state.rows_view()[SLOT]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scores", ["large", "equal", "one dominates", "some minus infinity"])
def test_adversarial_scores_match_float64(scores: str) -> None:
    """One chunk after another folds them; each split as far from float64 as one chunk is."""
    torch.manual_seed(4)
    values = Values.random(128, SHAPE)
    if scores == "large":
        values.scores.mul_(3e4)
    elif scores == "equal":
        values.scores.fill_(-1e4)
    elif scores == "one dominates":
        values.scores[77] += 90
    else:
        values.scores[:100] = float("-inf")
    weights = Online().weights
    # Both forms of state take the sum of a score and its bias in float32.
    unbiased = replace(weights, bias=torch.zeros_like(weights.bias))
    wanted = compress_reference(values.keys, values.scores + weights.bias, unbiased)
    for split in ([(0, 128)], split_evenly(128, 9), [(0, 127), (127, 128)]):
        bench = Online(1)
        bench.run(values, split)
        check_close(bench.stored(1), wanted, E4M3FN)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_rejected_drafts_leave_nothing(lookahead: int) -> None:
    """Verify steps whose drafts are rejected in part, and computed again, past two groups."""
    torch.manual_seed(5)
    values, wrong = Values.random(300, SHAPE), Values.random(300, SHAPE)
    bench = Online(lookahead)
    bench.run(values, [(0, 120)])
    position, accepted = 120, 0
    while position < 300:
        if 140 < position < 250:
            bench.run(values, [(position, 250)])
            position = 250
        stop = min(position + 1 + lookahead, 300)
        if position > 260:
            bench.run(values, [(position, 300)])
            break
        right = min(position + 1 + accepted % (lookahead + 1), stop)
        keys = torch.cat([values.keys[position:right], wrong.keys[right:stop]])
        scores = torch.cat([values.scores[position:right], wrong.scores[right:stop]])
        bench.step(Values(keys, scores), position, stop)
        position, accepted = right, accepted + 1
    wanted = compress_reference(values.keys, values.scores, bench.weights)
    check_close(bench.stored(2), wanted, E4M3FN)


def test_a_former_owner_changes_nothing() -> None:
    torch.manual_seed(6)
    values = Values.random(131, SHAPE)
    split = [(0, 1), (1, 6), (6, 127), (127, 131)]
    found = []
    for poison in (float("nan"), float("inf"), 1e30, 0.0, 77.0):
        bench = Online(2, poison=poison)
        bench.run(values, split)
        found.append(bench.history.buffer)
    earlier = Online(2)
    earlier.run(Values.random(67, SHAPE), [(0, 67)])
    earlier.run(values, split)
    found.append(earlier.history.buffer)
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_restored_sequence_starts_from_nothing() -> None:
    """A hit ends where a group ends: whatever the slot holds, the next group is the sequence's."""
    torch.manual_seed(7)
    values = Values.random(400, SHAPE)
    bench = Online(2)
    bench.run(Values.random(300, SHAPE), [(0, 300)])
    bench.run(values, [(256, 300), (300, 384)])
    wanted = compress_reference(values.keys, values.scores, bench.weights)
    check_close(bench.stored(3)[2:], wanted[2:3], E4M3FN)


def test_padding_and_the_null_slot_store_nothing() -> None:
    bench = Online(1, poison=5.0)
    values = Values.random(200, SHAPE)
    untouched = bench.history.buffer.clone()
    for slot in (0, -1):
        step = make_step([Chunk(slot, 0, 200)], padding_tokens=0)
        where = {"history": bench.history, "history_rows": torch.arange(200) // 128}
        compress_online(values.keys, values.scores, bench.weights, bench.state, step, **where)
        fold_state(values.keys, values.scores, bench.weights, bench.state, step)
    assert (bench.state.buffer == 5.0).all()
    assert torch.equal(bench.history.buffer, untouched)


def test_programs_in_any_order_give_the_same() -> None:
    """Of two requests, and of the channels of one."""
    torch.manual_seed(8)
    values = Values.random(260, SHAPE)
    buffers = []
    for backwards in (False, True):
        bench = Online(2)
        bench.run(values, [(0, 100)])
        if backwards:
            with last_program_first():
                bench.run(values, [(100, 260)])
        else:
            bench.run(values, [(100, 260)])
        buffers.append((bench.history.buffer, bench.state.rows_view()[SLOT, :2].clone()))
    assert all(torch.equal(one, other) for one, other in zip(*buffers, strict=True))


def test_another_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="online state with 1 drafts"):
        OnlineState(torch.zeros(2, 3 * 1024 - 1), 1)
    with pytest.raises(ValueError, match="multiple of 16"):
        OnlineState(torch.zeros(2, 2 * 1024 + 1), 0)
