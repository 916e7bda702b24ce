"""Capacity of a DSV4 deployment before it is started: rings and vLLM's paged path, side by side.

Both sides come from vLLM's own planner, fed with the cache specs that the layers themselves
declare. No weights are loaded and no device is touched.
"""
