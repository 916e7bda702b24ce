"""DeepSeek-V4's CPU operators for processors that vLLM's own library was not built for.

The CPU build of vLLM has them for AVX-512 with bf16 only; elsewhere its model ends while weights
are loaded (``'_OpNamespace' '_C' object has no attribute 'convert_weight_packed'``).
``operators.c`` computes the same in plain C, compiled once a machine for the processor at hand;
``products`` keeps linear layers fast where torch has no bf16 products. Both rings and vLLM's paged
path run on them.
"""
