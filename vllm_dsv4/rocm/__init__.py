"""DeepSeek-V4 on AMD cards: the platform, the model, and attention over rings by Triton kernels.

Read in this order: ``platform`` and ``checks`` (what vLLM asks first), ``model``, ``attention`` and
``compressor`` (where kernels are launched), ``backend`` (what a step needs, once for all layers),
``step`` and ``snapshots`` (its tensors at fixed addresses). May import ``kernels``, ``serving`` and
what lies below it; nothing of ``cpu``.
"""
