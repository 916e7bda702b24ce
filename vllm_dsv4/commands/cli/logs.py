"""Keeps vLLM's log out of what a subcommand prints."""

import logging
import os
import warnings


def quiet_vllm() -> None:
    """Errors only, and on stderr, unless the user asked otherwise. Call before vLLM is imported."""
    if os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR":
        # vLLM reads the variable only when it starts an engine.
        logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    warnings.simplefilter("ignore", FutureWarning)
