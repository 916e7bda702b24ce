"""Machine code of every kernel variant for three cards, read from the command's own output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dsv4.commands.isa.assembly import read_assembly
from vllm_dsv4.commands.isa.table import markdown_table, replace_table
from vllm_dsv4.rocm.archs import ARCHS, LDS_BYTES_PER_CU

KEYS = {
    "owner",
    "kernel",
    "variant",
    "arch",
    "vgpr",
    "agpr",
    "sgpr",
    "vgpr_spills",
    "sgpr_spills",
    "scratch_bytes",
    "lds_bytes",
    "waves_per_simd",
    "mfma",
    "global_load_bytes_widest",
    "instructions",
}
ATTENTION = ("decode_kernel", "prefill_kernel")


def _isa(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where kernels are compiled: this process interprets them."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "vllm_dsv4.commands.cli.main", "isa", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report() -> subprocess.CompletedProcess[str]:
    return _isa("--json")


@pytest.fixture(scope="module")
def rows(report: subprocess.CompletedProcess[str]) -> list[dict]:
    return json.loads(report.stdout)


def test_every_bar_holds(report: subprocess.CompletedProcess[str]) -> None:
    assert report.returncode == 0, report.stderr


def test_rows_have_the_named_keys_for_every_architecture(rows: list[dict]) -> None:
    assert all(set(row) == KEYS for row in rows)
    for kernel in (*ATTENTION, "join_kernel"):
        assert {row["arch"] for row in rows if row["kernel"] == kernel} == set(ARCHS)
    assert {row["arch"] for row in rows if row["owner"] == "vllm"} == set(ARCHS)


def test_nothing_of_ours_spills(rows: list[dict]) -> None:
    for row in rows:
        if row["owner"] == "vllm_dsv4":
            spilled = row["vgpr_spills"] + row["sgpr_spills"] + row["scratch_bytes"]
            assert spilled == 0, row


def test_two_workgroups_of_attention_share_a_compute_unit(rows: list[dict]) -> None:
    for row in rows:
        if row["kernel"] in ATTENTION:
            assert 2 * row["lds_bytes"] <= LDS_BYTES_PER_CU[row["arch"]], row
            assert row["waves_per_simd"] >= 2, row


def test_attention_loads_sixteen_bytes_and_multiplies_matrices(rows: list[dict]) -> None:
    for row in rows:
        if row["kernel"] in ATTENTION:
            assert row["global_load_bytes_widest"] == 16, row
            assert row["mfma"] > 0, row


def test_the_documented_table_is_what_the_command_makes(rows: list[dict]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    renewed = replace_table(text, markdown_table(rows))
    assert text == renewed, "run: vllm-dsv4 isa --write docs/kernels.md"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", ["window", "window+compressed"])
@pytest.mark.parametrize("row_type", ["fp8", "bf16"])
def test_decode_takes_fewer_registers_than_vllm(
    rows: list[dict], arch: str, source: str, row_type: str
) -> None:
    variant = f"{row_type}, {source}"
    theirs = [
        row["vgpr"]
        for row in rows
        if (row["owner"], row["arch"], row["variant"]) == ("vllm", arch, variant)
    ]
    ours = [
        row["vgpr"]
        for row in rows
        if row["kernel"] == "decode_kernel"
        and row["arch"] == arch
        and row["variant"].startswith(f"{variant},")
    ]
    assert len(theirs) == 1
    assert len(ours) == 2
    assert max(ours) < theirs[0]


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    refused = _isa("--arch", "gfx906")
    assert refused.returncode == 2
    assert all(arch in refused.stderr for arch in ARCHS)


def test_interpreted_kernels_are_refused() -> None:
    refused = _isa(TRITON_INTERPRET="1")
    assert refused.returncode == 2
    assert "TRITON_INTERPRET" in refused.stderr


ASSEMBLY = """
kernel:
    s_load_dwordx2 s[2:3], s[0:1], 0x0
    s_load_dword s7, s[2:3], 0x0   ; not an argument
    global_load_dwordx4 v[0:3], v[4:5], off
    global_load_short_d16_hi v1, v[2:3], off
    global_load_ubyte v1, v[2:3], off
    buffer_load_dwordx2 v[2:3], v1, s[0:3], 0 offen
    v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]
.LBB0_1:
    s_endpgm
    s_code_end
; Occupancy: 2
    .agpr_count: 4
    .sgpr_count: 40
    .vgpr_count: 132
    .vgpr_spill_count: 1
    .sgpr_spill_count: 2
    .private_segment_fixed_size: 8
"""


def test_figures_are_read_from_the_assembly() -> None:
    figures = read_assembly(ASSEMBLY, lds_bytes=1024)
    assert (figures.vgpr, figures.agpr, figures.sgpr) == (132, 4, 40)
    assert (figures.vgpr_spills, figures.sgpr_spills, figures.scratch_bytes) == (1, 2, 8)
    assert (figures.lds_bytes, figures.waves_per_simd, figures.mfma) == (1024, 2, 1)
    assert figures.global_loads == {1: 1, 2: 1, 8: 1, 16: 1}
    assert figures.global_load_bytes_widest == 16
    assert figures.instructions == 8
    assert figures.scalar_loads_of_data == 1


def test_an_assembly_without_its_figures_is_an_error() -> None:
    with pytest.raises(ValueError, match="sgpr_count"):
        read_assembly(ASSEMBLY.replace(".sgpr_count", ".other"), lds_bytes=0)
