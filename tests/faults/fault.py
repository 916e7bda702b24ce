"""What a deliberate fault is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Fault:
    """One change of the source that must make one test fail.

    Attributes:
        invariant: what it breaks, as in ``docs/rings.md``.
        words: what is wrong, for a reader.
        killed_by: ``path::name`` of the cheapest test that fails.
        changes: file, and what takes the place of which text, which stands there once.
    """

    invariant: str
    words: str
    killed_by: str
    changes: tuple[tuple[str, str, str], ...]

    def apply(self, root: Path) -> None:
        """Change the sources under ``root``.

        Raises:
            ValueError: a text is not there exactly once, or what it becomes is no Python.
        """
        for name, old, new in self.changes:
            path = root / name
            source = path.read_text()
            if source.count(old) != 1:
                raise ValueError(f"{name} has {source.count(old)} times: {old!r}")
            changed = source.replace(old, new)
            compile(changed, name, "exec")
            path.write_text(changed)

    def undo(self, root: Path) -> None:
        for name, _, _ in self.changes:
            (root / name).write_text((ROOT / name).read_text())


def fault(invariant: str, words: str, killed_by: str, *changes: tuple[str, str, str]) -> Fault:
    return Fault(invariant, words, killed_by, changes)


def as_markdown(faults: Sequence[Fault]) -> str:
    """The table of ``docs/robustness.md``."""
    rows = [f"| {one.invariant} | {one.words} | `{one.killed_by}` |" for one in faults]
    return "\n".join(["| invariant | fault | killed by |", "|---|---|---|", *rows])
