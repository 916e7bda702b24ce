"""Names that our subclasses add to vLLM's classes: a name that vLLM takes too is a collision."""

from __future__ import annotations

import ast

from vllm_dsv4.commands.contract.classes import bases, member, own_members
from vllm_dsv4.commands.contract.source import Sources, Symbol
from vllm_dsv4.commands.contract.uses import OURS, their_base


def own_members_by_base(sources: Sources) -> dict[str, tuple[str, ...]]:
    """Each vLLM class that we subclass, with the names that we add to it."""
    added: dict[str, set[str]] = {}
    for module in sources.packages[OURS].modules():
        for node in ast.walk(sources.tree(module)):
            if not isinstance(node, ast.ClassDef):
                continue
            cls = Symbol(module, node.name, node)
            base = their_base(sources, cls)
            if base is None:
                continue
            for symbol in bases(sources, cls):
                if symbol.module.split(".")[0] == OURS:
                    added.setdefault(str(base), set()).update(
                        found.name
                        for found in own_members(symbol)
                        if member(sources, base, found.name) is None
                    )
    return {base: tuple(sorted(names)) for base, names in sorted(added.items())}
