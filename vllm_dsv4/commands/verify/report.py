"""The report: one Markdown file that can be attached to an issue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata

import torch

from vllm_dsv4.commands.verify.device import Card
from vllm_dsv4.commands.verify.result import Result
from vllm_dsv4.commands.verify.speed import Speed

DISTRIBUTIONS = ("vllm-dsv4", "vllm", "torch", "triton", "pytorch-triton-rocm")


@dataclass
class Report:
    """Everything that was found on one card.

    Attributes:
        copy_gb_per_s: a plain copy, reads and writes; None where speed was not measured.
        speed_note: why it was not, or what of it is missing.
    """

    card: Card
    results: Sequence[Result]
    copy_gb_per_s: float | None = None
    speeds: Sequence[Speed] = field(default_factory=list)
    speed_note: str = ""

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if not result.passed]

    def summary(self) -> str:
        """One line for the terminal."""
        passed = len(self.results) - len(self.failures)
        return f"{passed} of {len(self.results)} checks passed on {self.card.name}"

    def markdown(self) -> str:
        return "\n\n".join(
            [
                f"# vllm-dsv4 verify: {self.summary()}",
                self._environment(),
                "## Correctness",
                _table(
                    ("kernel", "case", "error", "limit", "measure", ""),
                    [
                        (
                            one.kernel,
                            one.case,
                            f"{one.error:.3g}",
                            f"{one.limit:.3g}",
                            one.measure,
                            "" if one.passed else f"FAILED {one.note}".strip(),
                        )
                        for one in self.results
                    ],
                ),
                "## Decode speed",
                self._speed(),
                "",
            ]
        )

    def _environment(self) -> str:
        card = self.card
        lines = [
            f"- card: {card.name}, {card.arch}, {card.compute_units} compute units, "
            f"{card.memory_bytes / 2**30:.0f} GiB",
            f"- window rows: {card.fp8}",
            f"- HIP {torch.version.hip}, CUDA {torch.version.cuda}",
            *(f"- {name} {_version(name)}" for name in DISTRIBUTIONS),
        ]
        if not card.is_supported:
            lines.append(
                f"- DeepSeek-V4 is not served on {card.arch}; its kernels ran all the same"
            )
        return "\n".join(lines)

    def _speed(self) -> str:
        if self.copy_gb_per_s is None:
            return f"Not measured: {self.speed_note}"
        rows = [
            (
                str(one.batch),
                str(one.heads),
                str(one.compressed),
                f"{one.ours_us:.1f}",
                f"{one.gb_per_s:.0f}",
                f"{one.gb_per_s / self.copy_gb_per_s:.0%}",
                "-" if one.vllm_us is None else f"{one.vllm_us:.1f}",
                "-" if one.vllm_us is None else f"{one.vllm_us / one.ours_us:.2f}",
            )
            for one in self.speeds
        ]
        heading = ("tokens", "heads", "compressed rows", "µs", "GB/s", "of a copy")
        return (
            f"A copy of 1 GiB moves {self.copy_gb_per_s:.0f} GB/s. {self.speed_note}".strip()
            + "\n\n"
            + _table((*heading, "vLLM's kernel, µs", "times ours"), rows)
        )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
