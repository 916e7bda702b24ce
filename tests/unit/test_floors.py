"""Imports run down the house, never up: the table below, and what it forbids."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_dsv4"

GROUND = ("architectures", "log", "settings", "versions")
MAY_IMPORT = {
    # room: the rooms below it
    "ring": (*GROUND,),
    "fixes": (*GROUND,),
    "checkpoint": ("ring", *GROUND),
    "offload": ("ring", *GROUND),
    "serving": ("checkpoint", "offload", "ring", *GROUND),
    "cpu": ("serving", "checkpoint", "ring", "fixes", *GROUND),
    "rocm": ("serving", "checkpoint", "ring", "fixes", "kernels", *GROUND),
    "commands": (
        *(
            "rocm",
            "cpu",
            "serving",
            "checkpoint",
            "offload",
            "ring",
            "fixes",
            "kernels",
            "entrypoints",
        ),
        *GROUND,
    ),
    # vLLM imports it while vLLM itself is being imported: it names all else by string.
    "entrypoints": (*GROUND,),
    # The ground floor stands on nothing.
    **dict.fromkeys(GROUND, ()),
}


@dataclass(frozen=True)
class Import:
    """``module`` imports ``target`` in line ``line``, at the top or inside a function."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        path = self.module.replace(".", "/")
        rooms = ", ".join(MAY_IMPORT[room_of(self.module)]) or "nothing of ours"
        return (
            f"{path}, line {self.line}, imports {self.target}: "
            f"{room_of(self.module)} may import {rooms}"
        )


def room_of(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.").split(".")[0]


def modules(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def imports(module: str, tree: ast.Module, known: set[str]) -> Iterator[Import]:
    """Every import of ours, the ones inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: a relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in submodules]
        else:
            continue
        for name in names:
            if name.startswith(f"{PACKAGE}."):
                yield Import(module, name, node.lineno)


def all_imports(package: Path) -> list[Import]:
    trees = dict(modules(package))
    known = set(trees) | {f"{PACKAGE}.kernels"}
    return [found for name, tree in trees.items() for found in imports(name, tree, known)]


def running_up(found: list[Import]) -> list[Import]:
    return [
        one
        for one in found
        if one.module != PACKAGE
        and room_of(one.target) != room_of(one.module)
        and room_of(one.target) not in MAY_IMPORT[room_of(one.module)]
    ]


def test_every_room_of_the_house_is_in_the_table() -> None:
    rooms = {room_of(module) for module, _ in modules(ROOT / PACKAGE) if module != PACKAGE}
    assert rooms == set(MAY_IMPORT)


def test_no_import_runs_up() -> None:
    wrong = running_up(all_imports(ROOT / PACKAGE))
    assert not wrong, "\n".join(str(one) for one in wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Lazy imports count: two modules that need each other at run time are one subject."""
    targets: dict[str, set[str]] = {}
    for one in all_imports(ROOT / PACKAGE):
        targets.setdefault(one.module, set()).add(one.target)
    left = dict(targets)
    while True:
        leaves = {module for module, needed in left.items() if not needed & set(left)}
        if not leaves:
            break
        left = {module: needed for module, needed in left.items() if module not in leaves}
    assert not left, f"in a circle, or above one: {sorted(left)}"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("from vllm_dsv4.serving.metrics import RingMetrics", "ring may import"),
        ("def late() -> None:\n    import vllm_dsv4.commands.cli.main", "line 2"),
        ("from vllm_dsv4 import entrypoints", "imports vllm_dsv4.entrypoints"),
        ("if TYPE_CHECKING:\n    from vllm_dsv4.rocm import step", "imports vllm_dsv4.rocm.step"),
    ],
)
def test_an_import_that_runs_up_is_named_with_its_line_and_the_rule(line: str, rule: str) -> None:
    known = {"vllm_dsv4.entrypoints", "vllm_dsv4.rocm.step", "vllm_dsv4.ring.manager"}
    (wrong,) = running_up(list(imports("vllm_dsv4.ring.manager", ast.parse(line), known)))
    assert rule in str(wrong)
    assert "vllm_dsv4/ring/manager" in str(wrong)
