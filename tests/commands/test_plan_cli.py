"""``vllm-dsv4 plan`` as a user runs it."""

import json
import subprocess
import sys

import pytest

from vllm_dsv4.commands.cli.main import main

SIDE = {
    "num_blocks",
    "tokens",
    "concurrency",
    "blocks_per_decoding_request",
    "blocks_reserved_per_prefill",
}


def test_json_is_all_that_reaches_stdout_and_has_the_promised_keys():
    command = [sys.executable, "-m", "vllm_dsv4.commands.cli.main", "plan", "flash", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert set(plan) == {"native", "rings", "ratio", "deployment", "tiers"}
    assert set(plan["native"]) == SIDE
    assert set(plan["rings"]) == SIDE | {"num_slots", "bytes_per_slot", "ring_bytes", "c128_state"}
    assert plan["ratio"] == {
        key: plan["rings"][key] / plan["native"][key] for key in ("tokens", "concurrency")
    }


def test_the_table_says_what_was_planned_and_both_capacities(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "pro", "--max-num-seqs", "64", "--max-model-len", "8192"]) == 0
    text = capsys.readouterr().out
    assert "DeepSeek-V4-Pro" in text
    assert "64 slots of 23.27 MB" in text
    assert "one a slot" in text


def test_a_plan_without_prefix_caching_says_what_vllms_default_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", "flash"]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert main(["plan", "flash", "--enable-prefix-caching"]) == 0
    counted = capsys.readouterr().out
    ratio, tokens = counted.split()[1], counted.split()[9].rstrip(",")
    assert f"Its 512 snapshots take 2.35 GiB: {ratio}, {tokens} tokens" in note
    assert "not counted" not in counted

    assert main(["plan", "flash", "--gpu-memory-gib", "6", "--max-model-len", "8192"]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert "its 512 snapshots would not fit: with them the rings take 6.0" in note
    assert (
        "and weights leave 6.00 GiB for rings and pages. Set VLLM_DSV4_SNAPSHOT_SLOTS to " in note
    )
    assert note.endswith(" or less, or switch it off with --no-enable-prefix-caching.")

    monkeypatch.setenv("VLLM_DSV4_SNAPSHOT_SLOTS", "0")
    assert main(["plan", "flash"]) == 0
    assert "Prefix caching" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slots", "flags", "says"),
    [
        ("10", [], "10 run at once, one a slot. A higher VLLM_DSV4_SLOTS lets more run"),
        (
            "4",
            ["--max-num-seqs", "4"],
            "4 run at once, one a slot. A higher VLLM_DSV4_SLOTS and --max-num-seqs lets more run",
        ),
        ("", ["--max-num-seqs", "4"], "one a slot. A higher --max-num-seqs lets more run"),
        (
            "1000",
            ["--max-num-seqs", "4"],
            "VLLM_DSV4_SLOTS=1000: only 4 run at once (--max-num-seqs), and 996 slots, "
            "14.30 GiB of each card, can never be used. Set it to 4, or raise --max-num-seqs.",
        ),
    ],
)
def test_what_limits_the_requests_that_run_at_once_is_named(
    slots: str,
    flags: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("VLLM_DSV4_SLOTS", slots)
    assert main(["plan", "flash", *flags]) == 0
    text = capsys.readouterr().out
    assert says in text
    assert (slots == "1000") == ("one a slot" not in text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu-memory-gib", "1"],
        ["--max-num-seqs", "2", "--max-model-len", "1024"],
    ],
)
def test_vllms_warnings_are_not_part_of_a_plan(arguments: list[str]):
    command = [sys.executable, "-m", "vllm_dsv4.commands.cli.main", "plan", "flash", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(done.stderr.splitlines()) == done.returncode


def test_a_suggestion_to_leave_prefix_caching_out_is_a_flag(capsys: pytest.CaptureFixture[str]):
    flags = ["--enable-prefix-caching", "--max-num-seqs", "2", "--gpu-memory-gib", "1"]
    assert main(["plan", "flash", *flags]) == 1
    assert "--no-enable-prefix-caching" in capsys.readouterr().err
    assert main(["plan", "flash", *flags, "--no-enable-prefix-caching"]) == 0


def test_flags_that_do_not_fit_end_with_flags_that_do(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "flash", "--gpu-memory-gib", "3"]) == 1
    assert "Any one of these fits: --max-num-seqs " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["flush"], "'flush'"),
        (["flash", "--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["flash", "--max-model-len", "9999999"], "--max-model-len 9999999"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_bad_setting_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VLLM_DSV4_SLOTS", "many")
    assert main(["plan", "flash"]) == 2
    assert "VLLM_DSV4_SLOTS='many'" in capsys.readouterr().err
