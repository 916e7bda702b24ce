"""The list of what we use of vLLM is current, and the check of it sees every class of change."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_dsv4.commands.cli.main import main
from vllm_dsv4.commands.contract.check import (
    Change,
    call_misfit,
    check,
    kernel_misfit,
    override_misfit,
)
from vllm_dsv4.commands.contract.document import coupling_page
from vllm_dsv4.commands.contract.obtain import installed_folder
from vllm_dsv4.commands.contract.record import RECORDED, Record, make_record, read_record
from vllm_dsv4.commands.contract.shapes import Shape
from vllm_dsv4.commands.contract.source import Package, Sources
from vllm_dsv4.commands.contract.uses import How
from vllm_dsv4.cpu.metadata_kernels import KERNELS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def record() -> Record:
    return read_record()


def test_the_record_and_the_page_are_current(record: Record) -> None:
    """If not: ``make coupling``, and look at the difference."""
    assert make_record(record.vllm, installed_folder(), ROOT / "vllm_dsv4") == record
    assert (ROOT / "docs" / "coupling.md").read_text() == coupling_page(record)


def test_the_tool_writes_them(record: Record, tmp_path: Path, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("coupling", ROOT / "tools" / "coupling.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "PAGE", tmp_path / "coupling.md")
    monkeypatch.setattr(tool, "current_record", lambda: record)
    monkeypatch.setattr(tool.write_record, "__defaults__", (tmp_path / "recorded.json",))
    assert tool.main() == 0
    assert (tmp_path / "recorded.json").read_text() == RECORDED.read_text()
    assert (tmp_path / "coupling.md").read_text() == coupling_page(record)


def test_it_lists_what_is_known_to_be_used(record: Record) -> None:
    """One of each way that a grep finds too."""
    known = {
        ("vllm.v1.kv_cache_interface:CircularBufferSpec", How.SUBCLASS),
        ("vllm.v1.core.single_type_kv_cache_manager:CircularBufferManager", How.SUBCLASS),
        (
            "vllm.v1.core.single_type_kv_cache_manager:CircularBufferManager.pop_blocks_for_free",
            How.OVERRIDE,
        ),
        ("vllm.models.deepseek_v4.cpu.cpu_sparse:DeepseekV4CPUAttention", How.REPLACE),
        ("vllm.v1.core.block_pool:BlockPool", How.CONSTRUCT),
        ("vllm.v1.core.block_pool:BlockPool.touch", How.CALL),
        ("vllm.v1.request:Request.num_computed_tokens", How.READ),
        ("vllm._custom_ops:save_partial_states_cpu", How.CALL),
    }
    assert known <= {(use.target, use.how) for use in record.uses}
    kernels = [use for use in record.uses if use.how is How.REPLACE and use.shape is not None]
    assert len(kernels) == len(KERNELS)


def test_the_installed_vllm_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", str(installed_folder()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


class Edit(NamedTuple):
    """A text replaced in one of vLLM's modules, and what the check must say of which part."""

    module: str
    old: str
    new: str
    change: Change
    part: str


POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
SPEC = "vllm.v1.kv_cache_interface"
DISPATCHER = "vllm.triton_utils.dispatcher"
METADATA = "vllm.v1.attention.ops.metadata"
FREE = "def pop_blocks_for_free(self, request_id: str"
COUNT = "    def get_num_free_blocks(self) -> int:"

NAMES = 'PLATFORM_PLUGINS_GROUP = "a"\nDEFAULT_PLUGINS_GROUP = "b"\n'

EDITS = {
    "a method renamed": Edit(
        POOL, "get_new_blocks", "take_blocks", Change.GONE, "BlockPool.get_new_blocks"
    ),
    "a class renamed": Edit(
        MANAGER, "CircularBufferManager", "RoundManager", Change.GONE, "CircularBufferManager"
    ),
    "a function renamed": Edit(
        DISPATCHER, "def register_kernels", "def add_kernels", Change.GONE, "register_kernels"
    ),
    "an attribute renamed": Edit(
        POOL, "self.null_block", "self.empty_block", Change.GONE, "BlockPool.null_block"
    ),
    "a method turned into a property": Edit(
        POOL, COUNT, f"    @property\n{COUNT}", Change.KIND, "BlockPool.get_num_free_blocks"
    ),
    "a new parameter without default": Edit(
        POOL, "def touch(self, ", "def touch(self, reason, ", Change.CALL, "BlockPool.touch"
    ),
    "a parameter renamed that we pass by name": Edit(
        POOL, "num_gpu_blocks: int,", "num_blocks: int,", Change.CALL, "BlockPool"
    ),
    "a parameter that our override does not take": Edit(
        MANAGER, FREE, f"{FREE}, why: str", Change.OVERRIDE,
        "CircularBufferManager.pop_blocks_for_free",
    ),
    "a kernel's argument renamed": Edit(
        METADATA, "num_mapped, num_tokens\n):", "num_used, num_tokens\n):", Change.KERNEL,
        "_token_request_mapping_kernel",
    ),
    "a name of ours taken": Edit(
        MANAGER, FREE, f"def check_integrity(self) -> None: ...\n\n    {FREE}", Change.COLLISION,
        "CircularBufferManager.check_integrity",
    ),
    "a field added": Edit(
        SPEC, "    block_size: int\n", "    block_size: int\n    spin: int = 0\n", Change.FIELDS,
        "CircularBufferSpec",
    ),
    "other code": Edit(
        POOL, COUNT, f"{COUNT}\n        self.asked = True", Change.CODE,
        "BlockPool.get_num_free_blocks",
    ),
}  # fmt: skip


class Changed(Sources):
    """A package, one module of it as it stands there, the others as others have parsed them."""

    def __init__(self, package: Package, module: str, others: Sources) -> None:
        super().__init__(package)
        self.module, self.others = module, others

    def tree(self, module: str) -> ast.Module:
        return super().tree(module) if module == self.module else self.others.tree(module)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Sources]:
    """``changed(module, old, new)``: the installed vLLM with a text replaced in one module."""
    installed = installed_folder()
    files = {str(path.relative_to(installed)): path for path in installed.rglob("*.py")}
    untouched = Sources(Package("vllm", files))

    def change(module: str, old: str, new: str) -> Sources:
        file = f"{module.removeprefix('vllm.').replace('.', '/')}.py"
        text = (installed / file).read_text()
        assert old in text, f"{file} has no {old!r}"
        copy = tmp_path_factory.mktemp("vllm") / "module.py"
        copy.write_text(text.replace(old, new))
        return Changed(Package("vllm", {**files, file: copy}), module, untouched)

    return change


def only(record: Record, module: str) -> Record:
    """The part of a record that concerns one module: quicker to check."""
    near = {target: face for target, face in record.faces.items() if target.startswith(module)}
    return replace(record, faces=near)


@pytest.mark.parametrize("name", EDITS)
def test_a_change_in_a_copy_of_a_module_is_found(record: Record, changed, name: str) -> None:
    edit = EDITS[name]
    findings = check(only(record, edit.module), changed(edit.module, edit.old, edit.new))
    found = {(finding.change, finding.target): finding for finding in findings}
    assert found[edit.change, f"{edit.module}:{edit.part}"].where


def test_comments_and_layout_are_no_change(record: Record, changed) -> None:
    sources = changed(POOL, "def touch(self, ", "def  touch( self,  # pins\n        ")
    assert check(only(record, POOL), sources) == []


def write_package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


EITHER_PLACE = """
try:
    from vllm import new as place
except ImportError:
    from vllm import old as place


def go():
    place.plan(1)
"""


def test_a_part_that_our_source_looks_for_in_two_places_may_move(tmp_path: Path) -> None:
    plan = "def plan(config): ...\n"
    package = write_package(tmp_path / "vllm_dsv4", {"a.py": EITHER_PLACE})
    before = write_package(tmp_path / "0.1" / "vllm", {"old.py": plan, "plugins.py": NAMES})
    record = make_record("0.1", before, package)
    assert "vllm.old:plan" in record.faces
    moved = write_package(tmp_path / "0.2" / "vllm", {"new.py": plan, "plugins.py": NAMES})
    findings = check(record, Sources(Package.open("vllm", moved)))
    assert {finding.change for finding in findings} == {Change.MOVED}
    gone = write_package(tmp_path / "0.3" / "vllm", {"plugins.py": NAMES})
    findings = check(record, Sources(Package.open("vllm", gone)))
    assert {finding.change for finding in findings} == {Change.GONE}


@pytest.mark.parametrize(
    ("call", "takes", "misfit"),
    [
        (Shape(("0",)), Shape(("a", "b=")), ""),
        (Shape(("0", "1")), Shape(("a",)), "2 arguments by position, 1 are taken"),
        (Shape(("0",)), Shape(("a", "b")), "no argument for b"),
        (Shape(("0",), ("c",)), Shape(("a",)), "no parameter c"),
        (Shape(("0",), ("c",)), Shape(("a",), open_ended=True), ""),
        (Shape((), ("a",)), Shape((), ("a", "b=")), ""),
        (Shape((), (), open_ended=True), Shape(("a",)), ""),
    ],
)
def test_calls(call: Shape, takes: Shape, misfit: str) -> None:
    assert call_misfit(call, takes) == misfit


@pytest.mark.parametrize(
    ("ours", "base", "misfit"),
    [
        (Shape(("a", "b=")), Shape(("a",)), ""),
        (Shape(("a",)), Shape(("a", "b")), "ours takes no b"),
        (Shape(("a",), open_ended=True), Shape(("a", "b"), ("c",)), ""),
        (Shape(("a", "b")), Shape(("a", "c")), "vLLM passes c where ours takes b"),
        (Shape(("a", "b")), Shape(("a",)), "ours needs b"),
        (Shape(("a", "c=")), Shape(("a",), ("c",)), ""),
    ],
)
def test_overrides(ours: Shape, base: Shape, misfit: str) -> None:
    assert override_misfit(ours, base) == misfit


def test_kernels_are_launched_by_name() -> None:
    assert kernel_misfit(Shape(("a", "b"), open_ended=True), Shape(("a", "b"))) == ""
    assert kernel_misfit(Shape(("a", "b")), Shape(("a", "c"))) == "new: c; gone: b"
    assert kernel_misfit(Shape(("a", "b")), Shape(("b", "a"))) == "another order"


def test_the_command_tells_an_empty_path_and_nonsense_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["contract", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no package 'vllm'" in capsys.readouterr().err
    assert main(["contract", "no-such-thing"]) == 2
    assert "neither a path that exists nor a version" in capsys.readouterr().err
