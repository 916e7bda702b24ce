"""Subcommands of the ``vllm-dsv4`` console script, one module each."""
