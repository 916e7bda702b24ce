"""Workarounds for vLLM: one a file, each with its reason and the condition for its removal."""
