"""Small random DeepSeek-V4 checkpoints in the released names, config and number formats, and
the check of any checkpoint before it is served. May import ``ring`` and the ground floor.
"""
