"""What rings buy, measured against vLLM's paged path in the same run."""
