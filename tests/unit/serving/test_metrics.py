"""The road of slot counts from the ring manager to ``/metrics``, process by process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dsv4.serving import board, metrics
from vllm_dsv4.serving.board import Board, EngineIdentity, RingReading
from vllm_dsv4.serving.metrics import RingCollector

READING = RingReading(
    slots=8,
    slots_in_use=8,
    snapshot_slots=64,
    snapshot_bytes=1 << 40,
    snapshot_lookups=5,
    snapshot_hits=3,
    snapshots_taken=4,
    snapshot_evictions=1,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(board, "boards_folder", lambda: tmp_path)
    return tmp_path


def samples(collector: RingCollector) -> dict[str, dict[str, float]]:
    """Values by engine and name."""
    found: dict[str, dict[str, float]] = {}
    for family in collector.collect():
        for sample in family.samples:
            found.setdefault(sample.labels["engine"], {})[sample.name] = sample.value
    return found


def test_a_reading_is_shown_as_it_was_published(folder: Path) -> None:
    engine = EngineIdentity(instance="17", model_name="m", engine=0)
    board = Board(folder / engine.file_name)
    board.publish(READING)
    collector = RingCollector()
    collector.watch(engine)
    assert samples(collector)["0"] == {
        f"vllm:dsv4_{name}{'_total' if name in metrics.COUNTERS else ''}": value
        for name, value in READING._asdict().items()
    }


def test_every_engine_of_an_instance_is_shown_and_no_other_instance(folder: Path) -> None:
    names = ("vllm-dsv4-17-0.ring", "vllm-dsv4-17_dp1-1.ring", "vllm-dsv4-23-2.ring")
    boards = [Board(folder / name) for name in names]
    for written in boards:
        written.publish(READING)
    collector = RingCollector()
    collector.watch(EngineIdentity("17", "m", 0))
    assert sorted(samples(collector)) == ["0", "1"]


KILLED = """
import os, signal, sys
from pathlib import Path
from vllm_dsv4.serving.board import Board, RingReading
board = Board(Path(sys.argv[1]))
board.publish(RingReading(slots=8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_of_a_killed_engine_is_not_shown_and_goes_with_the_next(folder: Path) -> None:
    left = folder / "vllm-dsv4-17-0.ring"
    env = os.environ | {"VLLM_RPC_BASE_PATH": str(folder)}
    subprocess.run([sys.executable, "-c", KILLED, left], env=env, check=False)
    collector = RingCollector()
    collector.watch(EngineIdentity("17", "m", 0))
    assert left.exists()
    assert not samples(collector)
    board = Board(folder / "vllm-dsv4-18-0.ring")
    board.publish(READING)
    assert [path.name for path in folder.iterdir()] == ["vllm-dsv4-18-0.ring"]


def test_an_engine_that_ended_is_not_shown(folder: Path) -> None:
    board = Board(folder / "vllm-dsv4-17-0.ring")
    board.publish(READING)
    collector = RingCollector()
    collector.watch(EngineIdentity("17", "m", 0))
    assert samples(collector)
    del board
    assert not list(folder.iterdir())
    assert not samples(collector)


def test_a_link_in_the_files_place_is_not_followed(folder: Path) -> None:
    target = folder / "target"
    target.write_text("precious")
    (folder / "vllm-dsv4-17-0.new").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Board(folder / "vllm-dsv4-17-0.ring")
    assert target.read_text() == "precious"


def test_the_line_says_when_requests_have_to_wait() -> None:
    assert READING.describe() == (
        "Rings: 8 of 8 slots in use (further requests wait), snapshots: 3 hits in 5 lookups, "
        "4 taken, 1 evicted"
    )
    assert RingReading(slots=8, slots_in_use=2).describe() == "Rings: 2 of 8 slots in use"


PUBLISH = """
from types import SimpleNamespace as Config
from vllm_dsv4.serving import metrics
from vllm_dsv4.serving.board import EngineIdentity, RingReading
engine = EngineIdentity("17", "m", 0)
ring = metrics.RingMetrics.__new__(metrics.RingMetrics)
ring._published = RingReading()
for hits in (3, 5):
    reading = RingReading(slots=8, slots_in_use=hits, snapshot_hits=hits)
    ring._set_shared_values(engine, reading)
    ring._published = reading
metrics.show_on_metrics(
    Config(
        instance_id="17",
        model_config=Config(served_model_name="m"),
        parallel_config=Config(data_parallel_index=0),
    )
)
"""

SHOW = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_read_the_values_through_prometheus(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    shown = ""
    for code in (PUBLISH, SHOW):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    labels = '{engine="0",model_name="m"}'
    assert f"vllm:dsv4_slots{labels} 8.0" in shown
    assert f"vllm:dsv4_slots_in_use{labels} 5.0" in shown
    assert f"vllm:dsv4_snapshot_hits_total{labels} 5.0" in shown
