"""Triton kernels for DeepSeek-V4 attention over rings. Needs torch and triton only."""
