"""Kernels compiled to AMD machine code without a card, and what the assembly says of them."""
