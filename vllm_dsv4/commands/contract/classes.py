"""Classes as their source shows them: bases, members, constructor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from vllm_dsv4.commands.contract.source import Sources, Symbol

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Member:
    """A member of a class.

    Attributes:
        owner: the class whose body or method defines it.
        node: its method, or the statement that sets it.
        setter: the method that sets it on ``self``, if one does.
    """

    owner: Symbol
    name: str
    node: ast.AST
    setter: Function | None = None


@lru_cache(maxsize=4096)
def bases(sources: Sources, cls: Symbol) -> tuple[Symbol, ...]:
    """A class and its bases that have source here, nearest first (depth first, each once)."""
    order: list[Symbol] = []

    def visit(symbol: Symbol) -> None:
        if symbol in order or not isinstance(symbol.node, ast.ClassDef):
            return
        order.append(symbol)
        for base in symbol.node.bases:
            found = resolve(sources, symbol.module, base)
            if found is not None:
                visit(found)

    visit(cls)
    return tuple(order)


def resolve(sources: Sources, module: str, node: ast.expr) -> Symbol | None:
    """The symbol that a name or dotted name means at a module's top level."""
    if isinstance(node, ast.Subscript):
        return resolve(sources, module, node.value)
    if isinstance(node, ast.Name):
        return sources.find(module, node.id)
    if isinstance(node, ast.Attribute):
        outer = resolve(sources, module, node.value)
        if outer is not None and outer.node is None:
            return sources.find(outer.module, node.attr)
    return None


def member(sources: Sources, cls: Symbol, name: str) -> Member | None:
    """A class's member, its own or inherited."""
    for symbol in bases(sources, cls):
        for found in own_members(symbol):
            if found.name == name:
                return found
    return None


@lru_cache(maxsize=4096)
def own_members(cls: Symbol) -> tuple[Member, ...]:
    """Members that a class's own body defines: first those of the body, then those of ``self``."""
    return tuple(_own_members(cls))


def _own_members(cls: Symbol) -> Iterator[Member]:
    assert isinstance(cls.node, ast.ClassDef)
    methods = []
    for node in cls.node.body:
        if isinstance(node, Function):
            methods.append(node)
            yield Member(cls, node.name, node)
        elif isinstance(node, ast.ClassDef):
            yield Member(cls, node.name, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield Member(cls, node.target.id, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield Member(cls, target.id, node)
    for method in methods:
        yield from _set_on_self(cls, method)


def _set_on_self(cls: Symbol, method: Function) -> Iterator[Member]:
    for node in ast.walk(method):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [
                e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])
            ]
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = node.func.attr in ("register_buffer", "register_parameter") and node.args
            if named and isinstance(node.args[0], ast.Constant):
                yield Member(cls, str(node.args[0].value), node, method)
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                yield Member(cls, target.attr, node, method)


def is_dataclass(cls: ast.ClassDef) -> bool:
    """Whether the class is decorated as one, by Python, pydantic or vLLM's own ``config``."""
    return any(_decorator_name(d) in ("dataclass", "config") for d in cls.decorator_list)


def has_decorator(node: Function, *names: str) -> bool:
    return any(_decorator_name(d) in names for d in node.decorator_list)


def _decorator_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dataclass_fields(sources: Sources, cls: Symbol) -> dict[str, bool] | None:
    """Fields of a dataclass, in order, and whether each has a default; None for other classes."""
    fields: dict[str, bool] = {}
    found = False
    for symbol in reversed(bases(sources, cls)):
        assert isinstance(symbol.node, ast.ClassDef)
        if not is_dataclass(symbol.node):
            continue
        found = True
        for node in symbol.node.body:
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and "ClassVar" not in ast.dump(node.annotation)
                and not _left_out(node.value)
            ):
                fields[node.target.id] = node.value is not None
    return fields if found else None


def _left_out(value: ast.expr | None) -> bool:
    """``field(init=False)``."""
    return isinstance(value, ast.Call) and any(
        k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False
        for k in value.keywords
    )
