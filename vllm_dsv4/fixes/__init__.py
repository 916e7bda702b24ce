"""Workarounds for vLLM: one a file, each with its reason and the condition for its removal.

Each stands alone: it may import the ground floor (``log``, ``settings``, ``versions``) only.
"""
