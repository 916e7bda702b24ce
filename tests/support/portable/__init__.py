"""vLLM's CPU operators for DeepSeek-V4 on processors that its own library was not built for.

The CPU build of vLLM has these operators for AVX-512 with bf16 only. ``operators.c`` computes the
same in plain C, which any compiler can build for the processor at hand, and which rounds in another
order: engines run on more machines, under other arithmetic. Test support: nothing that is installed
uses it.
"""
