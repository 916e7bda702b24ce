"""Checks of the kernels on a card, run by its owner: correctness, then speed, in one report."""
