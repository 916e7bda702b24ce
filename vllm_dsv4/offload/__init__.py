"""Prefix cache beyond the card: pages and snapshots in host memory and on disk.

A boundary counts only with both, its pages and its snapshot. ``scheduler`` decides what is kept and
loaded, ``worker`` moves bytes, ``connector`` is what vLLM sees of both. May import ``ring``.
"""
