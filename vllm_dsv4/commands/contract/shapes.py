"""How calls, functions and overrides look."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from vllm_dsv4.commands.contract.classes import Function, has_decorator


@dataclass(frozen=True, order=True)
class Shape:
    """How a call or an override looks.

    Attributes:
        positional: arguments by position; for an override, the parameters it takes, in order.
        keywords: arguments by name; for an override, its keyword-only parameters.
        open_ended: ``*args`` or ``**kwargs`` are passed on, or taken.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    open_ended: bool = False

    def bound(self) -> Shape:
        """Without ``self``."""
        return Shape(self.positional[1:], self.keywords, self.open_ended)


def parameters(function: Function) -> Shape:
    """A function's parameters; a trailing ``=`` marks a default."""
    args = function.args
    positional = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    required = len(positional) - len(args.defaults)
    return Shape(
        tuple(n if i < required else f"{n}=" for i, n in enumerate(positional)),
        tuple(
            arg.arg if default is None else f"{arg.arg}="
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        ),
        args.vararg is not None or args.kwarg is not None,
    )


def bound_parameters(method: Function) -> Shape:
    """A method's parameters as its callers see them."""
    shape = parameters(method)
    return shape if has_decorator(method, "staticmethod") else shape.bound()


def arguments(call: ast.Call) -> Shape:
    starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    return Shape(
        tuple(
            str(index) for index, arg in enumerate(call.args) if not isinstance(arg, ast.Starred)
        ),
        tuple(sorted(k.arg for k in call.keywords if k.arg is not None)),
        starred or any(k.arg is None for k in call.keywords),
    )
