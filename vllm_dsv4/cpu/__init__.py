"""DeepSeek-V4 on vLLM's CPU build: where everything but the card can be run and compared.

Read in this order: ``platform``, ``model`` and ``draft``, ``attention`` and ``compressor``,
``backend`` (what a step needs), ``index_plan`` and ``staging`` (which rows a step reads and
writes). ``paged_model`` serves on vLLM's own path, for comparison. May import ``serving`` and what
lies below it; nothing of ``rocm``.
"""
