"""The whole ROCm engine on CPU tensors: vLLM's own worker and runner, our platform, no card."""
