"""What an expression is, as far as annotations and constructor calls tell."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_dsv4.commands.contract.classes import Function, Member, bases, has_decorator, member
from vllm_dsv4.commands.contract.source import Sources, Symbol

_WRAPPERS = ("Optional", "ClassVar", "Final", "Annotated", "Required")
_KEYED = ("dict", "Mapping", "OrderedDict", "defaultdict")
_WHOLE, _ONE = ("values", "copy"), ("get", "pop", "popleft", "setdefault")
_LISTED = ("list", "Sequence", "Iterable", "Iterator", "tuple", "set", "frozenset", "deque")


@dataclass(frozen=True)
class Value:
    """What is known of an expression.

    Attributes:
        kind: a module, a class itself, an instance of it, a function or bound method, or a
            container of ``element``.
        symbol: module, class or function.
        member: for a method, where it was found.
        element: what iterating or indexing gives.
    """

    kind: Literal["module", "class", "instance", "function", "method", "container"]
    symbol: Symbol | None = None
    member: Member | None = None
    element: Value | None = None


@dataclass
class Scope:
    """Names that an expression may use.

    Attributes:
        module: where it stands.
        names: local variables.
        imports: what functions imported, as ``module:name``.
        cls: class of ``self`` and of ``super()``.
    """

    module: str
    names: dict[str, Value] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    cls: Symbol | None = None


class Types:
    """Answers from the sources of several packages."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._busy: set[tuple[Symbol, str]] = set()

    def of(self, node: ast.expr, scope: Scope) -> Value | None:
        """The value of an expression, or None where nothing tells."""
        if isinstance(node, ast.Name):
            return self._name(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self.attribute(self.of(node.value, scope), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Subscript):
            outer = self.of(node.value, scope)
            if outer is not None and outer.kind == "class":
                return outer
            return outer.element if outer else None
        if isinstance(node, ast.IfExp):
            return self.of(node.body, scope) or self.of(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return next(filter(None, (self.of(value, scope) for value in node.values)), None)
        return None

    def attribute(self, outer: Value | None, name: str) -> Value | None:
        """The value of ``outer.name``."""
        if outer is None or outer.symbol is None:
            return None
        if outer.kind == "module":
            return self.symbol(self.sources.find(outer.symbol.module, name))
        if outer.kind not in ("class", "instance"):
            return None
        found = member(self.sources, outer.symbol, name)
        return self._member(found, outer.symbol) if found else None

    def symbol(self, symbol: Symbol | None) -> Value | None:
        """The value of a module's global."""
        if symbol is None:
            return None
        if symbol.node is None:
            return Value("module", symbol)
        if isinstance(symbol.node, ast.ClassDef):
            return Value("class", symbol)
        if isinstance(symbol.node, Function):
            return Value("function", symbol)
        if isinstance(symbol.node, ast.AnnAssign):
            return self.annotation(symbol.node.annotation, Scope(symbol.module))
        return self.of(symbol.node.value, Scope(symbol.module))

    def annotation(self, node: ast.expr | None, scope: Scope) -> Value | None:
        """The instance that an annotation promises."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotation(ast.parse(node.value, mode="eval").body, scope)
        if isinstance(node, ast.BinOp):
            return self.annotation(node.left, scope) or self.annotation(node.right, scope)
        if isinstance(node, ast.Subscript):
            return self._generic(node, scope)
        if isinstance(node, ast.Name) and node.id == "Self" and scope.cls:
            return Value("instance", scope.cls)
        if isinstance(node, ast.Name | ast.Attribute):
            named = self.of(node, scope)
            if named is not None and named.kind == "class":
                return Value("instance", named.symbol)
            return named if named is not None and named.kind == "container" else None
        return None

    def arguments(self, function: Function, scope: Scope) -> Mapping[str, Value]:
        """What the annotated parameters of a function are."""
        args = function.args
        found = {
            arg.arg: self.annotation(arg.annotation, scope)
            for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]
        }
        return {name: value for name, value in found.items() if value is not None}

    def _name(self, name: str, scope: Scope) -> Value | None:
        if name in scope.names:
            return scope.names[name]
        if name in scope.imports:
            module, _, inner = scope.imports[name].partition(":")
            return self.symbol(
                self.sources.find(module, inner) if inner else Symbol(module, "", None)
            )
        return self.symbol(self.sources.find(scope.module, name))

    def _generic(self, node: ast.Subscript, scope: Scope) -> Value | None:
        outer = node.value.attr if isinstance(node.value, ast.Attribute) else ""
        outer = node.value.id if isinstance(node.value, ast.Name) else outer
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in _WRAPPERS:
            return self.annotation(inside[0], scope)
        if outer in ("type", "Type"):
            instance = self.annotation(inside[0], scope)
            return Value("class", instance.symbol) if instance else None
        if outer in _LISTED or outer in _KEYED:
            element = self.annotation(inside[-1] if outer in _KEYED else inside[0], scope)
            return Value("container", element=element) if element else None
        return self.annotation(node.value, scope)

    def _call(self, node: ast.Call, scope: Scope) -> Value | None:
        if isinstance(node.func, ast.Name) and node.func.id == "cast" and node.args:
            return self.annotation(node.args[0], scope)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and scope.cls:
            inherited = bases(self.sources, scope.cls)[1:]
            return Value("instance", inherited[0]) if inherited else None
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            *_WHOLE,
            *_ONE,
        ):
            outer = self.of(node.func.value, scope)
            if outer is not None and outer.kind == "container":
                return outer if node.func.attr in _WHOLE else outer.element
        called = self.of(node.func, scope)
        if called is None or called.symbol is None:
            return None
        if called.kind == "class":
            return Value("instance", called.symbol)
        if called.kind == "function":
            assert isinstance(called.symbol.node, Function)
            return self.annotation(called.symbol.node.returns, Scope(called.symbol.module))
        if called.kind == "method" and called.member is not None:
            assert isinstance(called.member.node, Function)
            owner = called.member.owner
            return self.annotation(
                called.member.node.returns, Scope(owner.module, cls=called.symbol)
            )
        return None

    def _member(self, found: Member, cls: Symbol) -> Value | None:
        key = (found.owner, found.name)
        if key in self._busy:
            return None
        self._busy.add(key)
        try:
            return self._member_value(found, cls)
        finally:
            self._busy.discard(key)

    def _member_value(self, found: Member, cls: Symbol) -> Value | None:
        scope = Scope(found.owner.module, cls=cls)
        node = found.node
        if isinstance(node, Function):
            if has_decorator(node, "property", "cached_property"):
                return self.annotation(node.returns, scope)
            return Value("method", cls, found)
        if found.setter is not None:
            scope.names.update(self.arguments(found.setter, scope))
        if isinstance(node, ast.AnnAssign):
            return self.annotation(node.annotation, scope)
        if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Tuple):
            return self.of(node.value, scope)
        return None
