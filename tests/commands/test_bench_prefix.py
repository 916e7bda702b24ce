"""Benchmark ``prefix``, its simulated half: hit rates on small traces, and the document."""

import json
from pathlib import Path

from vllm_dsv4.commands.bench import prefix, run
from vllm_dsv4.commands.bench.document import write_document
from vllm_dsv4.commands.bench.draw import draw_prefix
from vllm_dsv4.commands.bench.traffic import chats, long_sessions

CASE = {"requests": 1, "tokens": 512, "ratio": 1.01, "ratio_of_starts": [1.0, 1.01, 1.02],
        "on_ms": 101.0, "off_ms": 100.0}  # fmt: skip


def test_at_default_settings_rings_hit_no_less_than_pages():
    for trace in (
        prefix.Trace("chat", "Chat", chats(8, 6)),
        prefix.Trace("long", "Long", long_sessions(3, 3, 2048)),
    ):
        found = prefix._hit_rates(trace)
        assert trace.at_defaults
        assert found["snapshot_evictions"] == 0
        assert found["rings"]["hit_tokens"] >= found["paged"]["hit_tokens"] > 0
        assert found["no_lower"]
        for side in ("paged", "rings"):
            assert (
                found[side]["hit_tokens"] + found[side]["prefilled_tokens"]
                == (found[side]["prompt_tokens"])
            )


def test_a_burst_behind_a_new_common_prefix_hits_from_the_next_step_on():
    """The one place where pages hit more: later requests of the step that computes the prefix."""
    found = prefix._hit_rates(prefix.Trace("burst", "Burst", chats(6, 1)))
    assert found["paged"]["hit_tokens"] == 4 * 768
    assert found["rings"]["hit_tokens"] == 0


def test_more_conversations_than_snapshots_cost_hits_and_more_snapshots_bring_them_back():
    sessions = chats(12, 3)
    few = prefix._hit_rates(prefix.Trace("few", "Few", sessions, 4, snapshots=4))
    more = prefix._hit_rates(prefix.Trace("more", "More", sessions, 4, snapshots=48))
    assert few["snapshot_evictions"] > 0
    assert not few["no_lower"]
    assert more["no_lower"]


def test_a_snapshot_holds_windows_and_c4_states():
    window, c4 = 128 * 584, 8 * (4 * 512 + 4 * 128) * 4
    assert prefix.snapshot_bytes() == {
        "DeepSeek-V4-Flash": 43 * window + 21 * c4,
        "DeepSeek-V4-Pro": 61 * window + 30 * c4,
        "make-tiny": 5 * window + 2 * c4,
    }


def test_the_document_says_where_rings_hit_less_and_why(tmp_path: Path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    trace = prefix._hit_rates(prefix.Trace("few", "Few slots", chats(12, 3), 4, snapshots=4))
    data = {
        "benchmark": "prefix", "quick": True, "conditions": run.conditions(),
        "model": "DeepSeek-V4-Flash", "gpu_memory_gib": 100.0, "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192, "traces": [trace], "starts": 3, "rounds": 4, "cost": [CASE],
        "snapshot_bytes": prefix.snapshot_bytes(),
    }  # fmt: skip
    data["plots"] = draw_prefix(data, folder)
    (folder / "prefix.json").write_text(json.dumps(data))
    text = write_document(folder).read_text()
    assert 'Rings hit less in "Few slots".' in text
    assert "VLLM_DSV4_SNAPSHOT_SLOTS" in text
    assert "| 1.010x | 1.000 to 1.020 over 3 starts |" in text
    assert (folder / "prefix.png").stat().st_size > 10_000
    assert any("LOWER" in line for line in prefix.headlines(data))
