"""What went wrong, in one line."""

from __future__ import annotations

import re

MISSING = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'")


def one_line(error: BaseException) -> str:
    """The first cause of a chain, named: an operator by its name, a refusal by its flag."""
    for cause in _chain(error):
        missing = MISSING.search(str(cause))
        if missing:
            return (
                f"operator torch.ops.{missing[1]}.{missing[2]} is missing: this vLLM's CPU build "
                "lacks it, and commands/rehearse/operators.py has no counterpart"
            )
    first = list(_chain(error))[-1]
    return f"{type(first).__name__}: {' '.join(str(first).split())[:600]}"


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, the root last."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    return chain
