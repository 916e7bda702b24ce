"""A demonstration: a small model served on rings and on vLLM's own paged path, side by side."""
