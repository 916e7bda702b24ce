"""Each workaround has a test here that fails once vLLM needs it no longer: then remove it."""
