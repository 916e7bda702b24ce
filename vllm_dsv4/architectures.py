"""The names under which vLLM looks up the models that rings serve."""

ARCHITECTURE = "DeepseekV4ForCausalLM"
DRAFT_ARCHITECTURE = "DeepSeekV4MTPModel"
