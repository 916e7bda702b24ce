"""The error that names a flag, its value, the reason and the remedy."""

from __future__ import annotations

PAGED_PATH = "or serve without rings with VLLM_DSV4_RING=0"
"""The remedy that always exists."""


class Refusal(ValueError):
    """A configuration that the rings refuse."""

    def __init__(self, flag: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{flag}={value}: {reason}. {remedy}.")
        self.flag = flag
        self.value = value
