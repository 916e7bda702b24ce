"""What a part of vLLM looks like from outside, and a digest of what is inside."""

from __future__ import annotations

import ast
import copy
import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm_dsv4.commands.contract.classes import (
    Function,
    Member,
    bases,
    dataclass_fields,
    has_decorator,
    is_dataclass,
    member,
    own_members,
)
from vllm_dsv4.commands.contract.shapes import Shape, bound_parameters, parameters
from vllm_dsv4.commands.contract.source import Sources, Symbol


@dataclass(frozen=True)
class Face:
    """One part of vLLM.

    Attributes:
        kind: module, class, function, method, property, attribute or constant.
        shape: parameters of a function, a method (without ``self``) or a constructor.
        fields: of a dataclass, in order.
        digest: of the code of a function, method, property or constant.
        members: of a class whose members were asked for: each with its digest.
    """

    kind: str
    shape: Shape | None = None
    fields: tuple[str, ...] | None = None
    digest: str = ""
    members: dict[str, str] = field(default_factory=dict)


class Detail(Enum):
    """How much of a part matters: that its name is there, its face, or all members of a class."""

    NAME = 1
    FACE = 2
    MEMBERS = 3


def face_of(sources: Sources, target: str, detail: Detail = Detail.FACE) -> Face | None:
    """The face of ``module:Name`` or ``module:Class.member``; None if it is not there."""
    face = _face(sources, target, detail)
    return Face(face.kind) if face is not None and detail is Detail.NAME else face


def _face(sources: Sources, target: str, detail: Detail) -> Face | None:
    module, _, path = target.partition(":")
    if not path:
        return Face("module") if sources.has_module(module) else None
    name, _, inner = path.partition(".")
    symbol = sources.find(module, name)
    if symbol is None:
        return None
    if inner:
        if not isinstance(symbol.node, ast.ClassDef):
            return None
        found = member(sources, symbol, inner)
        return _member_face(found) if found else None
    if isinstance(symbol.node, ast.ClassDef):
        return _class_face(sources, symbol, detail)
    if isinstance(symbol.node, Function):
        return Face("function", parameters(symbol.node), digest=_digest(symbol.node))
    if symbol.node is None:
        return Face("module")
    return Face("constant", digest=_digest(symbol.node))


def _class_face(sources: Sources, cls: Symbol, detail: Detail) -> Face:
    fields = dataclass_fields(sources, cls)
    members: dict[str, str] = {}
    if detail is Detail.MEMBERS:
        for symbol in bases(sources, cls):
            for found in own_members(symbol):
                inside = _digest(found.node) if isinstance(found.node, Function) else ""
                members.setdefault(found.name, inside)
    return Face(
        "class",
        _constructor(sources, cls),
        tuple(fields) if fields is not None else None,
        members=dict(sorted(members.items())),
    )


def _constructor(sources: Sources, cls: Symbol) -> Shape | None:
    for symbol in bases(sources, cls):
        assert isinstance(symbol.node, ast.ClassDef)
        for found in own_members(symbol):
            if found.name == "__init__" and isinstance(found.node, Function):
                return parameters(found.node).bound()
        if is_dataclass(symbol.node):
            fields = dataclass_fields(sources, cls) or {}
            return Shape(tuple(f"{name}=" if default else name for name, default in fields.items()))
    return None


def _member_face(found: Member) -> Face:
    node = found.node
    if not isinstance(node, Function):
        return Face("class" if isinstance(node, ast.ClassDef) else "attribute")
    if has_decorator(node, "property", "cached_property"):
        return Face("property", digest=_digest(node))
    return Face("method", bound_parameters(node), digest=_digest(node))


def _digest(node: ast.AST) -> str:
    """Of the code: neither comments nor docstrings nor layout change it."""
    bare = copy.deepcopy(node)
    for inner in ast.walk(bare):
        body: Any = getattr(inner, "body", None)
        if isinstance(inner, Function | ast.ClassDef) and ast.get_docstring(inner) is not None:
            inner.body = body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(bare).encode()).hexdigest()[:10]
