"""How all plots look. Two colours: the paged path's and the rings'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"paged": "#8a8f98", "rings": "#d1495b"}
LABELS = {"paged": "vLLM's paged path", "rings": "rings"}

plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.axisbelow": True,
        "figure.dpi": 110,
        "legend.frameon": False,
    }
)


def panels(columns: int, title: str, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure of ``rows * columns`` axes, in reading order."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.9 * rows), squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=13)
    return figure, [axis for row in axes for axis in row]


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def paired_bars(
    axis: Any,
    names: list[str],
    paged: list[float],
    rings: list[float],
    ratios: list[float] | None = None,
) -> None:
    """One pair of bars a name, with its ratio (rings / paged if not given) above the rings' bar."""
    width = 0.38
    for offset, side, values in ((-0.5, "paged", paged), (0.5, "rings", rings)):
        where = [n + offset * width for n in range(len(names))]
        axis.bar(where, values, width, color=COLOURS[side], label=LABELS[side])
    top = max([*paged, *rings])
    ratios = ratios or [b / a if a else 0 for a, b in zip(paged, rings, strict=True)]
    for n, (b, ratio) in enumerate(zip(rings, ratios, strict=True)):
        if ratio:
            axis.text(n + 0.5 * width, b + 0.015 * top, f"{ratio:.2f}x", ha="center", fontsize=9)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylim(0, 1.12 * top)
