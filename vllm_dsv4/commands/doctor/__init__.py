"""Says whether the plugin serves DSV4 in this environment, and if not, why."""
