"""Runs benchmarks by name: measures, draws, and writes a document from the JSON."""

from __future__ import annotations

import json
import platform
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

BENCHMARKS = ("planner", "scheduler", "cost", "engine", "prefix")

FOLDER = Path("benchmarks-of-vllm-dsv4")
"""Where JSON and plots go, under the working directory; the document lies beside it."""


class UnknownBenchmark(ValueError):
    """No benchmark of that name."""


def run(names: list[str], quick: bool, folder: Path = FOLDER) -> None:
    """Run benchmarks and renew the document.

    Raises:
        UnknownBenchmark: before anything ran.
        AssertionError: a correctness check failed; nothing of that benchmark is written.
    """
    for name in names:
        if name not in BENCHMARKS:
            raise UnknownBenchmark(
                f"NAME {name!r}: no such benchmark. Use any of {', '.join(BENCHMARKS)}."
            )
    from vllm_dsv4.commands.bench.document import write_document
    from vllm_dsv4.commands.bench.draw import DRAW

    folder.mkdir(parents=True, exist_ok=True)
    for name in names or BENCHMARKS:
        print(f"\n{name}", flush=True)
        module = import_module(f"vllm_dsv4.commands.bench.{name}")
        data = {"benchmark": name, "quick": quick, "conditions": conditions()}
        data |= module.measure(quick)
        data["plots"] = DRAW[name](data, folder)
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    document = write_document(folder)
    print(f"\nwritten: {folder}, {document}")


def conditions() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = ("vllm", "torch", "vllm-dsv4")
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
