"""The names under which vLLM looks up the models that rings serve."""

ARCHITECTURE = "DeepseekV4ForCausalLM"
DRAFT_ARCHITECTURE = "DeepSeekV4MTPModel"

VISION_ARCHITECTURE = "DeepseekV4ForConditionalGeneration"
"""What vLLM makes of ``ARCHITECTURE`` where ``config.json`` has a vision tower. It looks its
language model up under ``ARCHITECTURE``, and so would have one on rings: refused."""
