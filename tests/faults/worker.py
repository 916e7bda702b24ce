"""Faults of whoever computes: index plans, layers, compressors, kernels."""

from tests.faults.fault import fault

ADDRESSING, STEP = "vllm_dsv4/ring/addressing.py", "vllm_dsv4/ring/step.py"
PLAN, ROCM_BACKEND = "vllm_dsv4/cpu/index_plan.py", "vllm_dsv4/rocm/backend.py"
ROCM, ROCM_COMPRESSOR = "vllm_dsv4/rocm/attention.py", "vllm_dsv4/rocm/compressor.py"
READS = "tests/cpu/test_index_plan.py::test_every_read_finds_the_positions_it_needs"
LAYER = "tests/rocm/test_layer.py::test_every_batch_gives_what_the_cpu_path_gives"
CPU_ORDERS = "tests/cpu/test_orders.py::test_every_token_reads_the_rows_that_it_needs"
ROCM_ORDERS = "tests/rocm/test_orders.py::test_steps_give_what_whole_chunks_give"
WRITES = "tests/kernels/test_ring_write.py"

OWNED = "slots are conserved, one owner each"
OWN_ROWS = "only rows that the owner wrote are read"
READ_FIRST = "prefill reads, then writes its last rows"
CHUNKS = "chunks change nothing"
DRAFTS = "a step's drafts have rows"
WIDE = "addresses are 64-bit"
REBUILT = "no ring that was not rebuilt is used"

SAVES = """        save_state(keys, scores, weights, self.state_ring, step.all)
"""
CHUNK_WRITE = """        if chunk_keys is not None:
            write_ring(chunk_keys, self.window_ring, metadata.step.prefills)
"""
SNAPSHOT_WRITE = "        self._write_snapshots(chunk_keys, metadata)\n"

FAULTS = [
    fault(
        OWNED,
        "A step takes slot 0 for a live request",
        READS,
        (STEP, "return named * numbers.are_lendable(named)", "return named * 0"),
    ),
    fault(
        OWNED,
        "A request in slot 0 writes into another slot",
        f"{WRITES}::test_requests_in_slot_zero_and_empty_steps_write_nothing",
        (
            "kernels/ring_tail.py",
            "return tl.maximum(slot, 0), position % ROWS, position",
            "return tl.maximum(slot, 1), position % ROWS, position",
        ),
    ),
    fault(
        OWN_ROWS,
        "A query reads one row more than its window: the former owner's",
        READS,
        (
            PLAN,
            "            read = offsets <= (positions - first)[:, None]",
            "            read = offsets <= (positions - first)[:, None] + 1",
        ),
    ),
    fault(
        OWN_ROWS,
        "A chunk finds one row less of its window in the ring",
        READS,
        (
            ADDRESSING,
            "return next_position - (SWA_WINDOW - 1)",
            "return next_position - SWA_WINDOW + 2",
        ),
    ),
    fault(
        OWN_ROWS,
        "Decode attends before it writes (ROCm)",
        LAYER,
        (
            ROCM,
            "        write_ring(keys, self.window_ring, metadata.step.decodes, cos_sin=cos_sin)\n"
            "        return self.rotate_queries(",
            "        self.late = keys, cos_sin\n        return self.rotate_queries(",
        ),
        (
            ROCM,
            SNAPSHOT_WRITE,
            "        keys, cos_sin = self.late\n"
            "        write_ring(keys, self.window_ring, metadata.step.decodes, cos_sin=cos_sin)\n"
            + SNAPSHOT_WRITE,
        ),
    ),
    fault(
        READ_FIRST,
        "Prefill writes its ring before it reads it",
        LAYER,
        (
            ROCM,
            "        prefill(\n",
            "        write_ring(keys, self.window_ring, step)\n        prefill(\n",
        ),
    ),
    fault(
        READ_FIRST,
        "A chunk is written to the ring before the step's snapshots are (ROCm)",
        ROCM_ORDERS,
        (ROCM, SNAPSHOT_WRITE + CHUNK_WRITE, CHUNK_WRITE + SNAPSHOT_WRITE),
    ),
    fault(
        READ_FIRST,
        "A compressor saves a chunk's state before it compresses",
        "tests/rocm/test_groups_across_chunks.py"
        "::test_a_chunk_that_fills_the_ring_closes_the_group_that_was_open",
        (ROCM_COMPRESSOR, SAVES, ""),
        (
            ROCM_COMPRESSOR,
            "        compress(\n            keys,",
            SAVES + "        compress(\n            keys,",
        ),
    ),
    fault(
        READ_FIRST,
        "Prefill reads the ring for positions of its own chunk",
        "tests/kernels/test_prefill.py::test_ragged_chunks_at_every_wrap",
        (
            "kernels/prefill.py",
            "chunk_start = position - (i_t - chunk_begin)",
            "chunk_start = position - (i_t - chunk_begin) + 1",
        ),
    ),
    fault(
        READ_FIRST,
        "The whole chunk is written, not its last rows (index plan)",
        READS,
        (
            PLAN,
            "ranges(torch.maximum(oldest, self._first), self._end)",
            "ranges(torch.minimum(oldest, self._first).clamp(min=0), self._end)",
        ),
    ),
    fault(
        READ_FIRST,
        "The same, in the kernel that writes",
        f"{WRITES}::test_no_row_is_written_twice_in_a_step",
        ("kernels/ring_tail.py", "live & (left > 0) & (left <= ROWS)", "live & (left > 0)"),
    ),
    fault(
        CHUNKS,
        "A C4 group forgets the group that it overlaps",
        READS,
        (
            ADDRESSING,
            "return open_group - ratio if ratio == 4 else open_group",
            "return open_group",
        ),
    ),
    fault(
        DRAFTS,
        "A chunk's tail keeps no rows for tokens that may be rejected",
        READS,
        (PLAN, "(self._end - self.lookahead).clamp(min=0)", "self._end"),
    ),
    fault(
        WIDE,
        "Slots stay int32 where rows are computed",
        "tests/unit/ring/test_wide_rows.py::test_every_ring_row_of_a_step_is_exact_past_2_to_the_31",
        (
            STEP,
            "return self.slots[self.token_to_req].to(torch.int64)",
            "return self.slots[self.token_to_req]",
        ),
        (PLAN, "self.step.positions[:n], self.rows)", "self.step.positions[:n].int(), self.rows)"),
    ),
    fault(
        WIDE,
        "The decode kernel takes slots in 32 bits",
        "tests/kernels/test_decode.py::test_addresses_past_four_gib",
        (
            "kernels/decode.py",
            "i_slot = tl.load(slots_ptr + i_t, volatile=True).to(tl.int64)",
            "i_slot = tl.load(slots_ptr + i_t, volatile=True)",
        ),
    ),
    fault(
        WIDE,
        "So does the prefill kernel",
        "tests/kernels/test_prefill.py::test_addresses_past_four_gib",
        (
            "kernels/prefill.py",
            "i_slot = tl.load(slots_ptr + i_seq, volatile=True).to(tl.int64)",
            "i_slot = tl.load(slots_ptr + i_seq, volatile=True)",
        ),
    ),
    fault(
        WIDE,
        "So do ring writes and saved states",
        f"{WRITES}::test_slots_past_four_gib",
        (
            "kernels/ring_tail.py",
            "slot = load_index(slots_ptr + request, live).to(tl.int64)",
            "slot = load_index(slots_ptr + request, live)",
        ),
    ),
    fault(
        WIDE,
        "So does the compressor",
        "tests/kernels/test_compress.py::test_slots_and_blocks_past_four_gib",
        (
            "kernels/compress.py",
            "slot = load_index(slots_ptr + request, True).to(tl.int64)",
            "slot = load_index(slots_ptr + request, True)",
        ),
    ),
    fault(
        WIDE,
        "So do copies of slots (a segmentation fault)",
        "tests/kernels/test_ring_copy.py::test_slots_past_four_gib",
        (
            "kernels/ring_copy.py",
            "source = load_index(sources_ptr + request, True).to(tl.int64)",
            "source = load_index(sources_ptr + request, True)",
        ),
    ),
    fault(
        WIDE,
        "Blocks of compressed rows are found in 32 bits",
        "tests/kernels/test_decode.py::test_addresses_past_four_gib",
        (
            "kernels/tiles.py",
            "cache_ptr + (i_key // ROWS).to(tl.int64) * cache_stride",
            "cache_ptr + (i_key // ROWS) * cache_stride",
        ),
    ),
    fault(
        REBUILT,
        "The restore after a hit is skipped",
        CPU_ORDERS,
        (STEP, "due &= rows[:, row.HIT_BLOCKS] * block_size == first", "due &= first < 0"),
    ),
    fault(
        REBUILT,
        "The restore is ordered a step late",
        CPU_ORDERS,
        (
            STEP,
            "due &= rows[:, row.HIT_BLOCKS] * block_size == first",
            "due &= rows[:, row.HIT_BLOCKS] * block_size < first",
        ),
    ),
    fault(
        REBUILT,
        "The restore runs after the step that reads (ROCm)",
        ROCM_ORDERS,
        (
            ROCM_BACKEND,
            "            self.snapshots.restore(rows)\n        return self._describe(",
            "            self.late = rows\n        return self._describe(",
        ),
    ),
]
"""Index plans and references run in torch, kernels under Triton's interpreter."""
