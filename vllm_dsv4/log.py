"""Loggers that speak through vLLM's own handler."""

from __future__ import annotations

from typing import Any


def get_logger(name: str) -> Any:
    """A vLLM logger. vLLM configures names below ``vllm`` only; others lose their INFO lines."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.{name}")
