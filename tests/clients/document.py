"""``docs/clients.md``, made from what two servers answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.clients.asking import Reply
from tests.clients.cells import Cell

SAME = "as on the paged path"
LIMIT = "vLLM's own limit"
REFUSED = "refused on rings"

HEAD = """\
# What clients send

Made by `tests/clients/test_clients.py` (`CLIENTS_DOC=write` writes it): each line was sent to two
servers of vLLM 0.32 with the same small model, one on rings, one on vLLM's paged path. "As on the
paged path": both answered, with the same fields; what the fields say depends on the model. "vLLM's
own limit": both refused, with the same message. Whether tokens are equal is for the tests of
exactness.

"""


@dataclass(frozen=True)
class Verdict:
    """What a cell came to. ``fault`` says what differs where nothing may; empty if nothing does."""

    kind: str
    words: str = ""
    fault: str = ""


def verdict(rings: Reply, paged: Reply) -> Verdict:
    if rings == paged:
        if rings.status == 200 and not rings.error:
            return Verdict(SAME)
        return Verdict(LIMIT, f"{rings.status}: {rings.error}")
    if paged.status == 200 and 400 <= rings.status < 500:
        return Verdict(REFUSED, f"{rings.status}: {rings.error}")
    return Verdict("", fault=f"rings {rings}, paged {paged}")


def document(cells: Sequence[Cell], verdicts: Sequence[Verdict], absurd: Sequence[str]) -> str:
    """One table a group, one line a feature, the endpoints that agree named together."""
    text = HEAD
    for group in dict.fromkeys(cell.group for cell in cells):
        lines: dict[tuple[str, str], list[str]] = {}
        for cell, found in zip(cells, verdicts, strict=True):
            if cell.group == group:
                words = f"{found.kind} ({found.words})" if found.words else found.kind
                lines.setdefault((cell.name, words.replace("|", "\\|")), []).append(cell.where)
        text += f"## {group}\n\n| request | endpoints | on rings |\n|---|---|---|\n"
        text += "".join(
            f"| {name} | {', '.join(where)} | {words} |\n" for (name, words), where in lines.items()
        )
        text += "\n"
    return text + "## Absurd values\n\n" + "".join(f"- {line}\n" for line in absurd)


def absurd_lines(cells: Sequence[Cell], verdicts: Sequence[Verdict]) -> list[str]:
    """How many came to what, and which vLLM answers with a fault of its own (status 500)."""
    kinds = [found.kind for found in verdicts]
    lines = [f"{kinds.count(kind)} requests: {kind}" for kind in dict.fromkeys(kinds)]
    pairs = zip(cells, verdicts, strict=True)
    own = [f"`{cell.name}`" for cell, found in pairs if found.words.startswith("500")]
    return [*lines, f"of these, answered with status 500 on both: {', '.join(own)}"]
