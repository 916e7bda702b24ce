"""Small random DeepSeek-V4 checkpoints in the released names, config and number formats."""
