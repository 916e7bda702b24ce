"""The command line: help is cheap, and bad values are refused before anything is written."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_dsv4.commands.cli.main import SUBCOMMANDS, main

OFFERED = [
    name for name in SUBCOMMANDS if find_spec(f"vllm_dsv4.commands.cli.{name.replace('-', '_')}")
]

WITHOUT_HEAVY_IMPORTS = """
import sys
from vllm_dsv4.commands.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "vllm", "transformers", "triton", "numpy"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in OFFERED]])
def test_help_imports_neither_torch_nor_vllm(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY_IMPORTS, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "usage: vllm-dsv4" in ran.stdout


def test_help_lists_exactly_the_subcommands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert OFFERED
    for name in SUBCOMMANDS:
        assert (f"\n    {name}" in shown) == (name in OFFERED), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "0,5"], "--ratios 0,5: DeepSeek-V4 has no layer of ratio 5; use 0"),
        (["--ratios", "0,four"], "--ratios '0,four': not a list of whole numbers; give"),
        (["--experts", "7"], "--experts 7: vLLM's CPU routing operator is not compiled"),
        (["--hidden", "300"], "--hidden 300: block-fp8 needs a multiple of 128, 256 or more"),
        (["--mtp", "2"], "--mtp 2: DeepSeek-V4 has at most one draft layer; use 0 or 1"),
        (["--dtype", "int3"], "--dtype int3: not a form of weights; use one of bf16, released"),
    ],
)
def test_make_tiny_refuses_bad_values_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "model"
    assert main(["make-tiny", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_make_tiny_refuses_a_file_for_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file"
    out.write_text("mine")
    assert main(["make-tiny", str(out)]) == 2
    assert "is a file; give the path of a new or empty folder" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_no_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "\n    doctor" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"vllm-dsv4 \d+\.\d+\.\d+\n", capsys.readouterr().out)
