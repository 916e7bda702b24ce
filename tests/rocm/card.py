"""What vLLM's ROCm modules ask of a card before any kernel runs: the rehearsal's stand-in."""

from __future__ import annotations

from vllm_dsv4.commands.rehearse import card, library

ARCH = "gfx950"


def pretend_card() -> None:
    """Answer the questions that are asked when vLLM's ROCm modules are imported and built."""
    library.install()
    card.questions(ARCH)
