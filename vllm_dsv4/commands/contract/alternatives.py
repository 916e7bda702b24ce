"""Names that our source takes from one of several places, whichever this vLLM has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from vllm_dsv4.commands.contract.source import Sources, imports_of


def import_branches(node: ast.Try) -> list[list[ast.stmt]]:
    """The bodies of ``try: import ... except ImportError: import ...``; none for other code."""
    handlers = [h for h in node.handlers if h.type and ast.unparse(h.type) == "ImportError"]
    bodies = [node.body, *(handler.body for handler in handlers)]
    only_imports = all(isinstance(s, ast.Import | ast.ImportFrom) for body in bodies for s in body)
    return bodies if handlers and only_imports else []


def origins(body: list[ast.stmt], module: str) -> Iterator[str]:
    """``module:name`` of every name that a branch imports."""
    for statement in body:
        for _, origin in imports_of(statement, module, is_folder=False):
            yield origin


def alternatives(sources: Sources, ours: str) -> dict[str, str]:
    """Each place, as ``module`` or ``module:name``, with the other place for the same name."""
    found: dict[str, str] = {}
    for module in sources.packages[ours].modules():
        for node in ast.walk(sources.tree(module)):
            if not isinstance(node, ast.Try):
                continue
            branches = [list(origins(body, module)) for body in import_branches(node)]
            for one, other in pairwise(branches):
                for a, b in zip(one, other, strict=False):
                    a, b = (
                        _module_form(sources, origin, pair) for origin, pair in ((a, b), (b, a))
                    )
                    found |= {a: b, b: a}
    return dict(sorted(found.items()))


def _module_form(sources: Sources, origin: str, other: str) -> str:
    """``package.module`` where what is imported, here or in the other place, is a module."""
    dotted, other_dotted = origin.replace(":", "."), other.replace(":", ".")
    is_module = sources.has_module(dotted) or sources.has_module(other_dotted)
    return dotted if is_module else origin
