"""What our code uses of vLLM, found in our source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_dsv4.commands.contract.alternatives import import_branches, origins
from vllm_dsv4.commands.contract.classes import (
    Function,
    bases,
    dataclass_fields,
    has_decorator,
    member,
    own_members,
)
from vllm_dsv4.commands.contract.shapes import Shape, arguments, bound_parameters, parameters
from vllm_dsv4.commands.contract.source import Sources, Symbol, imports_of
from vllm_dsv4.commands.contract.types import Scope, Types, Value

OURS, THEIRS = "vllm_dsv4", "vllm"


class How(StrEnum):
    """A way of leaning on vLLM."""

    SUBCLASS = "subclass"
    OVERRIDE = "override"
    REPLACE = "replace"
    CONSTRUCT = "construct"
    CALL = "call"
    READ = "read"
    IMPORT = "import"


@dataclass(frozen=True, order=True)
class Use:
    """One use. ``target`` is ``module:Name`` or ``module:Class.member``; ``where`` our module."""

    target: str
    how: How
    where: str
    shape: Shape | None = None


def find_uses(sources: Sources) -> list[Use]:
    """Every use that the source shows, sorted, each once."""
    uses = {Use(target, How.READ, "entry points") for target in BY_NAME}
    for module in sources.packages[OURS].modules():
        uses.update(_ModuleUses(sources, module).find())
    return sorted(uses, key=lambda use: (use.target, use.how, use.where, use.shape or Shape()))


BY_NAME = (
    "vllm.plugins:PLATFORM_PLUGINS_GROUP",
    "vllm.plugins:DEFAULT_PLUGINS_GROUP",
)
"""What packaging metadata names, where no source of ours shows it."""


def their_base(sources: Sources, cls: Symbol) -> Symbol | None:
    """The nearest base of a class that is vLLM's."""
    return next((base for base in bases(sources, cls) if _is_theirs(base)), None)


def _is_theirs(symbol: Symbol | None) -> bool:
    return symbol is not None and symbol.module.split(".")[0] == THEIRS


class _ModuleUses(ast.NodeVisitor):
    """Walks one of our modules, statement by statement."""

    def __init__(self, sources: Sources, module: str) -> None:
        self.sources = sources
        self.types = Types(sources)
        self.module = module
        self.scope = Scope(module)
        self.uses: list[Use] = []

    def find(self) -> Iterator[Use]:
        tree = self.sources.tree(self.module)
        self.visit(tree)
        self.uses += _kernels(tree)
        return (replace(use, where=self.module) for use in self.uses)

    def _add(self, target: str, how: How, shape: Shape | None = None) -> None:
        self.uses.append(Use(target, how, "", shape))

    def visit_Import(self, node: ast.Import) -> None:
        for name, origin in imports_of(node, self.module, is_folder=False):
            self.scope.imports.setdefault(name, origin)
            if origin.split(".")[0] == THEIRS:
                self._add(origin, How.IMPORT)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name, origin in imports_of(node, self.module, is_folder=False):
            self.scope.imports.setdefault(name, origin)
            if origin.split(":")[0].split(".")[0] == THEIRS:
                self._add(origin, How.IMPORT)

    def visit_Try(self, node: ast.Try) -> None:
        """Of two imports of which one is there, the one that is."""
        branches = import_branches(node)
        if not branches:
            self.generic_visit(node)
            return
        there = [body for body in branches if all(map(self._exists, origins(body, self.module)))]
        for statement in (there or branches)[0]:
            self.visit(statement)

    def _exists(self, origin: str) -> bool:
        module, _, name = origin.partition(":")
        return self.sources.find(module, name) is not None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self.scope
        cls = Symbol(self.module, node.name, node)
        for base in node.bases:
            value = self.types.of(base, outer)
            if value is not None and value.kind == "class" and _is_theirs(value.symbol):
                self._add(str(value.symbol), How.SUBCLASS)
        self._overrides(cls)
        self.scope = Scope(self.module, dict(outer.names), dict(outer.imports), cls)
        self.generic_visit(node)
        self.scope = outer

    def _overrides(self, cls: Symbol) -> None:
        """Members of ours, or of our mixins, that vLLM's base has too."""
        base = their_base(self.sources, cls)
        if base is None:
            return
        for symbol in bases(self.sources, cls):
            if _is_theirs(symbol):
                continue
            for own in own_members(symbol):
                if own.setter is None and member(self.sources, base, own.name) is not None:
                    shape = bound_parameters(own.node) if isinstance(own.node, Function) else None
                    self._add(f"{base}.{own.name}", How.OVERRIDE, shape)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self.scope
        inner = Scope(self.module, dict(outer.names), dict(outer.imports), outer.cls)
        inner.names.update(self.types.arguments(node, inner))
        if outer.cls is not None and node.args.args:
            inner.names[node.args.args[0].arg] = Value("instance", outer.cls)
        self.scope = inner
        self.generic_visit(node)
        self.scope = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        value = self.types.of(node.value, self.scope)
        for target in node.targets:
            self._bind(target, value)
            self.visit(target)
            if isinstance(target, ast.Attribute) and target.attr == "__class__" and value:
                base = their_base(self.sources, value.symbol) if value.symbol else None
                if base is not None:
                    self._add(str(base), How.REPLACE)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, self.types.annotation(node.annotation, self.scope))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind_element(node.target, node.iter)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        for part in ast.walk(node.test):
            if isinstance(part, ast.Call) and ast.unparse(part.func) == "isinstance":
                value = self.types.of(part.args[1], self.scope)
                if value is not None and value.kind == "class":
                    self._bind(part.args[0], Value("instance", value.symbol))
        self.generic_visit(node)

    def _comprehension(self, node: ast.AST) -> None:
        for generator in getattr(node, "generators", ()):
            self._bind_element(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def _bind(self, target: ast.expr, value: Value | None) -> None:
        if isinstance(target, ast.Name):
            if value is None:
                self.scope.names.pop(target.id, None)
            else:
                self.scope.names[target.id] = value

    def _bind_element(self, target: ast.expr, iterable: ast.expr) -> None:
        outer = self.types.of(iterable, self.scope)
        self._bind(target, outer.element if outer and outer.kind == "container" else None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        target = self._target(node)
        if target is not None:
            self._add(target, How.READ)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.types.of(node.func, self.scope)
        if called is not None and called.kind == "class" and called.symbol is not None:
            self._construction(called.symbol, arguments(node))
        elif called is not None and called.kind == "function" and _is_theirs(called.symbol):
            self._add(str(called.symbol), How.CALL, arguments(node))
        elif isinstance(node.func, ast.Attribute):
            target = self._target(node.func)
            if target is not None:
                shape = arguments(node)
                self._add(
                    target, How.CALL, shape.bound() if self._passes_self(node.func) else shape
                )
                self.visit(node.func.value)
                for argument in [*node.args, *(k.value for k in node.keywords)]:
                    self.visit(argument)
                return
        self.generic_visit(node)

    def _passes_self(self, function: ast.Attribute) -> bool:
        """Whether a method is called on its class, with the instance as an argument."""
        outer, called = (self.types.of(node, self.scope) for node in (function.value, function))
        return (
            outer is not None
            and outer.kind == "class"
            and called is not None
            and called.member is not None
            and isinstance(called.member.node, Function)
            and not has_decorator(called.member.node, "staticmethod", "classmethod")
        )

    def _construction(self, cls: Symbol, shape: Shape) -> None:
        """Of a class of vLLM's, or of a dataclass of ours that inherits fields from one."""
        base = their_base(self.sources, cls)
        if base is None:
            return
        if base != cls:
            fields = dataclass_fields(self.sources, base)
            if fields is None or shape.positional:
                return
            shape = replace(shape, keywords=tuple(k for k in shape.keywords if k in fields))
        self._add(str(base), How.CONSTRUCT, shape)

    def _target(self, node: ast.Attribute) -> str | None:
        """``module:Class.member`` if the attribute is a member that vLLM defines."""
        outer = self.types.of(node.value, self.scope)
        if outer is None or outer.symbol is None:
            return None
        if outer.kind == "module" and _is_theirs(outer.symbol):
            found = self.sources.find(outer.symbol.module, node.attr)
            return str(found) if found and found.node is not None else None
        if outer.kind not in ("class", "instance"):
            return None
        found_member = member(self.sources, outer.symbol, node.attr)
        base = their_base(self.sources, outer.symbol)
        if found_member is None or base is None or not _is_theirs(found_member.owner):
            return None
        return f"{base}.{node.attr}"


def _kernels(tree: ast.Module) -> list[Use]:
    """The table ``KERNELS``: names of vLLM's kernels, and our function for each."""
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    uses = []
    for node in tree.body:
        if not (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "KERNELS"):
            continue
        assert isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            assert key is not None
            name = "".join(
                str(part.value) if isinstance(part, ast.Constant) else str(constants[part.id])
                for part in ([key.left, key.right] if isinstance(key, ast.BinOp) else [key])
                if isinstance(part, ast.Constant | ast.Name)
            )
            uses.append(
                Use(kernel_target(name), How.REPLACE, "", parameters(functions[ast.unparse(value)]))
            )
    return uses


def kernel_target(name: str) -> str:
    """A kernel's name in vLLM's dispatcher, as a target: a class is named with a capital."""
    outer, _, last = name.rpartition(".")
    module, _, cls = outer.rpartition(".")
    return f"{module}:{cls}.{last}" if cls[:1].isupper() else f"{outer}:{last}"
