"""What ``vllm-dsv4`` runs: by hand, never while serving.

``cli`` has one module a subcommand; each of the other folders is what one of them does. May import
everything; nothing imports it.
"""
