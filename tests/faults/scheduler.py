"""Faults of whoever decides: slots, the block manager, snapshots, sizes."""

from tests.faults.fault import fault

SLOTS, MANAGER = "vllm_dsv4/ring/slots.py", "vllm_dsv4/ring/manager.py"
SNAPSHOTS, BOUNDARIES = "vllm_dsv4/ring/snapshots.py", "vllm_dsv4/ring/boundaries.py"
GEOMETRY, ARENA = "vllm_dsv4/ring/geometry.py", "vllm_dsv4/ring/arena.py"
TEST_SLOTS = "tests/unit/ring/test_ring_slots.py"
TEST_GEOMETRY = "tests/unit/ring/test_ring_geometry.py"
TEST_MANAGER = "tests/ring/test_ring_manager.py"
TEST_SNAPSHOTS = "tests/ring/test_snapshots.py"

OWNED = "slots are conserved, one owner each"
BOOKS = "the pool gets what it lent, the books are cleared"
WAITS = "without a slot a request waits"
DRAFTS = "a step's drafts have rows"
SIZES = "one source of sizes"
REBUILT = "no ring that was not rebuilt is used"
TURNS = "a turn finds what the last one left"

FAULTS = [
    fault(
        OWNED,
        "A slot does not come back",
        f"{TEST_MANAGER}::test_freeing_credits_the_pool_with_pages_and_nothing_else",
        (MANAGER, "        self.slots.give_back(request_id)\n", ""),
    ),
    fault(
        OWNED,
        "A slot comes back twice",
        f"{TEST_SLOTS}::test_the_slot_that_was_free_for_longest_is_lent_first",
        (SLOTS, "self._free.append(slot)", "self._free.extend((slot, slot))"),
    ),
    fault(
        OWNED,
        "A lent slot stays in the free list, to be shared",
        f"{TEST_SLOTS}::test_slot_0_is_never_lent",
        (SLOTS, "slot = self._free.popleft()", "slot = self._free[0]"),
    ),
    fault(
        OWNED,
        "The slot returned last is lent first",
        f"{TEST_SLOTS}::test_the_slot_that_was_free_for_longest_is_lent_first",
        (SLOTS, "self._free.append(slot)", "self._free.appendleft(slot)"),
    ),
    fault(
        OWNED,
        "Slot 0 is lent",
        f"{TEST_SLOTS}::test_slot_0_is_never_lent",
        (SLOTS, "deque(range(NULL_SLOT + 1, num_slots + 1))", "deque(range(num_slots))"),
    ),
    fault(
        OWNED,
        "A live request's row names slot 0",
        f"{TEST_MANAGER}::test_a_row_is_the_slot_and_nothing_else",
        (MANAGER, "slot = self.slots.lend(request_id)", "slot = 0 * self.slots.lend(request_id)"),
    ),
    fault(
        BOOKS,
        "A freed row goes to the paged pool",
        f"{TEST_MANAGER}::test_freeing_credits_the_pool_with_pages_and_nothing_else",
        (
            MANAGER,
            "        super().pop_blocks_for_free(request_id)\n",
            "        freed = list(self.req_to_blocks.get(request_id, ()))\n"
            "        for block in freed:\n            block.ref_cnt = 1\n"
            "        super().pop_blocks_for_free(request_id)\n",
        ),
        (
            MANAGER,
            "self.snapshots)\n        return []\n\n    def new_step",
            "self.snapshots)\n        return freed\n\n    def new_step",
        ),
    ),
    fault(
        BOOKS,
        "The block-table row is not cleared at a free, immediate or deferred",
        f"{TEST_MANAGER}::test_freeing_credits_the_pool_with_pages_and_nothing_else",
        (MANAGER, "        super().pop_blocks_for_free(request_id)\n", ""),
    ),
    fault(
        BOOKS,
        "A freed request's snapshots are not forgotten",
        f"{TEST_SNAPSHOTS}::test_a_request_preempted_in_the_step_that_writes_publishes_nothing",
        (MANAGER, "        self.snapshots.forget(request_id)\n", ""),
    ),
    fault(
        WAITS,
        "A request is admitted without a free slot",
        f"{TEST_MANAGER}::test_no_free_slot_means_the_request_waits_and_nothing_is_taken",
        (MANAGER, "        return self._impossible_demand", "        return 0"),
    ),
    fault(
        DRAFTS,
        "Rings have no rows for drafts",
        f"{TEST_GEOMETRY}::test_every_kind_keeps_its_window_beside_the_drafts",
        (
            GEOMETRY,
            "return min(window, max_model_len) + lookahead",
            "return min(window, max_model_len)",
        ),
    ),
    fault(
        DRAFTS,
        "The check of rows against drafts is asleep",
        f"{TEST_GEOMETRY}::test_too_few_rows_for_the_drafts_are_refused",
        (GEOMETRY, "if 1 + lookahead > rows - window + 1:", "if False:"),
    ),
    fault(
        DRAFTS,
        "vLLM's lookahead alone counts, which is 0 for n-gram drafts",
        f"{TEST_GEOMETRY}::test_ngram_drafts_count_as_lookahead_though_vllm_reserves_none",
        (
            GEOMETRY,
            "return max(num_speculative_tokens, num_lookahead_tokens, 0)",
            "return num_lookahead_tokens",
        ),
    ),
    fault(
        SIZES,
        "The arena has no null slot, the plan has one",
        "tests/ring/test_arena.py::test_the_arena_holds_exactly_the_bytes_that_were_planned",
        (ARENA, "slots = geometry.num_slots + 1", "slots = geometry.num_slots"),
    ),
    fault(
        SIZES,
        "The plan has no null slot, the arena has one",
        f"{TEST_GEOMETRY}::test_the_null_slot_and_the_snapshots_are_paid_for",
        (GEOMETRY, "            self.num_slots + 1\n", "            self.num_slots\n"),
    ),
    fault(
        REBUILT,
        "Pages without a snapshot count as a hit",
        f"{TEST_SNAPSHOTS}::test_a_snapshot_is_found_from_the_step_after_its_write",
        (
            MANAGER,
            "            if found is not None:\n",
            "            found = found or [block_pool.null_block]\n            if found:\n",
        ),
    ),
    fault(
        REBUILT,
        "A snapshot is published when it is ordered",
        f"{TEST_SNAPSHOTS}::test_a_row_of_a_rejected_draft_is_not_published_though_its_block_is_full_of_known_tokens",
        (
            SNAPSHOTS,
            "        return (\n            order.written\n",
            "        return True or (\n            order.written\n",
        ),
    ),
    fault(
        REBUILT,
        "A snapshot that was hit is not pinned",
        f"{TEST_SNAPSHOTS}::test_a_hit_orders_the_copy_and_pins_its_source",
        (SNAPSHOTS, "        self.pool.touch([snapshot])\n", ""),
    ),
    fault(
        REBUILT,
        "A preempted request's half-made snapshot is published",
        f"{TEST_SNAPSHOTS}::test_a_request_preempted_in_the_step_that_writes_publishes_nothing",
        (
            SNAPSHOTS,
            "if executed and self._is_final(life, order):",
            "if self._is_final(life, order):",
        ),
    ),
    fault(
        REBUILT,
        "A hit is as long as the pages though vLLM drops a block for a draft model",
        "tests/ring/test_draft_hits.py::test_a_snapshot_past_the_pages_that_are_left_is_no_hit",
        (MANAGER, "            max_length -= block_size\n", "            pass\n"),
    ),
    fault(
        REBUILT,
        "A snapshot is final when its block's tokens are known, computed or not",
        f"{TEST_SNAPSHOTS}::test_a_row_of_a_rejected_draft_is_not_published_though_its_block_is_full_of_known_tokens",
        (
            SNAPSHOTS,
            "life.request.num_computed_tokens >= order.boundary",
            "life.request.num_tokens >= order.boundary",
        ),
    ),
    fault(
        REBUILT,
        "Tokens that a connector loaded are taken as the ring's",
        f"{TEST_MANAGER}::test_a_ring_is_not_used_for_tokens_that_nobody_rebuilt_it_for",
        (
            MANAGER,
            "            num_external_computed_tokens\n            or hit",
            "            hit",
        ),
    ),
    fault(
        REBUILT,
        "A loaded snapshot is let go before the step that copies it",
        "tests/ring/test_loads.py::"
        "test_a_loaded_snapshot_stays_until_the_step_that_copies_it_is_scheduled",
        (
            SNAPSHOTS,
            "self._loaded[request.request_id] = loaded",
            "self._pinned[request.request_id] = loaded",
        ),
    ),
    fault(
        REBUILT,
        "A request that is given up keeps the place of what it loads",
        "tests/ring/test_loads.py::test_a_request_given_up_gives_back_slot_place_and_pages",
        (SNAPSHOTS, "(self._pinned, self._loading, self._loaded)", "(self._pinned,)"),
    ),
    fault(
        TURNS,
        "A resumed request orders no snapshot where its own tokens end",
        f"{TEST_SNAPSHOTS}::test_a_resumed_request_leaves_a_snapshot_where_its_tokens_end",
        (BOUNDARIES, "for tokens in (prompt, request.num_tokens)", "for tokens in (prompt,)"),
    ),
    fault(
        TURNS,
        "Of the boundaries crossed while decoding, the first is kept",
        f"{TEST_SNAPSHOTS}::test_the_next_turn_of_a_chat_hits_the_answer_of_the_last_one",
        (
            SNAPSHOTS,
            "            self.pool.free_blocks([life.latest.block])\n        life.latest = order\n",
            "            self.pool.free_blocks([order.block])\n            return\n"
            "        life.latest = order\n",
        ),
    ),
]
"""Whoever schedules has no rows, so these tests need neither a card nor an engine."""
